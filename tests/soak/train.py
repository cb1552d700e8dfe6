"""What the soak trains: `python -m tests.soak.train lm.fit|vision_mae.fit ARGUMENTS`, with some losses made NaN.

SOAK_NAN_STEPS names their steps, by commas: of the step alone, so that every life of a run meets the same.
SOAK_MEMORY names the file to which the first rank adds a line after each micro-batch: the bytes it holds.
"""

import importlib
import os
import sys
from typing import Any

import torch

from pretrain import optim
from pretrain.cli import config_folder, fit
from pretrain.errors import command
from tests.soak.memory import MEMORY, held_bytes

NAN_STEPS = "SOAK_NAN_STEPS"


def soaked(module_class: Any) -> type:
    """Return a LightningModule class whose last rank has a NaN loss at some steps, and whose first notes its memory."""
    steps = {int(step) for step in os.environ[NAN_STEPS].split(",")}

    def training_output(self: Any, loss_sum: torch.Tensor, batch: dict[str, Any]) -> dict[str, Any]:
        if self.trainer.global_step in steps and self.global_rank == self.trainer.world_size - 1:
            loss_sum = loss_sum * float("nan")
        return module_class.training_output(self, loss_sum, batch)

    def on_train_batch_end(self: Any, *args: Any) -> None:
        module_class.on_train_batch_end(self, *args)
        if self.global_rank == 0:
            with open(os.environ[MEMORY], "a") as memory:
                print(held_bytes(), file=memory)

    changes = {"training_output": training_output, "on_train_batch_end": on_train_batch_end}
    return type(module_class.__name__, (module_class,), changes)


@command
def main(args: list[str] | None = None) -> None:
    name, *arguments = sys.argv[1:] if args is None else args
    domain = importlib.import_module(name)
    # In bfloat16 it magnifies the last bits that sums in another order leave, and the losses could not be compared.
    optim.NEWTON_SCHULZ_TYPE = torch.float32
    fit(
        soaked(domain.MODULE_CLASS),
        domain.DATA_CLASS,
        prog=domain.PROG,
        description=domain.DESCRIPTION,
        demo_config=config_folder() / ("lm_tiny.yaml" if name == "lm.fit" else "mae_tiny.yaml"),
        args=arguments,
    )


if __name__ == "__main__":
    main()
