"""Callbacks that break a run on purpose, for the command line of tests."""

import os
import signal
import time
from contextlib import suppress

import lightning as L
import torch

from tests.runs import whole_state


class Break(L.Callback):
    """Break the loss in the last micro-batch of some steps, on the last rank alone, and see that all stays as it was.

    With `gradient`, the loss stays finite and a gradient does not.
    """

    def __init__(self, steps: list[int], gradient: bool = False) -> None:
        self.steps = steps
        self.gradient = gradient
        self._before: dict[str, torch.Tensor] | None = None

    def setup(self, trainer, pl_module, stage) -> None:
        original = pl_module.training_step

        def training_step(batch, batch_idx):
            output = original(batch, batch_idx)
            if self._is_broken(trainer) and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                poison = _Poison.apply(next(pl_module.parameters()).sum())
                output["loss"] = output["loss"] + poison if self.gradient else output["loss"] * torch.nan
            return output

        pl_module.training_step = training_step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0 and trainer.global_step + 1 in self.steps:
            self._before = whole_state(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self._before is not None and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            after = whole_state(trainer)
            assert after.keys() == self._before.keys()
            for name, value in after.items():
                assert torch.equal(value, self._before[name]), f"rank {trainer.global_rank}: {name} has changed"
            self._before = None

    def _is_broken(self, trainer) -> bool:
        return trainer.global_step + 1 in self.steps and trainer.global_rank == trainer.world_size - 1


class _Poison(torch.autograd.Function):
    """0 forward, inf backward."""

    @staticmethod
    def forward(ctx, x):
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


class LeaveOut(L.Callback):
    """Take the gradients of some steps away, and the buffers back to where they were: the run without these batches."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps
        self._buffers: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step + 1 in self.steps:
            self._buffers = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
            for parameter in pl_module.parameters():
                parameter.grad = None

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        for name, before in self._buffers.items():
            pl_module.get_buffer(name).copy_(before)
        self._buffers = {}


class NormOfStep(L.Callback):
    """Remember the norm of the gradients that each optimizer step has seen."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            gradients = [parameter.grad for parameter in pl_module.parameters()]
            self.norms.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))


class Signal(L.Callback):
    """Send the process a signal in a step."""

    def __init__(self, step: int, number: str) -> None:
        self.step = step
        self.number = signal.Signals[number]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step + 1 == self.step:
            self.step = 0
            os.kill(os.getpid(), self.number)


class Hang(L.Callback):
    """Let rank 1 stand still in step 3."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            time.sleep(300)


class FillDisk(L.Callback):
    """Leave no byte on the disk of a file in a step."""

    def __init__(self, step: int, file: str) -> None:
        self.step = step
        self.file = file

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step + 1 == self.step:
            with suppress(OSError), open(self.file, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
