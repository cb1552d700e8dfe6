"""Steps that must not reach the weights, and losses that stand out: left out, counted, written down."""

import json
import math
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from tqdm.auto import tqdm

from pretrain.atomic import write_atomically
from pretrain.loader import TrainLoader
from pretrain.metrics import DivergedError, StepMetrics, log_metrics

FAULTS = "faults.jsonl"
UNREAD_STEPS = 1000  # at most so many verdicts wait on the device to be read
SHOWN_SAMPLES = 8  # in the warning; the file has all


@dataclass(frozen=True)
class StepRecord:
    """Which samples an optimizer step has read, over all ranks: positions [start, stop) of the stream."""

    step: int
    start: int
    stop: int

    @classmethod
    def of_step_at_hand(cls, trainer: L.Trainer, steps_done: int) -> "StepRecord":
        loader: TrainLoader = trainer.train_dataloader  # type: ignore[assignment]
        return cls(steps_done, loader.samples_consumed - loader.global_batch_size, loader.samples_consumed)


class FaultLog:
    """`faults.jsonl` of a run: one JSON object a line, each appended in one piece. Warnings go to the terminal."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FAULTS

    @rank_zero_only
    def add(self, trainer: L.Trainer, kind: str, record: StepRecord, reason: str, **facts: Any) -> None:
        """Write a fault of a step down, with its samples, and warn of it in one line."""
        loader: TrainLoader = trainer.train_dataloader  # type: ignore[assignment]
        samples = loader.stream.read(record.start, record.stop).tolist()
        row = {"kind": kind, "step": record.step, "reason": reason, **facts}
        row |= {"positions": [record.start, record.stop], "samples": samples, "time": round(time.time(), 3)}
        append_line(self.file, json.dumps(row, allow_nan=False))
        shown = ", ".join(map(str, samples[:SHOWN_SAMPLES])) + (", .." if len(samples) > SHOWN_SAMPLES else "")
        verb = "left out" if kind == "skipped_step" else "noted"
        tqdm.write(f"warning: step {record.step} {verb}: {reason}; samples {shown} (all in {self.file})")

    @rank_zero_only
    def forget_after(self, step: int) -> None:
        """Drop the faults of steps that a resumed run takes again, and a line that a kill has cut short."""
        if not self.file.exists():
            return
        whole = [line for line in self.file.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1:] == "\n"]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        write_atomically(self.file, "".join(kept))


def append_line(file: Path, line: str) -> None:
    """Add a line to a file that has one writer: all of it, or nothing where the disk is full."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(descriptor).st_size
    left = f"{line}\n".encode()
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise
    finally:
        os.close(descriptor)


