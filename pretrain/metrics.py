"""Numbers of a run: where they are logged, and those of the training step."""

import csv
import math
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from pretrain.errors import UserError


def log_metrics(trainer: L.Trainer, metrics: dict[str, float]) -> None:
    """Send numbers to every logger, at the number of optimizer steps done so far.

    Lightning's `self.log` would put training metrics at step - 1 and mixes micro-batches into the axis.
    """
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)


class EventsLogger(TensorBoardLogger):
    """TensorBoard events in the run folder itself, without the hparams.yaml that config.yaml already is.

    Args:
        folder: where the event files go.
        resumed_step: points past it are of a life that the resumed checkpoint does not know: TensorBoard drops them.
    """

    def __init__(self, folder: str | Path, resumed_step: int = 0) -> None:
        super().__init__(str(folder), name="", version="", purge_step=resumed_step + 1 if resumed_step else None)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        try:
            super().log_metrics(metrics, step)
        except ValueError as error:  # what Lightning makes of whatever the writer says
            raise error.__cause__ or error from None

    @rank_zero_only
    def save(self) -> None:
        self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        with _quiet_after_a_failure(status):
            super().finalize(status)


class CsvLogger(Logger):
    """Write `metrics.csv`: one row a step, one column a metric, empty where a step has no value.

    Lightning's own CSVLogger deletes the rows of the run that it resumes; this one keeps those up to `resumed_step`.
    """

    def __init__(self, file: str | Path, resumed_step: int = 0) -> None:
        super().__init__()
        self.file = Path(file)
        self.resumed_step = resumed_step
        self._columns: list[str] = []  # of the file as this process has written it; none yet
        self._row: dict[str, float] = {}
        self._is_in_file = False  # the row at hand, in the state of the last save
        self._is_changed = False  # since then

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._row.get("step") != step:
            self.save()
            self._row, self._is_in_file = {"step": step or 0}, False
        self._row.update(metrics)
        self._is_changed = True

    @rank_zero_only
    def save(self) -> None:
        """Write out the row at hand; one that is in the file already, or has a new column, writes the file anew."""
        if not self._is_changed:
            return
        if not self._is_in_file and all(name in self._columns for name in self._row):
            with self.file.open("a", newline="") as stream:
                csv.DictWriter(stream, self._columns).writerow(self._row)
        else:
            rows = [*self._earlier_rows(), self._row]
            self._columns = list(dict.fromkeys(name for row in rows for name in row))
            self._write(rows)
        self._is_in_file, self._is_changed = True, False

    @rank_zero_only
    def finalize(self, status: str) -> None:
        with _quiet_after_a_failure(status):
            self.save()

    def _earlier_rows(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        with self.file.open(newline="") as stream:
            rows = [row for row in csv.DictReader(stream) if row["step"].isdigit()]  # a kill may cut a line short
        if not self._columns:  # left by the run that is resumed: what came after the checkpoint comes again
            return [row for row in rows if int(row["step"]) <= self.resumed_step]
        return rows[:-1] if self._is_in_file else rows

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_suffix(".tmp")
        with unfinished.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(unfinished, self.file)


def _quiet_after_a_failure(status: str) -> AbstractContextManager:
    """After a failure, such as a full disk, it is that which is to be told, and not that the disk is full still."""
    return suppress(OSError) if status == "failed" else nullcontext()


class DivergedError(UserError):
    """Loss, gradients or weights are not finite any more."""


def check_finite(what: str, loss: float, trainer: L.Trainer) -> None:
    """Raise a DivergedError unless a loss, the same on all ranks, is a finite number."""
    if not math.isfinite(loss):
        raise DivergedError(
            f"{what} is {loss} at step {trainer.global_step}: lower the learning rate, or clip gradients with "
            "trainer.gradient_clip_val"
        )


class StepMetrics(L.Callback):
    """Log `train/loss`, `optim/lr`, `optim/grad_norm` and `perf/...` every `trainer.log_every_n_steps` steps.

    The loss is the mean over all targets of the step: all micro-batches, all ranks. Between two logged steps nothing
    is read from the device. Time spent in validation does not count towards throughput.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self.seconds = 0.0  # spent in training steps, up to the last logged step
        self.steps = 0  # taken in that time
        self._loss_sum: torch.Tensor | float = 0.0
        self._lr = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._peak_flops = peak_flops(trainer) * trainer.world_size
        self._mark, self._mark_step, self._paused = time.perf_counter(), trainer.global_step, 0.0

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._pause_start = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._paused += time.perf_counter() - self._pause_start

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        if self.is_due(trainer, trainer.global_step + 1):
            self._lr = float(optimizer.param_groups[0]["lr"])  # of this step: the schedule moves on before it ends

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._loss_sum = self._loss_sum + outputs["loss_sum"]
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        loss_sum, self._loss_sum = self._loss_sum, 0.0
        if not self.is_due(trainer, trainer.global_step):
            return
        loss_sum = trainer.strategy.reduce(loss_sum, reduce_op="sum")
        self.latest = {
            "train/loss": float(loss_sum) / int(outputs["step_targets"]),
            "optim/lr": self._lr,
            "optim/grad_norm": float(pl_module.grad_norm),
            **self._throughput(trainer, pl_module),
        }
        log_metrics(trainer, self.latest)

    @staticmethod
    def is_due(trainer: L.Trainer, step: int) -> bool:
        """Return whether a step is logged."""
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector of Lightning's
        return step % every == 0 or step == trainer.max_steps

    def _throughput(self, trainer: L.Trainer, pl_module: Any) -> dict[str, float]:
        assert pl_module.plan is not None
        now = time.perf_counter()
        seconds = max(now - self._mark - self._paused, 1e-9)
        steps = trainer.global_step - self._mark_step
        self.seconds, self.steps = self.seconds + seconds, self.steps + steps
        self._mark, self._mark_step, self._paused = now, trainer.global_step, 0.0
        rate = steps * pl_module.plan.units_per_step / seconds
        return {
            f"perf/{pl_module.unit}_per_second": rate,
            "perf/mfu": rate * pl_module.flops_per_unit() / self._peak_flops,
        }


def peak_flops(trainer: L.Trainer) -> float:
    """Return the floating-point operations per second of one device at the run's precision.

    The maker's figure where Lightning knows the chip, else what a large matrix product reaches, measured for a moment.
    """
    device = trainer.strategy.root_device
    precision = str(trainer.precision)
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32
    known = get_available_flops(device, dtype) if device.type == "cuda" else None
    return float(known) if known else _measured_flops(device, dtype)


def _measured_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    size = 1024 if device.type == "cpu" else 8192
    a, b = torch.randn(2, size, size, device=device, dtype=torch.float32).to(dtype)
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        (a @ b)[0, 0].item()  # reading one number waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
