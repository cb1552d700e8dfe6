"""An interrupted run goes on as if nothing had happened: to the last bit on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from pretrain.errors import INTERRUPTED_EXIT_CODE
from pretrain.optim import OptimizerConfig
from pretrain.schedules import ScheduleConfig, lr_multiplier
from tests.lm.runs import train
from tests.runs import assert_identical, logged, run_folder, state_of


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict:
    folder = train(tmp_path_factory.mktemp("whole")).folder
    return state_of(folder / "checkpoints" / "last.ckpt")


def interrupt_at(step: int, runs_dir: Path, **changes) -> Path:
    with pytest.raises(SystemExit) as stop:
        train(
            runs_dir,
            "--trainer.callbacks+=tests.runs.StopAt",
            f"--trainer.callbacks.step={step}",
            **changes,
        )
    assert stop.value.code == INTERRUPTED_EXIT_CODE
    return run_folder(runs_dir)


def resume(folder: Path, *extra: str) -> Path:
    from lm.fit import run

    return run(["--resume", str(folder), "--trainer.callbacks=[]", *extra]).folder


@pytest.mark.parametrize("step", [7, 10])
def test_ten_steps_and_ten_more_equal_twenty(uninterrupted, tmp_path, step):
    """Step 10 is also a validation step and a regular checkpoint."""
    folder = interrupt_at(step, tmp_path)
    assert state_of(folder / "checkpoints" / "last.ckpt")["step"] == step
    assert resume(folder) == folder
    assert_identical(state_of(folder / "checkpoints" / "last.ckpt"), uninterrupted)
    assert [step for step, row in logged(folder).items() if "val/loss" in row] == [10, 20]


def test_loader_workers_run_ahead_without_losing_samples(uninterrupted, tmp_path):
    folder = interrupt_at(7, tmp_path, data__num_workers=2)
    resume(folder, "--data.num_workers=0")
    assert_identical(state_of(folder / "checkpoints" / "last.ckpt"), uninterrupted)


def test_resume_from_the_best_checkpoint(uninterrupted, tmp_path):
    """It is written in the middle of a validation."""
    folder = interrupt_at(13, tmp_path)
    best = folder / "checkpoints" / "best.ckpt"
    assert state_of(best)["step"] == 10
    resume(best)
    assert_identical(state_of(folder / "checkpoints" / "last.ckpt"), uninterrupted)


def test_a_resumed_run_may_be_cut_otherwise(uninterrupted, tmp_path):
    """Other micro-batches, other sums in floating point: the same run up to rounding, validated at the same steps.

    What the backward recomputes may change as well.
    """
    folder = interrupt_at(7, tmp_path)
    resume(folder, "--data.micro_batch_size=4", "--model.activation_checkpointing=selective")
    state = state_of(folder / "checkpoints" / "last.ckpt")
    assert state["data"] == uninterrupted["data"]
    for name, weight in state["weights"].items():
        torch.testing.assert_close(weight, uninterrupted["weights"][name], atol=1e-5, rtol=1e-3)
    assert [step for step, row in logged(folder).items() if "val/loss" in row] == [10, 20]


def test_the_best_checkpoint_stays_the_best_after_a_resume(tmp_path):
    """Validated and saved at every step, with a rate that makes it worse: the first step is the best."""
    settings = {"trainer__val_check_interval": 1, "checkpoint_every_n_steps": 1, "model__schedule__name": "constant"}
    folder = train(tmp_path, trainer__max_steps=3, model__optimizer__lr=0.3, **settings).folder
    best = state_of(folder / "checkpoints" / "best.ckpt")["step"]
    losses = {step: row["val/loss"] for step, row in logged(folder).items()}
    assert losses[best] == min(losses.values()) < losses[3]
    resume(folder, "--trainer.max_steps=4")
    losses = {step: row["val/loss"] for step, row in logged(folder).items()}
    best_step = min(losses, key=lambda step: losses[step])
    assert state_of(folder / "checkpoints" / "best.ckpt")["step"] == best_step
    assert json.loads((folder / "summary.json").read_text())["best"]["step"] == best_step


def test_a_longer_schedule_takes_hold_with_the_first_step(tmp_path):
    folder = train(tmp_path, trainer__max_steps=10, trainer__log_every_n_steps=1).folder
    resume(folder, "--trainer.max_steps=20")
    config = ScheduleConfig(warmup_steps=4)
    peak = OptimizerConfig(lr=6e-3).peak_lr()
    rates = {step: row["optim/lr"] for step, row in logged(folder).items() if "optim/lr" in row}
    assert rates[11] == pytest.approx(peak * lr_multiplier(10, 20, config))


class Crash(Callback):
    """Fail in the middle of a step, between two micro-batches."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 25:
            raise RuntimeError("the machine is gone")


def test_a_crash_falls_back_to_the_last_regular_checkpoint(uninterrupted, tmp_path):
    with pytest.raises(RuntimeError, match="the machine is gone"):
        train(tmp_path, "--trainer.callbacks+=tests.lm.test_resume.Crash")
    folder = run_folder(tmp_path)
    assert state_of(folder / "checkpoints" / "last.ckpt")["step"] == 10
    resume(folder)
    assert_identical(state_of(folder / "checkpoints" / "last.ckpt"), uninterrupted)


def test_resume_across_the_border_of_an_epoch(tmp_path):
    """About 40 sequences in all: 20 steps of 4 read them twice."""
    text = tmp_path / "text.txt"
    text.write_text("The state of the union is strong. " * 40)
    settings = {"data__source": text, "data__val_fraction": 0, "trainer__val_check_interval": 100}
    whole = train(tmp_path / "whole", **settings).folder
    folder = interrupt_at(10, tmp_path / "parts", **settings)
    resume(folder)
    expected = state_of(whole / "checkpoints" / "last.ckpt")
    assert_identical(state_of(folder / "checkpoints" / "last.ckpt"), expected)


def test_a_finished_run_goes_on_with_a_higher_limit(tmp_path):
    """With a constant rate the first half does not depend on the length of the run."""
    constant = {"model__schedule__name": "constant"}
    whole = train(tmp_path / "whole", **constant).folder
    half = train(tmp_path / "half", trainer__max_steps=10, **constant).folder
    resume(half, "--trainer.max_steps=20")
    assert_identical(state_of(half / "checkpoints" / "last.ckpt"), state_of(whole / "checkpoints" / "last.ckpt"))


def test_init_from_takes_the_weights_only(tmp_path):
    first = train(tmp_path / "first", trainer__max_steps=4).folder
    second = train(tmp_path / "second", f"--init_from={first}", trainer__max_steps=1, model__optimizer__lr=1e-12).folder
    before, after = (state_of(folder / "checkpoints" / "last.ckpt") for folder in (first, second))
    assert after["step"] == 1
    for name, weight in before["weights"].items():
        assert abs(weight - after["weights"][name]).max() < 1e-9
