"""Where a model computes when no Trainer decides it."""

import re

import torch

from pretrain.errors import UserError

# Others that torch has a name for, such as meta, compute nothing or need a package of their own.
KNOWN = re.compile(r"cpu|(cuda|xpu)(:[0-9]+)?")


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; auto: the GPU if there is one.

    Raises:
        UserError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    advice = "give auto, cpu, cuda or cuda:N"
    if not KNOWN.fullmatch(name) and not (name == "mps" and torch.backends.mps.is_available()):
        raise UserError(f"the device {name!r} cannot be used here: {advice}")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"the device {name!r} cannot be used here ({reason}): {advice}") from error
    return device
