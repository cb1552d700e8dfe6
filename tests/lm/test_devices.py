"""Several devices train as one does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import pytest
import torch

from lm import fit
from pretrain.callbacks import StopSignal, find_callback
from tests.lm.runs import arguments, train
from tests.runs import logged, run_folder, state_of

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


class StopRankOne(L.Callback):
    """Ask one of two processes to stop after step 3, as a signal that reaches only one."""

    def on_train_batch_start(self, trainer, *_) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            find_callback(trainer, StopSignal).requested = True


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_after_the_same_step(tmp_path):
    command = [sys.executable, "-m", "lm.fit", *arguments(tmp_path, **CUT), "--trainer.devices=2"]
    command += ["--trainer.strategy=ddp", "--trainer.callbacks+=tests.lm.test_devices.StopRankOne"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert "stopped at step 3" in done.stdout, done.stderr
    assert done.returncode == 128 + signal.SIGINT
    assert state_of(run_folder(tmp_path) / "checkpoints/last.ckpt")["step"] == 3


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


@pytest.mark.slow
def test_sigterm_ends_a_run_after_a_step_and_it_goes_on(tmp_path):
    settings = {"trainer__max_steps": 5000, "trainer__val_check_interval": 5000, "trainer__log_every_n_steps": 1}
    command = [sys.executable, "-m", "lm.fit", *arguments(tmp_path, **settings)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/*/checkpoints/last.ckpt")):
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.1)
    run.send_signal(signal.SIGTERM)
    shown, _ = run.communicate(timeout=120)
    assert run.returncode == 128 + signal.SIGTERM
    folder = run_folder(tmp_path)
    step = state_of(folder / "checkpoints/last.ckpt")["step"]
    assert f"stopped at step {step}: go on with `python -m lm.fit --resume {folder}`" in shown
    assert fit.run(["--resume", str(folder), f"--trainer.max_steps={step + 1}"]).trainer.global_step == step + 1
