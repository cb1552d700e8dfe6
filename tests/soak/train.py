"""What the soak trains: `python -m tests.soak.train lm.fit|vision_mae.fit ARGUMENTS`, with some losses made NaN.

SOAK_NAN_STEPS names their steps, by commas: of the step alone, so that every life of a run meets the same.
"""

import importlib
import os
import sys
from typing import Any

import torch

from pretrain.cli import config_folder, fit
from pretrain.errors import command

NAN_STEPS = "SOAK_NAN_STEPS"


def poisoned(module_class: type) -> type:
    """Return a LightningModule class whose last rank computes a loss of NaN at some steps."""
    steps = {int(step) for step in os.environ.get(NAN_STEPS, "").split(",") if step}

    def training_output(self: Any, loss_sum: torch.Tensor, batch: dict[str, Any]) -> dict[str, Any]:
        if self.trainer.global_step in steps and self.global_rank == self.trainer.world_size - 1:
            loss_sum = loss_sum * float("nan")
        return module_class.training_output(self, loss_sum, batch)

    return type(module_class.__name__, (module_class,), {"training_output": training_output})


@command
def main(args: list[str] | None = None) -> None:
    name, *arguments = sys.argv[1:] if args is None else args
    domain = importlib.import_module(name)
    fit(
        poisoned(domain.MODULE_CLASS),
        domain.DATA_CLASS,
        prog=domain.PROG,
        description=domain.DESCRIPTION,
        demo_config=config_folder() / ("lm_tiny.yaml" if name == "lm.fit" else "mae_tiny.yaml"),
        args=arguments,
    )


if __name__ == "__main__":
    main()
