"""What a run needs of the machine at the very least, told before anything is allocated.

A number with three zeros too many in a configuration would otherwise fill the memory of the machine before anyone is
told. The bounds are generous: whatever they refuse cannot run, and what they let pass may still need more.
"""

from typing import Any

import lightning as L
import torch

from pretrain.errors import UserError
from pretrain.memory import host_memory

# The numbers of a step's samples, their places in the stream and their targets, for one step and the next.
BYTES_PER_SAMPLE_OF_A_STEP = 32
# A process that has imported torch and Lightning.
BYTES_PER_PROCESS = 200 * 2**20


def device_memory(device: torch.device) -> int:
    """Return the memory of a device in bytes; other devices than CUDA's share the host's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else host_memory()


def check_size(module: Any, data: Any, trainer: L.Trainer) -> None:
    """Raise a UserError if model, batch or number of processes cannot fit, however they are spread.

    Args:
        module: a `pretrain.module.PretrainModule` without a model yet.
        data: its `pretrain.data.PretrainData`, before anything is read.
    """
    device = trainer.strategy.root_device
    on_host = device.type != "cuda"
    memory = device_memory(device)
    if on_host:
        _check("trainer.devices", trainer.num_devices, trainer.num_devices * BYTES_PER_PROCESS, memory)
    batch = data.global_batch_size
    _check("data.global_batch_size", batch, batch * BYTES_PER_SAMPLE_OF_A_STEP, host_memory())

    width = 2 if str(trainer.precision).endswith("16-true") else 4
    try:
        parameters, per_sample = module.least_sizes(data)
    except ValueError as error:
        raise UserError(str(error)) from error
    # Weights, their gradients and one running mean of these, sharded over all devices and offloaded to their hosts.
    needed, together = 3 * width * parameters, trainer.num_nodes * host_memory()
    if not on_host:
        together += trainer.world_size * memory
    if needed > together:
        raise UserError(
            f"the model has {parameters:,} parameters and needs {_gigabytes(needed)} or more with gradients and "
            f"optimizer, and there are {_gigabytes(together)}: make it smaller, or take more devices"
        )
    needed = data.micro_batch_size * per_sample * 2  # in 16 bits
    if needed > memory:
        raise UserError(
            f"data.micro_batch_size is {data.micro_batch_size:,}: so many samples need {_gigabytes(needed)} or more, "
            f"and a device has {_gigabytes(memory)}: make it or the samples smaller"
        )


def _check(key: str, value: int, needed: int, memory: int) -> None:
    if needed > memory:
        raise UserError(
            f"{key} is {value:,}: that needs {_gigabytes(needed)} or more, and there are {_gigabytes(memory)}: "
            "make it smaller"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size < 1e18 else ">1e9 GB"
