"""Where a model computes when no Trainer decides it."""

import torch

from pretrain.errors import UserError


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; auto: the GPU if there is one.

    Raises:
        UserError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the device {name!r} cannot be used here ({reason}): give auto, cpu, cuda or cuda:N"
        ) from error
    return device
