"""lm-evaluation-harness through our adapter, against the harness's own model for transformers on the same weights."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm.evaluate import main
from lm.hf_write import write_model
from lm.model import Llama
from lm.tokenizers import load_tokenizer
from pretrain.errors import UserError
from tests.lm.runs import train
from tests.lm.test_model import tiny

lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from lm import harness  # noqa: E402
from lm.harness import HarnessModel, load_tasks, table_3  # noqa: E402

WINDOW = 48
LONG = "The state of the union is strong, and the people are stronger than it. " * 8
# What the tasks' names are in the harness, so that local ones come before them.
CHOICES = {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}"}
CHOICES |= {"doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
TASKS: dict[str, dict[str, Any]] = {
    "arc_challenge": CHOICES | {"training_split": "train"},
    "hellaswag": CHOICES | {"doc_to_text": "{{question}} "},
    "openbookqa": CHOICES | {"fewshot_split": "train"},
    # As in WinoGrande, the choices are contexts, and what follows them is scored.
    "winogrande": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{label}}",
        "doc_to_choice": "{{contexts}}",
        "doc_to_target": "{{ending}}",
        "metric_list": [{"metric": "acc"}],
    },
    "pages": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "copy": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "sampled": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "x",
        "generation_kwargs": {"do_sample": True, "temperature": 0.7, "until": ["x"], "max_gen_toks": 4},
    },
    "unsafe": {"output_type": "loglikelihood", "doc_to_text": "x", "doc_to_target": "y", "unsafe_code": True},
    "lost": {"output_type": "loglikelihood", "doc_to_text": "x", "doc_to_target": "y"},
}


def rows() -> list[dict[str, Any]]:
    words = "strong weak large small old new bright dark first last".split()
    return [
        {
            "question": f"Question {number}: the union is" + (LONG if number == 3 else ""),
            "choices": [f" {words[number]}", f" {words[-number - 1]} and {words[number]}", f" very {words[number]}"],
            "label": number % 3 if number % 3 < 2 else 0,
            "contexts": [f"The {words[number]} one beat the other because it", f"The {words[-number - 1]} one it"],
            "ending": "was right, he said.",
            "page": f"{words[number]} " * (3 + 20 * number),
        }
        for number in range(6)
    ]


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    for name, settings in TASKS.items():
        file = "missing.jsonl" if name == "lost" else "rows.jsonl"
        files = dict.fromkeys(("train", "test"), str(folder / file))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | settings))
    aggregate = [{"metric": "acc", "weight_by_size": False}]
    group = {"group": "both", "task": ["arc_challenge", "winogrande"], "aggregate_metric_list": aggregate}
    (folder / "both.yaml").write_text(yaml.safe_dump(group))
    return folder


@pytest.fixture(scope="module")
def manager(task_folder) -> TaskManager:
    """Local tasks alone; reading the harness's own thousands of YAMLs takes seconds."""
    return TaskManager(include_path=str(task_folder), include_defaults=False)


@pytest.fixture(autouse=True)
def _no_description_of_the_machine(monkeypatch):
    """The harness asks many programs about the machine for its JSON, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[HarnessModel, HFLM]:
    """The adapter, and the harness's model on the same weights exported; with the padded vocabulary of a real run."""
    folder = tmp_path_factory.mktemp("exported")
    torch.manual_seed(0)
    model = Llama(tiny(vocab_size=50_304, d_model=32, n_layers=2, init_std=0.2)).eval()
    write_model(model, load_tokenizer("gpt2"), folder, WINDOW, "float32")
    exported = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    theirs = HFLM(exported, tokenizer=AutoTokenizer.from_pretrained(folder), max_length=WINDOW, batch_size=3)
    return HarnessModel(model.double(), load_tokenizer("gpt2"), WINDOW, batch_size=3), theirs


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def test_loglikelihoods_equal_those_of_the_harness(pair):
    asked = requests(
        "loglikelihood",
        ("The union is", " strong"),
        ("The union is ", "strong"),  # a space behind the context belongs to the continuation
        ("The union is  ", " strong and free"),
        ("", "A text from its beginning"),
        ("The union", " is strong, as it has been since the beginning of the republic"),
        (LONG, " and so on"),  # longer than the window
        (LONG, LONG[:160]),
        ("The union is", " weak"),
    )
    ours, theirs = (model.loglikelihood(asked, disable_tqdm=True) for model in pair)
    for (value, greedy), (their_value, their_greedy) in zip(ours, theirs, strict=True):
        assert value == pytest.approx(their_value, rel=1e-6)
        assert greedy == their_greedy
    assert len({value for value, _ in ours}) == len(ours) - 1  # the second question is the first in other words


