"""Settings that keep a run alive, one by one."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy

from pretrain.faults import LossSpikes, spike_limit
from pretrain.metrics import StepMetrics
from pretrain.watchdog import set_collective_timeout


def test_a_spike_is_far_above_what_came_before():
    """Of 1, 2, .., 9 the median is 5 and the median distance from it 2."""
    assert spike_limit([float(n) for n in range(1, 10)], 3.0) == pytest.approx(5 + 3 * 1.4826 * 2)
    assert spike_limit([2.0] * 30, 6.0) == pytest.approx(2 + 6 * 0.02)  # a flat curve has no spread


def told(losses: list[float | None], deviations: float | None = 6.0) -> list[int]:
    """Return at which of these logged losses a spike is written down."""
    metrics, spikes, written = StepMetrics(), LossSpikes(Path(), deviations), []
    spikes._log = SimpleNamespace(add=lambda trainer, kind, record, *_, **__: written.append(record.step))
    loader = SimpleNamespace(samples_consumed=0, global_batch_size=0)
    trainer = SimpleNamespace(
        callbacks=[metrics], log_every_n_steps=1, max_steps=999, accumulate_grad_batches=1, train_dataloader=loader
    )
    for trainer.global_step, loss in enumerate(losses, start=1):
        metrics.latest = {"train/loss": loss}
        spikes.on_train_batch_end(trainer, None, None, None, 0)
    return written


def test_a_spike_is_told_once_and_the_next_one_again():
    calm = [3.0 - 0.01 * n + 0.02 * (n % 3) for n in range(30)]
    assert told([*calm, 9.0, 9.0, 2.7, 8.0, float("nan"), 2.7]) == [31, 34]
    assert told([*calm, 9.0], deviations=None) == []
    assert told([*calm[:10], 9.0]) == []  # too early to tell


@pytest.mark.parametrize(("minutes", "expected"), [(45.0, 50 * 60), (None, 30 * 60)])
def test_the_time_out_of_collectives_is_the_later_one(minutes, expected):
    strategy = DDPStrategy()
    set_collective_timeout(strategy, minutes)
    assert strategy._timeout.total_seconds() == expected


def test_lightning_does_not_requeue_by_itself(tmp_path, monkeypatch):
    from lm.fit import DATA_CLASS, MODULE_CLASS
    from pretrain.cli import PretrainCLI, config_folder
    from tests.lm.runs import arguments

    for name, value in {"NTASKS": 1, "JOB_ID": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_NAME": "train"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert SLURMEnvironment.detect()
    assert Trainer(logger=False, accelerator="cpu")._accelerator_connector.cluster_environment.auto_requeue
    line = ["--config", str(config_folder() / "lm_tiny.yaml"), *arguments(tmp_path)]
    cli = PretrainCLI(MODULE_CLASS, DATA_CLASS, prog="fit", description="", args=line)
    environment = cli.trainer._accelerator_connector.cluster_environment
    assert isinstance(environment, SLURMEnvironment)
    assert not environment.auto_requeue


STARTED = """
import sys, time
import lightning
from pretrain.policy import tied_to_launcher
with tied_to_launcher(lightning.Trainer(logger=False, accelerator="cpu")):
    print("at its end", flush=True)
    {then}
"""
LAUNCHER = """
import os, subprocess, sys
started = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(started.pid, flush=True)
started.stdout.readline()
try:
    print(started.wait(timeout=float(sys.argv[2])))
except subprocess.TimeoutExpired:
    print("waits")
"""


@pytest.mark.parametrize(("rank", "seconds", "shown"), [("1", "2", "waits"), ("0", "60", "143")])
def test_a_rank_that_lightning_has_started_ends_after_the_process_that_started_it(rank, seconds, shown):
    """Lightning kills the first process of a job where it sees that another has ended with an error code."""
    line = [sys.executable, "-c", LAUNCHER, STARTED.format(then="sys.exit(143)"), seconds]
    done = subprocess.run(line, env=os.environ | {"LOCAL_RANK": rank}, capture_output=True, text=True, timeout=100)
    assert done.stdout.split()[1:] == [shown], done.stderr


def test_a_rank_that_waits_for_others_does_not_outlive_the_process_that_started_it():
    line = [sys.executable, "-c", LAUNCHER, STARTED.format(then="time.sleep(1800)"), "0"]
    done = subprocess.run(line, env=os.environ | {"LOCAL_RANK": "1"}, capture_output=True, text=True, timeout=100)
    rank, shown = done.stdout.split()
    assert shown == "waits"
    deadline = time.monotonic() + 60
    while psutil.pid_exists(int(rank)) and psutil.Process(int(rank)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.1)
