"""The host does not wait for the device but in steps that log, validate or save; and what is saved is finite."""

from collections import Counter

import lightning as L
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.metrics import DivergedError
from tests.lm.runs import train
from tests.runs import run_folder, state_of


class Reads(TorchDispatchMode):
    """Counts the numbers that Python takes out of a tensor, which on a GPU waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


class CountReads(L.Callback):
    """Count them by the step, from the end of one to the end of the next."""

    by_step: Counter[int]

    def on_train_start(self, trainer, pl_module) -> None:
        CountReads.by_step = Counter()
        self.mode = Reads()
        self.mode.__enter__()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 0:
            self.mode.count = 0  # what came before the first step
        self._put_down(trainer.global_step)

    def on_train_end(self, trainer, pl_module) -> None:
        self._put_down(trainer.global_step)
        self.mode.__exit__(None, None, None)

    def _put_down(self, step: int) -> None:
        CountReads.by_step[step] += self.mode.count
        self.mode.count = 0


def test_nothing_is_read_from_the_device_between_steps_that_log(tmp_path):
    """20 steps of two micro-batches, of all that a step can have; logged at 10 and 20, validated and saved at 20."""
    train(
        tmp_path,
        "--trainer.callbacks+=tests.lm.test_host_reads.CountReads",
        trainer__log_every_n_steps=10,
        trainer__val_check_interval=20,
        trainer__gradient_clip_val=1.0,
        checkpoint_every_n_steps=20,
        model__moe="{n_experts: 4, top_k: 2, bias_update_rate: 0.001}",
        model__optimizer__name="muon_adamw",
    )
    assert {step for step, count in CountReads.by_step.items() if count} == {10, 20}
    assert CountReads.by_step[10] <= 4


class Poison(L.Callback):
    """Let the update of a step break a weight whose loss was finite still."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 8:
            with torch.no_grad():
                pl_module.model.head.weight[3, 3] = torch.nan


def test_a_checkpoint_of_broken_weights_is_not_written(tmp_path):
    with pytest.raises(DivergedError, match="the sum of the weights is nan at step 8"):
        train(
            tmp_path,
            "--trainer.callbacks+=tests.lm.test_host_reads.Poison",
            trainer__log_every_n_steps=20,
            trainer__val_check_interval=20,
            checkpoint_every_n_steps=4,
        )
    assert state_of(run_folder(tmp_path) / "checkpoints" / "last.ckpt")["step"] == 4