def test_a_context_of_spaces_is_none(pair):
    ours, _ = pair
    (found,), (expected,) = (
        ours.loglikelihood(requests("loglikelihood", question)) for question in ((" ", "strong"), ("", " strong"))
    )
    assert found == pytest.approx(expected)


def test_a_greedy_continuation_is_known_as_such(pair):
    ours, _ = pair
    (text,) = ours.generate_until(requests("generate_until", ("The union", {"until": [], "max_gen_toks": 3})))
    context, continuation = ours._encode_pair("The union", text)
    ((_, greedy),) = ours._loglikelihood_tokens([(None, context, continuation)], disable_tqdm=True)
    assert greedy


@pytest.mark.parametrize("batch_size", [1, 8])
def test_batches_change_nothing(pair, batch_size):
    ours, _ = pair
    asked = requests("loglikelihood", *((LONG[:length], LONG[length : length + 20]) for length in range(1, 60, 7)))
    other = HarnessModel(ours.model, ours.text_tokenizer, WINDOW, batch_size)
    for (value, _), (expected, _) in zip(other.loglikelihood(asked), ours.loglikelihood(asked), strict=True):
        assert value == pytest.approx(expected, rel=1e-9)


def test_rolling_loglikelihoods_equal_those_of_the_harness(pair):
    asked = requests("loglikelihood_rolling", ("short",), (LONG[:200],), (LONG * 2,))
    ours, theirs = (model.loglikelihood_rolling(asked, disable_tqdm=True) for model in pair)
    assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("until", [[], ["e"], ["\n", "t"]])
def test_greedy_texts_equal_those_of_the_harness(pair, until):
    ours, theirs = pair
    settings = [{"until": until, "max_gen_toks": n_tokens, "do_sample": False} for n_tokens in (5, 20)]
    asked = [(context, chosen) for context in ("The union is", "a", LONG) for chosen in settings]
    found = ours.generate_until(requests("generate_until", *asked), disable_tqdm=True)
    for text, question in zip(found, asked, strict=True):  # one by one, since theirs pads on the left
        assert [text] == theirs.generate_until(requests("generate_until", question), disable_tqdm=True)


def test_text_stops_before_the_first_stop_and_at_the_end_of_text(pair, monkeypatch):
    ours, _ = pair
    tokenizer = ours.text_tokenizer
    said = [*tokenizer.encode("one two. three"), tokenizer.eot, *tokenizer.encode(" four")]
    for until, text in (([" four"], "one two. three"), (["three", " two"], "one")):
        choices = iter(said)
        monkeypatch.setattr("lm.sampling.choose", lambda *_, choices=choices: [next(choices)])
        asked = requests("generate_until", ("x", {"until": until, "max_gen_toks": len(said)}))
        assert ours.generate_until(asked) == [text]


@pytest.mark.parametrize("num_fewshot", [None, 2])
def test_metrics_of_local_tasks_equal_those_of_the_harness(pair, manager, num_fewshot):
    names = ["arc_challenge", "hellaswag", "openbookqa", "winogrande", *([] if num_fewshot else ["pages", "copy"])]
    ours, theirs = (
        lm_eval.simple_evaluate(
            model, tasks=names, task_manager=manager, num_fewshot=num_fewshot, bootstrap_iters=0, log_samples=False
        )["results"]
        for model in pair
    )
    assert ours.keys() == theirs.keys() == set(names)
    for name in names:
        metrics = {key: value for key, value in theirs[name].items() if isinstance(value, float)}
        assert metrics
        assert {key: ours[name][key] for key in metrics} == pytest.approx(metrics, rel=1e-6), name


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("harness"), trainer__max_steps=2).folder


