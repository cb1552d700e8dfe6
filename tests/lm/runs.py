"""Real runs of `lm.fit` that take seconds: what the tests of the command line, resume and records train."""

from pathlib import Path
from typing import Any

from lm.fit import run
from pretrain.cli import FinishedRun
from tests.runs import command_line

# A model of 2 layers on the vendored speeches; every test overrides what it is about.
SMALL = {
    "model.d_model": 32,
    "model.n_layers": 2,
    "model.n_heads": 2,
    "data.sequence_length": 32,
    "data.global_batch_size": 4,
    "data.micro_batch_size": 2,
    "trainer.limit_val_batches": 4,
}


def arguments(runs_dir: Path, **changes: Any) -> list[str]:
    """Return the command line of a small run; `__` in a name stands for a dot."""
    return command_line(SMALL, runs_dir, changes)


def train(runs_dir: Path, *extra: str, **changes: Any) -> FinishedRun:
    """Run `lm.fit` in this process."""
    return run([*arguments(runs_dir, **changes), *extra])
