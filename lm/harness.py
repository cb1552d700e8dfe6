"""A Llama as a model of lm-evaluation-harness, and its tasks run on it. Needs the extra `eval`.

The harness defines the tasks: it fetches their data from the Hugging Face hub, or reads what a local task's YAML names.
Such a YAML may hold Python that the harness executes (`!function`): use task files that you trust. Tasks that the
harness marks as unsafe, because they run what a model has written, are refused.
"""

import difflib
import json
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table
from tqdm import tqdm

from lm.evaluation import Precision, Score, Window, WindowScorer, sliding_windows
from lm.model import Llama
from lm.sampling import generate
from lm.tokenizers import Tokenizer
from pretrain.errors import UserError
from pretrain.hub import reason

# The tasks of the paper's Table 3, zero-shot. It does not name its metrics; these are the usual ones.
TABLE_3 = {"arc_challenge": "acc_norm", "hellaswag": "acc_norm", "openbookqa": "acc_norm", "winogrande": "acc"}
# What a task wants written: after which tokens, how many at most, and the texts that end it.
Job = tuple[list[int], int, tuple[str, ...]]


class HarnessModel(TemplateLM):
    """The harness's view of a Llama: scores and texts equal those of its `hf` model on the same weights.

    So the padding of the vocabulary takes part in the softmax here, as it does there.

    Args:
        model: in evaluation mode, on its device.
        tokenizer: the one it was trained with; no special token is added to any text.
        max_length: most tokens that the model sees. A longer context is cut on the left.
        batch_size: requests per forward pass.
        precision: see `lm.evaluation.WindowScorer`.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        max_length: int,
        batch_size: int = 8,
        precision: Precision = "float32",
    ) -> None:
        super().__init__()
        self.model = model
        self.text_tokenizer = tokenizer  # `tokenizer` is transformers' to the harness
        self.max_length = max_length
        self.scorer = WindowScorer(model, batch_size, precision=precision)
        self._device = self.scorer.device

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.eot

    @property
    def tokenizer_name(self) -> str:
        return self.text_tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.text_tokenizer.encode(string)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        windows = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens does not fit a window of {self.max_length}: "
                    "give a larger --window"
                )
            tokens = (context or [self.prefix_token_id]) + continuation  # no context is left of one of spaces
            windows.append(Window(tokens[-(self.max_length + 1) :], len(continuation)))
        scores = self._score(windows, "loglikelihood", disable_tqdm)
        return [(score.log_likelihood, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows, counts = [], []
        for (text,) in (request.args for request in requests):
            tokens = [self.prefix_token_id, *self.tok_encode(text)]
            pieces = list(sliding_windows(tokens, self.max_length, self.max_length))
            windows.extend(pieces)
            counts.append(len(pieces))
        scores = iter(self._score(windows, "loglikelihood_rolling", disable_tqdm))
        return [sum(next(scores).log_likelihood for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        jobs = [self._job(*request.args) for request in requests]
        order = sorted(range(len(jobs)), key=lambda index: (jobs[index][1:], -len(jobs[index][0])))
        texts = [""] * len(jobs)
        with tqdm(desc="generate_until", total=len(jobs), disable=disable_tqdm or None) as bar:
            for (n_tokens, stops), alike in groupby(order, lambda index: jobs[index][1:]):
                while batch := list(islice(alike, self.scorer.batch_size)):
                    written = self._write([jobs[index][0] for index in batch], n_tokens, stops)
                    for index, text in zip(batch, written, strict=True):
                        texts[index] = text
                    bar.update(len(batch))
        return texts

    def _job(self, context: str, settings: dict[str, Any]) -> Job:
        kwargs = normalize_gen_kwargs(settings)
        if kwargs["do_sample"] or kwargs.get("num_beams", 1) != 1:
            raise UserError(f"a task wants other than greedy generation ({settings}): leave it out")
        n_tokens = kwargs["max_gen_toks"]
        if n_tokens >= self.max_length:
            raise UserError(
                f"a task wants {n_tokens} tokens written, and the window holds {self.max_length} with the prompt: "
                "give a larger --window"
            )
        prompt = self.tok_encode(context)[-(self.max_length - n_tokens) :]
        return prompt, n_tokens, tuple(stop for stop in kwargs["until"] if stop)

    def _write(self, prompts: list[list[int]], n_tokens: int, stops: tuple[str, ...]) -> list[str]:
        """The most likely next tokens as text, up to end-of-text or the first of `stops`."""
        written: list[list[int]] = [[] for _ in prompts]

        def is_over(row: int, token: int) -> bool:
            written[row].append(token)
            return any(stop in self.text_tokenizer.decode(written[row]) for stop in stops)

        with self.scorer.autocast():
            generate(
                self.model,
                prompts,
                n_tokens,
                temperature=0,
                n_vocab=self.text_tokenizer.n_vocab,
                end=self.eot_token_id,
                max_length=self.max_length,
                on_token=is_over,
            )
        texts = [self.text_tokenizer.decode(tokens) for tokens in written]
        for stop in stops:
            texts = [text.split(stop)[0] for text in texts]
        return texts

    def _score(self, windows: list[Window], name: str, disable_tqdm: bool) -> list[Score]:
        with tqdm(desc=name, total=len(windows), disable=disable_tqdm or None) as bar:
            return self.scorer.score(windows, lambda batch: bar.update(len(batch)))


def load_tasks(manager: TaskManager, names: str) -> list[Any]:
    """Return tasks and groups of tasks with their data.

    Args:
        manager: what tasks there are.
        names: names of tasks, groups or tags, or patterns such as mmlu_*, with commas between them.

    Raises:
        UserError: an unknown name, a task that is unsafe or not about text, or data that cannot be loaded.
    """
    found: list[str] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        matches = manager.match_tasks([name])
        if not matches:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, n=3))
            raise UserError(
                f"{name} is no task of lm-evaluation-harness{near and f' (near: {near})'}: check --tasks, or give the "
                "folder of its YAML with --include_path"
            )
        found += matches
    if not found:
        raise UserError("--tasks names no task: give names with commas between them")
    tasks = [item for name in dict.fromkeys(found) for item in _load(manager, name)]
    try:
        manager.load(tasks)  # which are loaded already
    except ValueError as error:
        raise UserError(f"--tasks names a task twice ({reason(error)}): leave one of the two out") from error
    return tasks


def _load(manager: TaskManager, name: str) -> list[Any]:
    try:
        content = manager.load([name])
    except Exception as error:  # of the hub, of datasets, of the harness, of a task's own code
        raise UserError(
            f"the task {name} cannot be loaded ({reason(error)}): its data comes from the Hugging Face hub, or from "
            "where its YAML says"
        ) from error
    tasks, groups = content["tasks"], content.get("groups", {})
    for task in tasks.values():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"the task {name} executes what the model writes, which is not done here: leave it out")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"the task {name} is about more than text: leave it out")
    return [groups[name]] if name in groups else list(tasks.values())


def run_tasks(
    model: HarnessModel,
    names: str,
    *,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Run tasks and return the harness's results as plain data, with `table_3` if those four tasks are among them.

    Args:
        names: see `load_tasks`.
        include_path: a folder of task YAMLs, which come before the harness's own.
        num_fewshot: examples before each question; None: as the task says, or none.
        limit: examples per task; None: all.

    Raises:
        UserError: see `load_tasks`; a window too small for a task.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include_path {include_path} is no folder: give one that holds task YAMLs")
    manager = TaskManager(include_path=include_path)
    tasks = load_tasks(manager, names)
    results = lm_eval.simple_evaluate(
        model,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=model.scorer.batch_size,
        device=str(model.device),
        log_samples=False,
    )
    plain = json.loads(json.dumps(results, default=handle_non_serializable))
    average = table_3(plain["results"])
    return plain if average is None else plain | {"table_3": average}


def table_3(results: dict[str, dict[str, Any]]) -> dict[str, float] | None:
    """The four tasks of the paper's Table 3 and their average, in percent; None unless all four are there."""
    if not TABLE_3.keys() <= results.keys():
        return None
    percent = {task: 100 * results[task][f"{metric},none"] for task, metric in TABLE_3.items()}
    return percent | {"average": sum(percent.values()) / len(percent)}


def report(results: dict[str, Any]) -> str:
    """The harness's own tables, and the paper's."""
    lines = [make_table(results)]
    if results.get("groups"):
        lines.append(make_table(results, "groups"))
    if "table_3" in results:
        lines.append("as the paper's Table 3, in percent")
        lines += [f"{name:<14} {value:6.2f}  {TABLE_3.get(name, '')}" for name, value in results["table_3"].items()]
    return "\n".join(lines)