@pytest.fixture
def evaluate(run, task_folder, monkeypatch):
    local = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr(harness, "TaskManager", local)

    def call(*arguments: str) -> None:
        main(["--checkpoint", str(run), "--include_path", str(task_folder), "--window", "64", *arguments])

    return call


def test_the_command_prints_tables_and_leaves_the_harness_s_json(run, evaluate, capfd):
    evaluate("--tasks", "arc_challenge,hellaswag,openbookqa,winogrande,pages", "--limit=4", "--num_fewshot=1")
    found = json.loads((run / "evaluation_tasks.json").read_text())
    scores = found["results"]
    assert found["n-samples"]["pages"] == {"original": 6, "effective": 4}
    assert found["n-shot"]["arc_challenge"] == 1
    assert found["config"]["model_args"]["window"] == 64
    percent = [100 * scores[task]["acc_norm,none"] for task in ("arc_challenge", "hellaswag", "openbookqa")]
    percent.append(100 * scores["winogrande"]["acc,none"])
    assert found["table_3"]["average"] == pytest.approx(sum(percent) / 4)
    shown = capfd.readouterr().out
    assert "|openbookqa" in shown
    assert f"average        {sum(percent) / 4:6.2f}" in shown


def test_a_group_has_a_table_of_its_own(run, evaluate, capfd):
    evaluate("--tasks", "both")
    found = json.loads((run / "evaluation_tasks.json").read_text())
    accuracies = [found["results"][name]["acc,none"] for name in ("arc_challenge", "winogrande")]
    assert found["groups"]["both"]["acc,none"] == pytest.approx(sum(accuracies) / 2)
    assert "table_3" not in found
    assert capfd.readouterr().out.count("|both") == 2


def test_there_is_no_table_3_without_its_four_tasks():
    assert table_3({"arc_challenge": {"acc_norm,none": 0.5}, "winogrande": {"acc,none": 0.5}}) is None


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--tasks=hellaswagg"], ["hellaswagg is no task", "near: hellaswag", "--include_path"]),
        (["--tasks=,"], ["names no task"]),
        (["--tasks=both,winogrande"], ["names a task twice", "winogrande"]),
        (["--tasks=lost"], ["the task lost cannot be loaded", "missing.jsonl"]),
        (["--tasks=unsafe"], ["the task unsafe executes what the model writes"]),
        (["--tasks=sampled"], ["other than greedy generation"]),
        (["--tasks=copy", "--window=4"], ["wants 6 tokens", "window holds 4", "--window"]),
        (["--tasks=winogrande", "--window=4"], ["a continuation of", "window of 4"]),
        (["--tasks=pages", "--include_path=missing"], ["--include_path missing is no folder"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, evaluate, capfd, arguments, parts):
    (run / "evaluation_tasks.json").unlink(missing_ok=True)
    with pytest.raises(SystemExit) as stop:
        evaluate(*arguments)
    assert stop.value.code == 2
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    for part in parts:
        assert part in line
    assert not (run / "evaluation_tasks.json").exists()


def test_only_an_earlier_evaluation_is_replaced(evaluate, tmp_path, capfd):
    earlier, mine = tmp_path / "earlier.json", tmp_path / "mine.txt"
    for _ in range(2):
        evaluate("--tasks=pages", "--limit=1", "--output", str(earlier))
    mine.write_text("my own words")
    with pytest.raises(SystemExit):
        evaluate("--tasks=pages", "--limit=1", "--output", str(mine))
    assert f"--output {mine} exists and is no earlier evaluation" in capfd.readouterr().err
    assert mine.read_text() == "my own words"


def test_patterns_name_tasks(manager):
    assert [task.config.task for task in load_tasks(manager, "winogr?nde,pages")] == ["winogrande", "pages"]
    with pytest.raises(UserError, match="no task"):
        load_tasks(manager, "nothing_*")
