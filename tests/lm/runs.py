"""Real runs of `lm.fit` that take seconds: what the tests of the command line, resume and records train."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lm.fit import run
from pretrain.callbacks import StopSignal, find_callback
from pretrain.cli import FinishedRun

# A model of 2 layers on the vendored speeches; every test overrides what it is about.
SMALL = {
    "name": "small",
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "model.schedule.warmup_steps": 4,
    "data.sequence_length": 32,
    "data.global_batch_size": 4,
    "data.micro_batch_size": 2,
    "data.source": "demo:val",
    "data.val_source": None,
    "data.val_fraction": 0.1,
    "trainer.max_steps": 20,
    "trainer.val_check_interval": 10,
    "trainer.log_every_n_steps": 5,
    "trainer.limit_val_batches": 4,
    "trainer.enable_progress_bar": False,
    "trainer.accelerator": "cpu",
    "checkpoint_every_n_steps": 5,
}


def arguments(runs_dir: Path, **changes: Any) -> list[str]:
    """Return the command line of a small run; `__` in a name stands for a dot."""
    settings = SMALL | {"runs_dir": str(runs_dir)} | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--{name}={'null' if value is None else value}" for name, value in settings.items()]


def train(runs_dir: Path, *extra: str, **changes: Any) -> FinishedRun:
    """Run `lm.fit` in this process."""
    return run([*arguments(runs_dir, **changes), *extra])


def run_folder(runs_dir: Path) -> Path:
    """Return the folder of the only run below `runs_dir`."""
    (folder,) = (path.parent for path in runs_dir.glob("*/*/config.yaml"))
    return folder


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """Return the rows of a run's metrics.csv by step, without the empty cells."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {int(row["step"]): {name: float(value) for name, value in row.items() if value} for row in rows}


def state_of(checkpoint: Path) -> dict[str, Any]:
    """Return what has to be equal after an exact resume: parameters, optimizer, schedule, data position."""
    content = torch.load(checkpoint, weights_only=True)
    return {
        "weights": content["state_dict"],
        "optimizer": content["optimizer_states"],
        "schedule": content["lr_schedulers"],
        "step": content["global_step"],
        "data": content["loops"]["fit_loop"]["state_dict"]["combined_loader"],
    }


def assert_identical(a: Any, b: Any, where: str = "state") -> None:
    """Compare nested states to the last bit."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_identical(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_identical(x, y, f"{where}[{index}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


class StopAt(L.Callback):
    """Ask a run to stop after a step, as Ctrl-C does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            find_callback(trainer, StopSignal).requested = True
