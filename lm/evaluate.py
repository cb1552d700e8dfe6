"""What a language model is worth: `python -m lm.evaluate --checkpoint RUN [--data.source TEXT | --tasks NAMES] ..`.

Without --tasks: loss, perplexity and bits per byte of text, by default of the run's own validation text. Documents are
read whole, through a window that slides over each: all of its tokens, and the end-of-text behind them, are predicted
once, from at least window - stride tokens before where there are as many; an end-of-text stands before the first.
Bits per byte are the bits of all these predictions over the UTF-8 bytes of the documents' text.

With --tasks: tasks of lm-evaluation-harness (pip install 'moa-pretrain[eval]'). The paper's Table 3 is
--tasks arc_challenge,hellaswag,openbookqa,winogrande, zero-shot; the average is that of acc_norm of the first three and
acc of the last. The YAML of a task may hold Python, which the harness executes: --include_path only what you trust.
"""

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from lm.data.module import TextData
from lm.data.whole import TextSource, open_documents
from lm.evaluation import Precision, WindowScorer, evaluate_text
from lm.module import LanguageModule
from pretrain.arguments import OneLineParser
from pretrain.checkpoint import find_checkpoint
from pretrain.cli import quieten_libraries
from pretrain.devices import choose_device
from pretrain.errors import UserError, command
from pretrain.paths import output_path
from pretrain.reload import load_module
from pretrain.run import beside_run, write_json

FACTS = ("checkpoint", "window", "limit", "device", "dtype")  # what every evaluation says about itself
LARGEST = 2**24  # bytes of a file that may be an earlier evaluation; they have some thousands


def evaluate(
    checkpoint: str,
    data: TextSource,
    tasks: str | None = None,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
    batch_size: int = 8,
    device: str = "auto",
    dtype: Precision = "float32",
    output: str | None = None,
) -> None:
    """Print what a model is worth, and write it as JSON.

    Args:
        checkpoint: Folder of a run, one of its checkpoints, or a folder of runs: the one that has saved last.
        data: Text to evaluate on.
        tasks: Tasks of lm-evaluation-harness instead, with commas between them.
        window: Most tokens that the model sees at once; the run's data.sequence_length when not given.
        stride: Tokens by which the window moves on; half the window when not given.
        limit: Documents, or examples of each task, after which to stop.
        num_fewshot: Examples before each question of a task.
        include_path: A folder of your own task YAMLs.
        batch_size: Windows, or requests of a task, per forward pass.
        device: auto, cpu, cuda or cuda:N.
        dtype: float32, or bfloat16 as in training with bf16-mixed.
        output: The JSON file, in the place of an earlier evaluation. When not given, evaluation.json in the folder of
            the run; for tasks, evaluation_tasks.json.
    """
    at_least(1, window=window, stride=stride, limit=limit, batch_size=batch_size)
    at_least(0, num_fewshot=num_fewshot)
    given = {name: value for name, value in asdict(data).items() if value is not None}
    if tasks is None:
        refuse("goes with --tasks", num_fewshot=num_fewshot, include_path=include_path)
    else:
        about_text = {f"data.{name}": value for name, value in given.items() if name != "tokenizer"}
        refuse("is about text, not about --tasks", stride=stride, **about_text)
        harness = import_harness()
    weights = find_checkpoint(checkpoint)
    name = "evaluation.json" if tasks is None else "evaluation_tasks.json"
    file = output_path(beside_run(weights, name) if output is None else output)
    check_output(file)
    module, run = load_module(LanguageModule, weights, data_class=TextData)
    text = TextData(**run["data"] | given)
    module.check_data(text)
    length = window or text.sequence_length
    place = choose_device(device)
    model: Any = module.model
    model.to(place)
    facts = dict(zip(FACTS, (str(weights), length, limit, str(place), dtype), strict=True))
    if tasks is None:
        stride = stride or max(1, length // 2)
        if stride > length:
            raise UserError(f"--stride {stride} would leave tokens out: give at most the window's {length}")
        scorer = WindowScorer(model, batch_size, text.tokenizer.n_vocab, dtype)
        documents = open_documents(text, data.source)
        found = evaluate_text(scorer, documents, text.tokenizer.eot, length, stride, limit)
        report = found.report()
        result = facts | {"stride": stride, "tokenizer": text.tokenizer.name, **found.as_dict()}
    else:
        adapter = harness.HarnessModel(model, text.tokenizer, length, batch_size, dtype)
        result = harness.run_tasks(adapter, tasks, include_path=include_path, num_fewshot=num_fewshot, limit=limit)
        report = harness.report(result)
        result["config"]["model_args"] = facts
    print(report)
    try:
        write_json(file, result)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): give another --output") from error
    print(f"written to {file}")


def check_output(file: Path) -> None:
    """Raise a UserError unless `file` is new or an earlier evaluation."""
    if file.is_dir():
        raise UserError(f"--output {file} is a folder: give the name of a file")
    if file.exists() and not (file.is_file() and is_evaluation(file)):
        raise UserError(f"--output {file} exists and is no earlier evaluation: give another name, or move it away")


def is_evaluation(file: Path) -> bool:
    """Whether a file holds what `evaluate` writes, about text or about tasks."""
    try:
        with open(file, encoding="utf-8") as stream:
            found = json.loads(stream.read(LARGEST))
    except (OSError, ValueError, RecursionError):
        return False
    config = found.get("config") if isinstance(found, dict) else None
    facts = config.get("model_args") if isinstance(config, dict) else found
    return isinstance(facts, dict) and facts.keys() >= set(FACTS)


def at_least(least: int, **options: int | None) -> None:
    """Raise a UserError for a number that is too small."""
    for name, value in options.items():
        if value is not None and value < least:
            raise UserError(f"--{name} is {value}: it has to be at least {least}")


def refuse(reason: str, **options: Any) -> None:
    """Raise a UserError for an option that is given and would have no effect."""
    for name, value in options.items():
        if value is not None:
            raise UserError(f"--{name} {reason}: leave it out")


def import_harness() -> ModuleType:
    """Import what only --tasks needs."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UserError("--tasks needs lm-evaluation-harness: pip install 'moa-pretrain[eval]'") from error
    from lm import harness

    return harness


@command
def main(args: list[str] | None = None) -> None:
    quieten_libraries()
    parser = OneLineParser(prog="python -m lm.evaluate", description=__doc__)
    parser.add_function_arguments(evaluate)
    settings = parser.parse_args(args).as_dict()
    evaluate(data=TextSource(**settings.pop("data")), **settings)


if __name__ == "__main__":
    main()
