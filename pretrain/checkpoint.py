"""Checkpoints: when they are written, where they are found, how their weights are read. Nothing in one is executed."""

import math
import os
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from pretrain.atomic import publish, remove, settled
from pretrain.errors import UserError
from pretrain.faults import StepGuard
from pretrain.metrics import check_finite
from pretrain.paths import user_path
from pretrain.shards import assembled, is_shard_folder, read_shards
from pretrain.untrusted import check_archive, check_content

LAST = "last.ckpt"
NEXT = "next.ckpt"  # whole, and about to become last.ckpt
EARLIER = "step_*.ckpt"  # what was last.ckpt before
BEST = "best.ckpt"
# What a checkpoint holds besides weights if a run can go on from it.
RESUMABLE = ("global_step", "pytorch-lightning_version", "loops", "optimizer_states", "lr_schedulers", "config")


def find_checkpoint(run_or_file: str | Path) -> Path:
    """Return the checkpoint of a run folder (its last one) or the checkpoint itself: a file, or a folder of shards.

    A folder of runs, such as runs/lm_tiny, stands for the run in it that has saved last.

    Raises:
        UserError: if there is none.
    """
    path = settled(user_path(run_or_file))
    if is_checkpoint(path):
        return path
    if path.is_dir():
        for name in (LAST, NEXT):  # killed between two renames, see shift_checkpoints
            if is_checkpoint(last := settled(path / "checkpoints" / name)):
                return last
        of_runs = [settled(run / "checkpoints" / LAST) for run in path.iterdir()]
        of_runs = [file for file in of_runs if is_checkpoint(file)]
        of_runs.sort(key=lambda file: (file.stat().st_mtime_ns, file))
        if of_runs:
            return of_runs[-1]
        raise UserError(
            f"{path} holds no checkpoints/{LAST}, nor does a folder in it: give the folder of a run that has saved, "
            "or a .ckpt file"
        )
    raise UserError(f"{path} does not exist: give the folder of a run or a .ckpt file")


def is_checkpoint(path: Path) -> bool:
    """Return whether something is a file, or a folder of shards, and so may be a checkpoint."""
    return path.is_file() or is_shard_folder(path)


def read_checkpoint(file: str | Path, resumable: bool = False, lazy: bool = False) -> dict[str, Any]:
    """Load a checkpoint, a file or a folder of shards, to the CPU: tensors and primitives only.

    Args:
        resumable: ask for optimizer, data position and counters too, not for weights alone.
        lazy: leave tensors on the disk until they are used: a file's as memory maps (as always), a folder's as
            `pretrain.shards.StoredTensor`, which has shape, type and slices.

    Raises:
        UserError: if it is damaged, holds anything else, or lacks something.
    """
    if is_shard_folder(Path(file)):
        checkpoint = read_shards(Path(file), with_optimizer=resumable)
        if not lazy:
            checkpoint = assembled(checkpoint)
    else:
        checkpoint = _read_file(file)
    needed = ("state_dict", *(RESUMABLE if resumable else ()))
    missing = [key for key in needed if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise UserError(f"{file} is no checkpoint of a run: it has no {' and no '.join(missing)}")
    return checkpoint


def _read_file(file: str | Path) -> Any:
    if not zipfile.is_zipfile(file):
        raise UserError(f"{file} is no readable checkpoint (empty, cut short or of another kind): use another one")
    try:
        check_archive(file)
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        check_content(checkpoint)
        return checkpoint
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} is no readable checkpoint: it holds more than tensors and plain values, and nothing is executed"
        ) from error
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{file} is no readable checkpoint ({reason}): use another one") from error


