"""What a run leaves behind, read back with other people's readers."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lm.fit import run
from pretrain.cli import FinishedRun
from tests.lm.runs import train
from tests.runs import assert_identical, logged, run_folder, state_of

KIND = "bi-moa"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> FinishedRun:
    """20 steps of 4 sequences of 32 tokens in two micro-batches; validated at steps 8, 16 and, being the last, 20."""
    return train(tmp_path_factory.mktemp("records"), model__ffn__kind=KIND, trainer__val_check_interval=8)


@pytest.fixture(scope="module")
def events(finished) -> EventAccumulator:
    return EventAccumulator(str(finished.folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


@pytest.fixture(scope="module")
def summary(finished) -> dict:
    return json.loads((finished.folder / "summary.json").read_text())


def steps(events: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in events.Scalars(tag)]


def test_the_folder_holds_what_the_readme_lists(finished):
    names = {path.name for path in finished.folder.iterdir() if not path.name.startswith("events.")}
    assert names == {"config.yaml", "summary.json", "metrics.csv", "checkpoints"}
    assert {path.name for path in (finished.folder / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}


@pytest.mark.parametrize("tag", ["train/loss", "optim/lr", "optim/grad_norm", "perf/tokens_per_second", "perf/mfu"])
def test_training_curves_count_optimizer_steps(events, tag):
    assert steps(events, tag) == [5, 10, 15, 20]


@pytest.mark.parametrize("tag", ["val/loss", "val/bpb", "val/perplexity"])
def test_validation_curves_count_optimizer_steps_and_end_with_the_last_one(events, tag):
    assert steps(events, tag) == [8, 16, 20]


def test_gates_are_shown_for_every_layer_and_activation(events):
    import moa

    tags = set(events.Tags()["scalars"])
    for layer in ("blocks.0.ffn", "blocks.1.ffn"):
        for gate in ("pi", "rho"):
            assert f"gates/{layer}/{gate}/entropy" in tags
            for name in moa.default_activations(KIND):
                assert {f"gates/{layer}/{gate}/{name}/mean", f"gates/{layer}/{gate}/{name}/spread"} <= tags
    assert {"gates/pi", "gates/rho"} <= set(events.Tags()["images"])


def test_samples_of_text_are_written(events):
    assert [event.step for event in events.Tensors("samples/text_summary")] == [8, 16, 20]


def test_the_learning_rate_curve_shows_the_rate_that_each_step_used(events, finished):
    schedule = finished.module.schedule()
    peak = finished.module.optimizer_config.lr
    assert [event.value for event in events.Scalars("optim/lr")] == pytest.approx(
        [peak * schedule(step - 1) for step in (5, 10, 15, 20)]
    )


def test_validation_metrics_agree_with_each_other(events, finished):
    val = finished.data._val_split
    for loss, bpb, perplexity in zip(
        *(events.Scalars(f"val/{name}") for name in ("loss", "bpb", "perplexity")), strict=True
    ):
        assert perplexity.value == pytest.approx(math.exp(loss.value), rel=1e-5)
        assert bpb.value == pytest.approx(loss.value / math.log(2) * val.n_tokens / val.n_bytes, rel=1e-5)


def test_the_csv_holds_the_same_numbers(events, finished):
    rows = logged(finished.folder)
    for tag in ("train/loss", "val/loss", "optim/lr"):
        for event in events.Scalars(tag):
            assert rows[event.step][tag] == pytest.approx(event.value, rel=1e-6)


def test_the_summary_says_what_happened(summary, events, finished):
    assert summary["exit_state"] == "finished"
    assert (summary["step"], summary["total_steps"]) == (20, 20)
    assert summary["tokens_seen"] == 20 * 4 * 32
    assert summary["parameters"]["total"] == sum(p.numel() for p in finished.module.parameters())
    assert summary["parameters"]["total"] == sum(summary["parameters"]["roles"].values())
    losses = {event.step: event.value for event in events.Scalars("val/loss")}
    assert summary["final"]["val/loss"] == pytest.approx(losses[20])
    assert summary["best"]["val/loss"] == pytest.approx(min(losses.values()))
    assert losses[summary["best"]["step"]] == min(losses.values())
    assert summary["tokens_per_second"] > 0
    assert summary["peak_memory_bytes"] > 10**7
    assert torch.__version__.startswith(summary["versions"]["torch"])
    assert sum(group["parameters"] for group in summary["optimizer_groups"]) == summary["parameters"]["total"]


def test_the_configuration_is_complete_and_repeats_the_run(finished, tmp_path):
    config = finished.folder / "config.yaml"
    assert yaml.safe_load(config.read_text())["model"]["ffn"]["kind"] == KIND
    again = run(["--config", str(config), f"--runs_dir={tmp_path}"]).folder
    assert_identical(state_of(again / "checkpoints/last.ckpt"), state_of(finished.folder / "checkpoints/last.ckpt"))


def test_another_seed_is_another_run(finished, tmp_path):
    other = run(["--config", str(finished.folder / "config.yaml"), f"--runs_dir={tmp_path}", "--seed_everything=1"])
    weights = [
        state_of(f / "checkpoints/last.ckpt")["weights"]["model.embed.weight"] for f in (finished.folder, other.folder)
    ]
    assert not torch.equal(*weights)


def test_a_checkpoint_holds_tensors_and_primitives_only_and_its_configuration(finished):
    checkpoint = torch.load(finished.folder / "checkpoints" / "best.ckpt", weights_only=True)
    assert checkpoint["config"]["model"]["ffn"]["kind"] == KIND


def test_a_resumed_run_continues_its_curves_without_repeating_a_step(tmp_path):
    class_path = "tests.runs.StopAt"
    with pytest.raises(SystemExit):
        train(
            tmp_path, f"--trainer.callbacks+={class_path}", "--trainer.callbacks.step=12", trainer__log_every_n_steps=1
        )
    folder = run_folder(tmp_path)
    assert json.loads((folder / "summary.json").read_text())["exit_state"] == "interrupted"
    # As if it had been killed after step 12 and resumed from the checkpoint of step 10.
    best = folder / "checkpoints" / "best.ckpt"
    assert state_of(best)["step"] == 10
    run(["--resume", str(best), "--trainer.callbacks=[]"])
    assert [step for step, row in logged(folder).items() if "train/loss" in row] == list(range(1, 21))
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert steps(events, "train/loss") == list(range(1, 21))
    assert json.loads((folder / "summary.json").read_text())["exit_state"] == "finished"


def test_a_run_that_fails_says_so(tmp_path):
    with pytest.raises(RuntimeError):
        train(tmp_path, "--trainer.callbacks+=tests.lm.test_resume.Crash")
    summary = json.loads((run_folder(tmp_path) / "summary.json").read_text())
    assert summary["exit_state"] == "failed"
    assert "the machine is gone" in summary["error"]


@pytest.mark.parametrize("kind", ["swiglu", "qd-la"])
def test_layers_without_gates_log_what_they_have(tmp_path, kind):
    folder: Path = train(tmp_path, model__ffn__kind=kind, trainer__max_steps=2).folder
    tags = EventAccumulator(str(folder)).Reload().Tags()["scalars"]
    assert ("gates/blocks.0.ffn/alpha/id*gelu/mean" in tags) == (kind == "qd-la")