class StepGuard(L.Callback):
    """Leave out every optimizer step whose loss or gradient is not finite: all its micro-batches, on all ranks.

    Weights, moments, step counters of the optimizer and biases of routers stay as they were, to the last bit. The
    number of the step, its samples and its place in the schedule are used up, so that budget and intervals stay.

    The verdict is a number on the device, the same on all ranks. A fused optimizer reads it there as `found_inf`, the
    name torch has for it; for any other the host reads it in every step. Otherwise the host learns of it in steps that
    log or save, and only then counts, warns, and ends the run if too many followed each other.

    With the gradient scaler of 16-mixed an infinite gradient is how the scaler finds its scale, and no fault, unless
    the scale is down at 1 already.

    Args:
        folder: the run folder, for `faults.jsonl`.
        max_in_a_row: steps in a row that may be left out; one more ends the run.
    """

    def __init__(self, folder: Path, max_in_a_row: int = 10) -> None:
        self.max_in_a_row = max_in_a_row
        self.skipped_steps = 0
        self._log = FaultLog(folder)
        self.in_a_row = 0
        self._loss: Tensor | float = 0.0  # of the step at hand, this rank's part
        self._unread: list[tuple[StepRecord, Tensor]] = []  # (2,): is the loss, is the gradient broken

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self.skipped_steps, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped_steps, self.in_a_row = state_dict["skipped_steps"], state_dict["in_a_row"]

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._log.forget_after(trainer.global_step)

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        self._loss = self._loss + loss.detach()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        loss, self._loss = torch.as_tensor(self._loss), 0.0
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of shards
        pl_module.grad_norm = norm  # for the clipping and the log: reading all gradients once a step is enough
        broken = torch.stack([~loss.isfinite(), ~norm.isfinite().to(loss.device)]).float()
        broken = trainer.strategy.reduce(broken, reduce_op="sum")
        skip = (broken.sum() > 0).float()
        pl_module.skip_step = skip
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer.found_inf = skip  # type: ignore[attr-defined]
        elif bool(skip):
            for parameter in parameters:
                parameter.grad = None  # an optimizer leaves a parameter without a gradient alone
        if _is_scaling(trainer):
            broken = broken * broken.new_tensor([1.0, 0.0])
        self._unread.append((StepRecord.of_step_at_hand(trainer, trainer.global_step + 1), broken))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        if StepMetrics.is_due(trainer, trainer.global_step):
            self.catch_up(trainer)
            log_metrics(trainer, {"faults/skipped_steps": self.skipped_steps})
        elif len(self._unread) >= UNREAD_STEPS:
            self.catch_up(trainer)

    def catch_up(self, trainer: L.Trainer) -> None:
        """Read the verdicts of the steps since the last time; call it on all ranks, between two steps.

        Raises:
            DivergedError: too many steps in a row were left out.
        """
        unread, self._unread = self._unread, []
        if not unread:
            return
        verdicts = torch.stack([broken for _, broken in unread]).tolist()
        for (record, _), (loss, gradient) in zip(unread, verdicts, strict=True):
            if not loss and not gradient:
                self.in_a_row = 0
                continue
            self.skipped_steps += 1
            self.in_a_row += 1
            reason = f"the {'loss' if loss else 'gradient'} is not finite"
            self._log.add(trainer, "skipped_step", record, reason)
            if self.in_a_row > self.max_in_a_row:
                raise DivergedError(
                    f"{reason} at step {record.step}, the last of {self.in_a_row} in a row: lower the learning rate, "
                    "or clip gradients with trainer.gradient_clip_val"
                )


def _is_scaling(trainer: L.Trainer) -> bool:
    """Return whether a scale may be what makes gradients overflow. The scaler itself reads it in every step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and scaler.get_scale() > 1


class LossSpikes(L.Callback):
    """Write down a logged loss that is far above those before it; nothing else happens.

    Far: more than `deviations` robust standard deviations (1.4826 x the median distance from the median, at least 1% of
    the median) above the median of the last 50 logged losses, of which there have to be 20. A spike that lasts is told
    once.

    Args:
        folder: the run folder, for `faults.jsonl`.
        deviations: None switches it off.
    """

    WINDOW, ENOUGH = 50, 20

    def __init__(self, folder: Path, deviations: float | None = 6.0) -> None:
        self.deviations = deviations
        self._log = FaultLog(folder)
        self._losses: deque[float] = deque(maxlen=self.WINDOW)
        self._within_spike = False

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "within_spike": self._within_spike}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._losses.extend(state_dict["losses"])
        self._within_spike = state_dict["within_spike"]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        ends_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self.deviations is None or not ends_step or not StepMetrics.is_due(trainer, trainer.global_step):
            return
        (metrics,) = (callback for callback in trainer.callbacks if isinstance(callback, StepMetrics))  # type: ignore[attr-defined]
        loss = metrics.latest["train/loss"]
        if not math.isfinite(loss):  # the guard's business
            return
        limit = spike_limit(list(self._losses), self.deviations) if len(self._losses) >= self.ENOUGH else math.inf
        is_spike = loss > limit
        if is_spike and not self._within_spike:
            record = StepRecord.of_step_at_hand(trainer, trainer.global_step)
            reason = f"the loss of {loss:.4g} is a spike (above {limit:.4g})"
            self._log.add(trainer, "loss_spike", record, reason, loss=loss, limit=limit)
        self._within_spike = is_spike
        self._losses.append(loss)


def spike_limit(losses: list[float], deviations: float) -> float:
    """Return the loss above which the next one is a spike."""
    middle = statistics.median(losses)
    spread = 1.4826 * statistics.median(abs(loss - middle) for loss in losses)
    return middle + deviations * max(spread, 0.01 * abs(middle))
