"""Real runs of `vision_mae.fit` that take seconds, and pictures for them."""

from pathlib import Path
from typing import Any

from pretrain.cli import FinishedRun
from vision_mae.fit import run

# Two blocks on the vendored emoji at half their size; every test overrides what it is about.
SMALL = {
    "name": "small",
    "model.width": 32,
    "model.depth": 2,
    "model.heads": 2,
    "model.image_size": 32,
    "model.decoder_width": 16,
    "model.decoder_depth": 1,
    "model.decoder_heads": 2,
    "model.schedule.warmup_steps": 4,
    "model.probe.every_n_steps": 10,
    "model.probe.pool": "avg",
    "data.source": "demo:val",
    "data.val_source": None,
    "data.val_fraction": 0.1,
    "data.global_batch_size": 8,
    "data.micro_batch_size": 4,
    "data.num_workers": 0,
    "trainer.max_steps": 20,
    "trainer.val_check_interval": 10,
    "trainer.log_every_n_steps": 5,
    "trainer.enable_progress_bar": False,
    "trainer.accelerator": "cpu",
    "checkpoint_every_n_steps": 5,
}


def arguments(runs_dir: Path, **changes: Any) -> list[str]:
    """Return the command line of a small run; `__` in a name stands for a dot."""
    settings = SMALL | {"runs_dir": str(runs_dir)} | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--{name}={'null' if value is None else value}" for name, value in settings.items()]


def train(runs_dir: Path, *extra: str, **changes: Any) -> FinishedRun:
    """Run `vision_mae.fit` in this process."""
    return run([*arguments(runs_dir, **changes), *extra])
