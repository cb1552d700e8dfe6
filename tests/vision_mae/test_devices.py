"""Several devices train, validate and probe as one does."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runs import run_folder, state_of
from tests.vision_mae.runs import arguments, train

LAST = "checkpoints/last.ckpt"


def last_values(folder: Path) -> dict[str, float]:
    with (folder / "metrics.csv").open() as stream:
        row = list(csv.DictReader(stream))[-1]
    return {name: float(row[name]) for name in ("val/loss", "val/relative_loss", "probe/knn", "train/loss")}


@pytest.mark.slow
def test_two_processes_equal_one(trained, tmp_path):
    """Each picture keeps its crop and mask, whichever process it goes to."""
    options = [*arguments(tmp_path), "--trainer.devices=2", "--trainer.strategy=ddp"]
    command = [sys.executable, "-m", "vision_mae.fit", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=250)
    folder = run_folder(tmp_path)
    assert last_values(folder) == pytest.approx(last_values(trained.folder), rel=2e-3)


@pytest.mark.slow
def test_compiled_blocks_train_as_eager_ones(tmp_path):
    options = {"model__ffn__kind": "swiglu", "trainer__max_steps": 2, "model__probe__every_n_steps": 0}
    eager = train(tmp_path / "eager", **options).folder
    compiled = train(tmp_path / "compiled", **options, model__compile_blocks=True).folder
    ours, theirs = (state_of(path / LAST)["weights"] for path in (compiled, eager))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=2e-4, rtol=1e-3)
