"""Several devices train as one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.lm.runs import arguments, logged, run_folder, state_of, train

ROOT = Path(__file__).parent.parent.parent
# Four micro-batches a step on one device, two each on two devices; the whole validation text.
CUT = {"data__micro_batch_size": 1, "trainer__max_steps": 10, "trainer__limit_val_batches": None}


@pytest.mark.slow
def test_two_processes_equal_one_and_leave_one_run(tmp_path):
    one = train(tmp_path / "one", **CUT).folder
    command = [sys.executable, "-m", "lm.fit", *arguments(tmp_path / "two", **CUT)]
    command += ["--trainer.devices=2", "--trainer.strategy=ddp"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    two = run_folder(tmp_path / "two")  # the only one
    ours, theirs = state_of(one / "checkpoints/last.ckpt"), state_of(two / "checkpoints/last.ckpt")
    for name, weight in ours["weights"].items():
        torch.testing.assert_close(theirs["weights"][name], weight, atol=1e-5, rtol=1e-4)
    assert theirs["data"] == ours["data"]
    for name in ("train/loss", "val/loss"):
        assert logged(two)[10][name] == pytest.approx(logged(one)[10][name], abs=1e-5)


@pytest.mark.slow
def test_compiled_blocks_train_as_eager_ones_and_keep_their_names(tmp_path):
    settings = {"model__ffn__kind": "qd-moa", "trainer__max_steps": 3}
    eager = train(tmp_path / "eager", **settings).folder
    compiled = train(tmp_path / "compiled", model__compile_blocks=True, **settings).folder
    ours, theirs = (state_of(folder / "checkpoints/last.ckpt")["weights"] for folder in (eager, compiled))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, atol=1e-4, rtol=1e-3)
    assert logged(compiled)[3]["val/loss"] == pytest.approx(logged(eager)[3]["val/loss"], abs=1e-4)
