"""Checkpoints: when they are written, where they are found, how their weights are read. Nothing in one is executed."""

import math
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from pretrain.errors import UserError
from pretrain.metrics import StepMetrics, check_finite
from pretrain.paths import user_path
from pretrain.untrusted import check_archive, check_content

LAST = "last.ckpt"
BEST = "best.ckpt"
# What a checkpoint holds besides weights if a run can go on from it.
RESUMABLE = ("global_step", "pytorch-lightning_version", "loops", "optimizer_states", "lr_schedulers", "config")


def find_checkpoint(run_or_file: str | Path) -> Path:
    """Return the checkpoint file of a run folder (its last one) or the file itself.

    A folder of runs, such as runs/lm_tiny, stands for the run in it that has saved last.

    Raises:
        UserError: if there is none.
    """
    path = user_path(run_or_file)
    if path.is_file():
        return path
    if path.is_dir():
        last = path / "checkpoints" / LAST
        if last.is_file():
            return last
        of_runs = sorted(path.glob(f"*/checkpoints/{LAST}"), key=lambda file: (file.stat().st_mtime_ns, file))
        if of_runs:
            return of_runs[-1]
        raise UserError(
            f"{path} holds no checkpoints/{LAST}, nor does a folder in it: give the folder of a run that has saved, "
            "or a .ckpt file"
        )
    raise UserError(f"{path} does not exist: give the folder of a run or a .ckpt file")


def read_checkpoint(file: str | Path, resumable: bool = False) -> dict[str, Any]:
    """Load a checkpoint file to the CPU: tensors and primitives only.

    Args:
        resumable: ask for optimizer, data position and counters too, not for weights alone.

    Raises:
        UserError: if the file is damaged, holds anything else, or lacks something.
    """
    if not zipfile.is_zipfile(file):
        raise UserError(f"{file} is no readable checkpoint (empty, cut short or of another kind): use another one")
    try:
        check_archive(file)
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        check_content(checkpoint)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} is no readable checkpoint: it holds more than tensors and plain values, and nothing is executed"
        ) from error
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{file} is no readable checkpoint ({reason}): use another one") from error
    needed = ("state_dict", *(RESUMABLE if resumable else ()))
    missing = [key for key in needed if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise UserError(f"{file} is no checkpoint of a run: it has no {' and no '.join(missing)}")
    return checkpoint


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

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        unfinished = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
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
        every_n_steps: optimizer steps between two saves.
        monitor: the validation metric that decides the best; lower is better.
    """

    def __init__(self, folder: str | Path, every_n_steps: int = 1000, monitor: str = "val/loss") -> None:
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.monitor = monitor
        self.best: float | None = None
        self._saved_step = -1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Each rank has named the folder by its own clock.
        self.folder = trainer.strategy.broadcast(self.folder)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The first micro-batch end that sees a new step is the one that made it: nothing is half accumulated.
        if self._is_due(trainer) and not is_validated_next(trainer, batch_idx):
            self.save_last(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        value = float(trainer.callback_metrics.get(self.monitor, math.nan))
        if math.isfinite(value) and (self.best is None or value < self.best):
            self.best = value
            self._save(trainer, BEST)
        if self._is_due(trainer) or trainer.should_stop:
            self.save_last(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step != self._saved_step:
            self.save_last(trainer)

    def save_last(self, trainer: L.Trainer) -> None:
        """Write `last.ckpt`; call it on every rank, between two optimizer steps.

        Raises:
            DivergedError: if the step's loss or a weight is not finite; the checkpoint before it stays.
        """
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector of Lightning's
            if isinstance(callback, StepMetrics):
                loss = trainer.strategy.reduce(torch.as_tensor(callback.step_loss), reduce_op="sum")
                check_finite("the loss", float(loss), trainer)
        self._save(trainer, LAST)
        self._saved_step = trainer.global_step

    def _is_due(self, trainer: L.Trainer) -> bool:
        return trainer.global_step != self._saved_step and trainer.global_step % self.every_n_steps == 0

    def _save(self, trainer: L.Trainer, name: str) -> None:
        # The loss of a step was computed before its update: only the weights tell what that has done.
        check_finite("the sum of the weights", weights_sum(trainer), trainer)
        for logger in trainer.loggers:  # after a kill, the records reach as far as the checkpoint
            logger.save()
        trainer.save_checkpoint(self.folder / name)


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
