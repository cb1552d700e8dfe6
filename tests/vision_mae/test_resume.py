"""An interrupted run goes on as if nothing had happened: to the last bit on the CPU, crops and masks included."""

import csv
from pathlib import Path

import lightning as L
import pytest
import torch

from pretrain.errors import INTERRUPTED_EXIT_CODE
from tests.runs import assert_identical, run_folder, state_of
from tests.vision_mae.runs import train
from vision_mae.fit import run

LAST = "checkpoints/last.ckpt"


@pytest.fixture(scope="module")
def uninterrupted(trained) -> dict:
    return state_of(trained.folder / LAST)


def interrupt_at(step: int, runs_dir: Path, **changes) -> Path:
    with pytest.raises(SystemExit) as stop:
        train(runs_dir, "--trainer.callbacks+=tests.runs.StopAt", f"--trainer.callbacks.step={step}", **changes)
    assert stop.value.code == INTERRUPTED_EXIT_CODE
    return run_folder(runs_dir)


def test_ten_steps_and_ten_more_equal_twenty(uninterrupted, tmp_path):
    """Step 10 is also a validation, a probe and a regular checkpoint."""
    folder = interrupt_at(10, tmp_path)
    assert state_of(folder / LAST)["step"] == 10
    run(["--resume", str(folder), "--trainer.callbacks=[]"])
    assert_identical(state_of(folder / LAST), uninterrupted)


def test_loader_workers_change_nothing(uninterrupted, tmp_path):
    """Two of them before the interruption in the middle of an epoch, none after it."""
    folder = interrupt_at(7, tmp_path, data__num_workers=2)
    run(["--resume", str(folder), "--trainer.callbacks=[]", "--data.num_workers=0"])
    assert_identical(state_of(folder / LAST), uninterrupted)


def train_losses(folder: Path) -> dict[int, float]:
    with (folder / "metrics.csv").open() as stream:
        return {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(stream) if row["train/loss"]}


class KeepMasks(L.Callback):
    """Remember the noise of every training picture, by step."""

    seen: list[torch.Tensor] = []  # noqa: RUF012 (shared on purpose: the command line makes the instance)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        KeepMasks.seen.append(batch["noise"].clone())


def test_masks_differ_between_samples_and_epochs_and_repeat_after_a_resume(tmp_path):
    """258 pictures, of which 33 steps of 8 read a few twice."""
    changes = {"trainer__max_steps": 34, "trainer__val_check_interval": 100, "model__probe__every_n_steps": 0}
    KeepMasks.seen = []
    keep = "--trainer.callbacks+=tests.vision_mae.test_resume.KeepMasks"
    train(tmp_path / "whole", keep, **changes)
    whole = torch.cat(KeepMasks.seen)
    assert len(whole) == 34 * 8
    assert len(whole.unique(dim=0)) == len(whole)

    folder = interrupt_at(30, tmp_path / "parts", **changes)
    KeepMasks.seen = []
    run(["--resume", str(folder), "--trainer.callbacks=[]", keep])
    assert torch.equal(torch.cat(KeepMasks.seen), whole[30 * 8 :])


def test_the_cut_into_micro_batches_does_not_change_crops_and_masks(trained, tmp_path):
    folder = train(tmp_path, data__micro_batch_size=8).folder
    ours, theirs = (train_losses(path) for path in (folder, trained.folder))
    assert ours.keys() == {5, 10, 15, 20}
    assert ours == pytest.approx(theirs, rel=1e-4)
