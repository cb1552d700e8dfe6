"""The folder a run leaves: its configuration, its summary, and where they lie."""

import csv
import fcntl
import json
import math
import os
import platform
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only

from pretrain.atomic import write_atomically
from pretrain.callbacks import StopSignal, find_callback
from pretrain.errors import UserError
from pretrain.faults import StepGuard
from pretrain.metrics import DivergedError, StepMetrics
from pretrain.saving import Checkpoints

CONFIG = "config.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.csv"
LOCK = ".lock"


def new_run_folder(root: str | Path, name: str) -> Path:
    """Return `root/name/TIME`, a folder that does not exist yet (it is made when the run starts)."""
    folder = Path(root) / name / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    unique, number = folder, 2
    while unique.exists():
        unique, number = folder.with_name(f"{folder.name}_{number}"), number + 1
    return unique


@contextmanager
def claimed(folder: Path, anew: bool) -> Iterator[None]:
    """Hold a run folder for this process alone, and make it if the run is a new one.

    Raises:
        UserError: another process trains in it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=not anew)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except FileExistsError as error:
        raise UserError(f"{folder} has just been made by another run: start again") from error
    except OSError as error:
        raise UserError(
            f"the run folder {folder} cannot be made ({error.strerror}): choose another runs_dir"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UserError(f"another process trains in {folder}: wait for it, or stop it") from error
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(lock)


def write_json(file: Path, data: Any) -> None:
    """Write plain data as JSON, atomically; numbers that JSON does not know (nan, the infinities) become null."""
    write_atomically(file, json.dumps(_json_values(data), indent=2, allow_nan=False) + "\n")


def beside_run(checkpoint: Path, name: str) -> Path:
    """Return where a file about a checkpoint goes: to the folder of its run, or beside one that lies alone."""
    folder = checkpoint.parent
    return (folder.parent if (folder.parent / CONFIG).is_file() else folder) / name


def versions() -> dict[str, str]:
    """Return the versions that decide what a run computes."""
    found = {"python": platform.python_version()}
    for package in ("moa-pretrain", "torch", "lightning", "datasets", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_commit() -> str | None:
    """Return the commit of the code at work, marked if files differ from it; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held: on the GPU if it trains there, else its resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024  # bytes on macOS, kibibytes elsewhere


def samples_consumed(trainer: L.Trainer) -> int:
    """Return the samples that training has read so far, over all ranks and earlier lives of the run."""
    loader: Any = trainer.train_dataloader
    return loader.samples_consumed if loader is not None else 0


def read_curve(folder: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.csv, without empty cells and without a line that a kill has cut short."""
    file = folder / METRICS
    if not file.is_file():
        return []
    rows = []
    with file.open(newline="") as stream:
        for row in csv.DictReader(stream):
            try:
                rows.append({name: float(value) for name, value in row.items() if name and value})
            except (TypeError, ValueError):
                continue
    return [row for row in rows if "step" in row]


def _json_values(value: Any) -> Any:
    """Return nested data with null for numbers that JSON does not know: nan and the infinities."""
    if isinstance(value, dict):
        return {key: _json_values(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_json_values(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunRecord(L.Callback):
    """Write `config.yaml` when training starts and `summary.json` then and when it ends, whatever ends it.

    Args:
        folder: the run folder.
        config_text: the complete configuration as YAML.
    """

    def __init__(self, folder: Path, config_text: str) -> None:
        self.folder = folder
        self.config_text = config_text
        self._best: dict[str, float] = {}
        self._final: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "final": self._final}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self._final = state_dict["best"], state_dict["final"]

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._started = time.time()
        if trainer.is_global_zero:
            write_atomically(self.folder / CONFIG, self.config_text)
        self._write(trainer, pl_module, "running")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        if not metrics:
            return
        self._final = {"step": trainer.global_step, **metrics}
        if not self._best or metrics["val/loss"] < self._best["val/loss"]:
            self._best = dict(self._final)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        stop = find_callback(trainer, StopSignal)
        done = trainer.global_step >= trainer.max_steps
        state = "finished" if done else "interrupted" if stop and stop.requested else "stopped early"
        self._write(trainer, pl_module, state)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        if not hasattr(self, "_started"):  # nothing was trained, so there is no run to describe
            return
        interrupted, diverged = isinstance(exception, KeyboardInterrupt), isinstance(exception, DivergedError)
        state = "interrupted" if interrupted else "diverged" if diverged else "failed"
        with suppress(OSError):  # on a full disk it is the exception that is to be told
            self._write(trainer, pl_module, state, exception)

    @rank_zero_only
    def _write(self, trainer: L.Trainer, pl_module: Any, state: str, exception: BaseException | None = None) -> None:
        summary = self.summary(trainer, pl_module) | {"exit_state": state}
        if exception is not None:
            summary["error"] = f"{type(exception).__name__}: {exception}"
        write_json(self.folder / SUMMARY, summary)

    def summary(self, trainer: L.Trainer, pl_module: Any) -> dict[str, Any]:
        """Return what is known of the run so far, as plain data."""
        plan, steps = pl_module.plan, find_callback(trainer, StepMetrics)
        assert plan is not None
        rate = steps.steps * plan.units_per_step / steps.seconds if steps.seconds else None
        device = trainer.strategy.root_device
        return {
            "name": self.folder.parent.name,
            "exit_state": None,
            "step": trainer.global_step,
            "total_steps": plan.total_steps,
            f"{pl_module.unit}_seen": samples_consumed(trainer) * plan.units_per_sample,
            "final": {**self._final, **{k: v for k, v in steps.latest.items() if k.startswith("train/")}},
            "best": self._best,
            "skipped_steps": find_callback(trainer, StepGuard).skipped_steps,
            "parameters": pl_module.parameter_counts(),
            f"{pl_module.unit}_per_second": rate,
            "mfu": steps.latest.get("perf/mfu"),
            "peak_memory_bytes": peak_memory_bytes(device),
            "seconds": round(time.time() - self._started, 3),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "precision": str(trainer.precision),
            "plan": plan.as_dict(),
            "optimizer_groups": pl_module.optimizer_table,
            "versions": versions(),
            "git_commit": git_commit(),
            "checkpoints": str(find_callback(trainer, Checkpoints).folder),
        }