def model_weights(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the model's own state dict from a checkpoint of its LightningModule."""
    prefix = "model."
    return {name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items()}


def check_same_architecture(model: nn.Module, checkpoint: dict[str, Any], where: str) -> None:
    """Raise a UserError, naming the first differences, unless the weights fit the model exactly."""
    weights = {name: tuple(value.shape) for name, value in model_weights(checkpoint).items()}
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if weights == wanted:
        return
    missing = sorted(set(wanted) - set(weights))
    unknown = sorted(set(weights) - set(wanted))
    differ = [
        f"{name} {weights[name]} instead of {wanted[name]}"
        for name in sorted(set(weights) & set(wanted))
        if weights[name] != wanted[name]
    ]
    parts = [
        f"{len(names)} {what} ({', '.join(names[:2])}{', ..' if len(names) > 2 else ''})"
        for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", differ))
        if names
    ]
    raise UserError(
        f"{where} belongs to another architecture, parameters {' and '.join(parts)}: "
        "set the model's keys as in the run that wrote it (its config.yaml)"
    )


def load_weights(model: nn.Module, run_or_file: str | Path) -> None:
    """Copy the weights of a checkpoint into the model; optimizer, schedule and data position are left out."""
    file = find_checkpoint(run_or_file)
    checkpoint = read_checkpoint(file)
    check_same_architecture(model, checkpoint, str(file))
    model.load_state_dict(model_weights(checkpoint))


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint beside its place and move it there when it is whole and on the disk.

    Whatever happens in between, a kill or a full disk, the checkpoint before it stays as it was. (Lightning writes in
    the system's temporary folder; from there, a move to another file system is a copy that can be cut short.)
    """

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        if is_shard_folder(Path(path)):
            return read_checkpoint(path, resumable=True)
        return super().load_checkpoint(path, weights_only=weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        unfinished = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            publish(unfinished, path)
        except (OSError, RuntimeError) as error:  # torch.save speaks of a full disk as a RuntimeError
            unfinished.unlink(missing_ok=True)
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"{path} cannot be written ({reason}): make room; what was there before is whole, go on with --resume"
            ) from error


class Checkpoints(Checkpoint):
    """Save `last.ckpt` at an interval and at the end, and `best.ckpt` whenever the validation loss improves.

    A step that is also validated is saved after its validation, so that the checkpoint knows the outcome.

    Args:
        folder: where they go.
        every_n_steps: optimizer steps between two saves; None: none for their number.
        every_n_minutes: a step that ends so long after the last save is saved, by the clock of rank 0; None: none.
        keep_last: how many of the last saves are kept: `last.ckpt`, and those before it as `step_N.ckpt`.
        monitor: the validation metric that decides the best; lower is better.
    """

    def __init__(
        self,
        folder: str | Path,
        every_n_steps: int | None = 1000,
        every_n_minutes: float | None = None,
        keep_last: int = 1,
        monitor: str = "val/loss",
    ) -> None:
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.keep_last = keep_last
        self.monitor = monitor
        self.best: float | None = None
        self.time_is_up = False  # for a save by the clock; all ranks hear of it in one step, see StopSignal
        self._saved_step = -1
        self._saved_at = 0.0
        self._is_postponed = False

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Each rank has named the folder by its own clock.
        self.folder = trainer.strategy.broadcast(self.folder)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The first micro-batch end that sees a new step is the one that made it: nothing is half accumulated.
        if not is_validated_next(trainer, batch_idx):
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value = float(trainer.callback_metrics.get(self.monitor, math.nan))
        if math.isfinite(value) and (self.best is None or value < self.best):
            self.best = value
            self._save(trainer, BEST)
        if trainer.should_stop:
            self.save_last(trainer)
        else:
            self._save_if_due(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step != self._saved_step:
            self.save_last(trainer)

    def clock_says_save(self) -> bool:
        """Return whether the interval in minutes is over, by the clock of this process."""
        return self.every_n_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_n_minutes

    def save_last(self, trainer: L.Trainer) -> None:
        """Write `last.ckpt`; call it on every rank, between two optimizer steps.

        Raises:
            DivergedError: too many steps in a row were left out, or a weight is not finite; nothing is overwritten.
        """
        if self.keep_last == 1:
            self._save(trainer, LAST)
        else:
            self._save(trainer, NEXT)
            if trainer.is_global_zero:
                shift_checkpoints(self.folder, self.keep_last)
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        self.time_is_up = self._is_postponed = False

    def _save_if_due(self, trainer: L.Trainer) -> None:
        by_steps = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if trainer.global_step == self._saved_step or not (by_steps or self.time_is_up or self._is_postponed):
            return
        if steps_left_out(trainer):  # it may be the weights that break the steps: the checkpoint before is a safer one
            self._is_postponed = True
        else:
            self.save_last(trainer)

    def _save(self, trainer: L.Trainer, name: str) -> None:
        steps_left_out(trainer)  # a checkpoint counts them
        # The guard looks at gradients: only the weights tell what an update with finite ones has done.
        check_finite("the sum of the weights", weights_sum(trainer), trainer)
        for logger in trainer.loggers:  # after a kill, the records reach as far as the checkpoint
            logger.save()
        trainer.save_checkpoint(self.folder / name)


def shift_checkpoints(folder: Path, keep: int) -> None:
    """Make `next.ckpt`, which is whole, `last.ckpt`, and the last one `step_N.ckpt`; of all these keep the newest.

    Files or folders. Killed anywhere in between, every checkpoint still lies there whole under one of the names.
    """
    last = folder / LAST
    if last.exists():
        try:
            step = read_checkpoint(last, lazy=True)["global_step"]
            publish(last, folder / EARLIER.replace("*", f"{step:08d}"))
        except UserError:  # torn, by whatever befell it later
            remove(last)
    publish(folder / NEXT, last)
    earlier = sorted(folder.glob(EARLIER), key=lambda path: path.stat().st_mtime_ns)
    for path in earlier[: max(0, len(earlier) - (keep - 1))]:
        remove(path)


def steps_left_out(trainer: L.Trainer) -> int:
    """Return how many of the last steps in a row have not reached the weights; reads it from the device."""
    guards = [callback for callback in trainer.callbacks if isinstance(callback, StepGuard)]  # type: ignore[attr-defined]
    for guard in guards:
        guard.catch_up(trainer)
    return max((guard.in_a_row for guard in guards), default=0)


@torch.no_grad()
def weights_sum(trainer: L.Trainer) -> float:
    """Return the sum of all weights, over all ranks and their shards: it is finite if every weight is."""
    weights: list[Any] = list(trainer.lightning_module.parameters())
    shards = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
    total = torch.stack([shard.sum(dtype=torch.float32) for shard in shards]).sum()
    return float(trainer.strategy.reduce(total, reduce_op="sum"))


def is_validated_next(trainer: L.Trainer, batch_idx: int) -> bool:
    """Return whether a validation follows this micro-batch (not for intervals of time, which nobody knows ahead)."""
    every = trainer.val_check_batch
    return bool(trainer.enable_validation and every and math.isfinite(every) and (batch_idx + 1) % every == 0)
