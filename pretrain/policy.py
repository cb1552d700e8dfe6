"""The settings that keep a run alive: when it saves, what it puts up with, how its end is told."""

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment

from pretrain.checkpoint import LAST
from pretrain.errors import UserError
from pretrain.faults import LossSpikes, StepGuard
from pretrain.metrics import DivergedError
from pretrain.saving import Checkpoints
from pretrain.watchdog import HangWatch

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningArgumentParser

LAUNCHER = "PRETRAIN_LAUNCHER"  # the variable that tells a rank the process by which it was started
LAUNCHER_SECONDS = 20.0  # in which that process ends, once it can
ORPHAN_SECONDS = 5.0

# name: (type, default, smallest value or None where it has to be above 0, help). A resumed run may change them all.
SETTINGS: dict[str, tuple[Any, Any, float | None, str]] = {
    "checkpoint_every_n_steps": (int | None, 1000, 1, "Optimizer steps between two last.ckpt; null: no such interval."),
    "checkpoint_every_n_minutes": (float | None, None, None, "Minutes between two last.ckpt; null: no such interval."),
    "keep_last_checkpoints": (int, 1, 1, "How many of the last checkpoints are kept: last.ckpt, earlier step_N.ckpt."),
    "max_skipped_steps": (
        int,
        10,
        0,
        "Steps in a row that are left out because loss or gradient is not finite; one more ends the run.",
    ),
    "loss_spike_deviations": (
        float | None,
        6.0,
        None,
        "A logged loss so many robust standard deviations above the last 50 is written to faults.jsonl; null: none is.",
    ),
    "hang_timeout_minutes": (
        float | None,
        30.0,
        None,
        "Without progress for so long, a run on several devices ends and names the rank that hangs; null: it waits.",
    ),
}
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def add_policy_arguments(parser: "LightningArgumentParser") -> None:
    """Add the settings to the command line."""
    for name, (kind, default, _, explanation) in SETTINGS.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=explanation)


def check_policy(config: Any) -> None:
    """Raise a UserError for a setting out of range."""
    for name, (_, _, smallest, _) in SETTINGS.items():
        value = config[name]
        if value is None:
            continue
        if smallest is not None and value < smallest:
            raise UserError(f"{name} is {value}: it has to be at least {smallest:g}")
        if smallest is None and not value > 0:
            raise UserError(f"{name} is {value}: it has to be above 0, or null")


def policy_callbacks(folder: Path, config: Any) -> list[Callback]:
    """Return the callbacks that look for faults."""
    return [
        StepGuard(folder, config.max_skipped_steps),
        LossSpikes(folder, config.loss_spike_deviations),
        HangWatch(folder, config.hang_timeout_minutes),
    ]


def checkpoints(folder: Path, config: Any) -> Checkpoints:
    """Return the callback that saves."""
    return Checkpoints(
        folder / "checkpoints",
        config.checkpoint_every_n_steps,
        config.checkpoint_every_n_minutes,
        config.keep_last_checkpoints,
    )


@contextmanager
def ends_in_one_line(folder: Path) -> Iterator[None]:
    """Tell of a full disk as of a mistake of the user's, and after any end of this kind where to go on from."""
    hook = threading.excepthook
    threading.excepthook = _without_writers
    try:
        yield
    except DivergedError as error:
        raise DivergedError(f"{error}; {last_good(folder)}") from error
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        reason = os.strerror(error.errno or 0)
        raise UserError(f"{folder} cannot be written ({reason}): make room; {last_good(folder)}") from error
    finally:
        threading.excepthook = hook


@contextmanager
def tied_to_launcher(trainer: L.Trainer) -> Iterator[None]:
    """Let a rank that Lightning has started end after the process that started it, and not outlive it for long.

    After: that process looks at its children every five seconds, and kills itself if one has ended with an error code.
    A job that is stopped in good order would lose its last line and its exit code, by which a scheduler requeues.
    Not for long: a rank that still waits for the others to join would do so for half an hour.
    """
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, LightningEnvironment) or environment.local_rank() == 0:
        os.environ[LAUNCHER] = str(os.getpid())
        try:
            yield
        finally:
            os.environ.pop(LAUNCHER, None)
        return
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    threading.Thread(target=_end_after, args=(launcher,), daemon=True, name="launcher").start()
    try:
        yield
    except BaseException:
        deadline = time.monotonic() + LAUNCHER_SECONDS
        while os.getppid() == launcher and time.monotonic() < deadline:
            time.sleep(0.05)
        raise


def _end_after(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.5)
    time.sleep(ORPHAN_SECONDS)  # in which the main thread ends by itself, and says why
    os._exit(1)


def last_good(folder: Path) -> str:
    """Say where a run that has ended can be gone on from."""
    last = folder / "checkpoints" / LAST
    return f"the last checkpoint is {last}" if last.exists() else "there is no checkpoint yet"


def _without_writers(failed: threading.ExceptHookArgs) -> None:
    """Keep the thread of the TensorBoard writer silent: its exception is raised in the main thread as well."""
    if type(failed.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(failed)
