"""When a run saves, and which of its checkpoints it keeps."""

import math
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint

from pretrain.atomic import publish, remove
from pretrain.checkpoint import BEST, EARLIER, LAST, NEXT, read_checkpoint
from pretrain.errors import UserError
from pretrain.faults import StepGuard
from pretrain.metrics import check_finite


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
