"""What tests of real runs share: their command line, what they leave, and how two of them are compared."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import torch

from pretrain.callbacks import StopSignal, find_callback

# Every small run: seconds on one core, saved and logged often.
COMMON = {
    "name": "small",
    "model.schedule.warmup_steps": 4,
    "data.source": "demo:val",
    "data.val_source": None,
    "data.val_fraction": 0.1,
    "trainer.max_steps": 20,
    "trainer.val_check_interval": 10,
    "trainer.log_every_n_steps": 5,
    "trainer.enable_progress_bar": False,
    "trainer.accelerator": "cpu",
    "checkpoint_every_n_steps": 5,
}


def command_line(settings: dict[str, Any], runs_dir: Path, changes: dict[str, Any]) -> list[str]:
    """Return the arguments of a run; `__` in the name of a change stands for a dot."""
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    settings = COMMON | settings | {"runs_dir": str(runs_dir)} | changes
    return [f"--{name}={'null' if value is None else value}" for name, value in settings.items()]


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


def whole_state(trainer: L.Trainer) -> dict[str, torch.Tensor]:
    """Return copies of all that an optimizer step may change on this rank: weights, buffers, optimizer state."""
    state = {name: value.detach().clone() for name, value in trainer.lightning_module.state_dict().items()}
    for number, slots in enumerate(trainer.optimizers[0].state.values()):
        state |= {f"optimizer.{number}.{name}": torch.as_tensor(value).clone() for name, value in slots.items()}
    return state
