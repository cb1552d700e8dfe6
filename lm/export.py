"""Weights for use elsewhere: `python -m lm.export --checkpoint RUN --to hf --output DIR`."""

import json
from pathlib import Path
from typing import Any, Literal

from lm.data.module import TextData
from lm.hf_format import is_plain
from lm.hf_write import DType, write_model
from lm.model import Llama
from lm.model_card import model_card
from lm.module import LanguageModule
from lm.tokenizers import load_tokenizer
from pretrain.atomic import locked, partial_folder, publish
from pretrain.checkpoint import find_checkpoint, read_checkpoint
from pretrain.cli import OneLineParser
from pretrain.errors import UserError, command
from pretrain.paths import new_output_path, output_path
from pretrain.reload import load_module
from pretrain.run import SUMMARY

PROG = "python -m lm.export"


def export(checkpoint: str, output: str, to: Literal["hf"] = "hf", dtype: DType = "float32") -> None:
    """Write a model's weights, configuration and tokenizer in the format of another suite, with a model card.

    Args:
        checkpoint: Folder of a run, or one of its checkpoints.
        output: The folder to make. It appears when it is complete.
        to: hf, Hugging Face transformers: a dense swiglu model as a plain Llama that needs nothing of ours, every other
            one to be loaded after `import lm.hf`.
        dtype: Type of the weights: float32, bfloat16 or float16.
    """
    folder, file = _free_folder(output), find_checkpoint(checkpoint)
    module, run = load_module(LanguageModule, file, data_class=TextData)
    model, tokenizer = module.model, load_tokenizer(run["data"]["tokenizer"])
    assert isinstance(model, Llama)
    step, summary = read_checkpoint(file, lazy=True).get("global_step", 0), read_summary(file)
    with locked(folder), partial_folder(folder) as partial:
        _free_folder(folder)  # again: another process may have made it meanwhile
        auto_tokenizer = write_model(model, tokenizer, partial, run["data"]["sequence_length"], dtype)
        card = model_card(module.config, run, summary, step, tokenizer, auto_tokenizer, dtype)
        (partial / "README.md").write_text(card, encoding="utf-8")
        publish(partial, folder)
    needs = "" if is_plain(module.config) else "import lm.hf; "
    print(f'{folder}: load it with\n  {needs}transformers.AutoModelForCausalLM.from_pretrained("{folder}")')
    if not auto_tokenizer:
        print("  its tokenizer.model with the sentencepiece package: no AutoTokenizer gives exactly the same ids")


def read_summary(checkpoint: Path) -> dict[str, Any]:
    """Return the summary.json of the run that a checkpoint lies in; {} without one."""
    file = checkpoint.parent.parent / SUMMARY
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}): remove it to export without the measured metrics") from error


def _free_folder(output: str | Path) -> Path:
    """Return `new_output_path`, for which an empty folder will do as well."""
    folder = output_path(output)
    is_empty = folder.is_dir() and not any(folder.iterdir())
    return folder if is_empty else new_output_path(folder)


@command
def main(args: list[str] | None = None) -> None:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_function_arguments(export)
    export(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    main()
