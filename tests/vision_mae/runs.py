"""Real runs of `vision_mae.fit` that take seconds, and pictures for them."""

from pathlib import Path
from typing import Any

from pretrain.cli import FinishedRun
from tests.runs import command_line
from vision_mae.fit import run

# Two blocks on the vendored emoji at half their size; every test overrides what it is about.
SMALL = {
    "model.width": 32,
    "model.depth": 2,
    "model.heads": 2,
    "model.image_size": 32,
    "model.decoder_width": 16,
    "model.decoder_depth": 1,
    "model.decoder_heads": 2,
    "model.probe.every_n_steps": 10,
    "model.probe.pool": "avg",
    "data.global_batch_size": 8,
    "data.micro_batch_size": 4,
    "data.num_workers": 0,
}


def arguments(runs_dir: Path, **changes: Any) -> list[str]:
    """Return the command line of a small run; `__` in a name stands for a dot."""
    return command_line(SMALL, runs_dir, changes)


def train(runs_dir: Path, *extra: str, **changes: Any) -> FinishedRun:
    """Run `vision_mae.fit` in this process."""
    return run([*arguments(runs_dir, **changes), *extra])
