"""The gate functions phi that turn logits u_k . x into bounded mixing weights."""

from collections.abc import Callable

import torch
from torch import Tensor

Gate = Callable[[Tensor], Tensor]


def softmax(logits: Tensor) -> Tensor:
    """Weights that compete: over the activations of one branch, or over all pairs of the quadratic kinds.

    (..., m) -> (..., m), summing to one over the last dimension.
    """
    # Autocast computes a softmax in float32; without the cast back the whole hidden activation would follow it there.
    return torch.softmax(logits, dim=-1).to(logits.dtype)


GATES: dict[str, Gate] = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "softmax": softmax}
"""Name -> function from logits (..., m) to weights (..., m). Sigmoid is the best in the paper (Table 2)."""


def find_gate(name: str) -> Gate:
    """The gate function called `name`; a ValueError that lists the valid ones if there is none."""
    if name not in GATES:
        raise ValueError(f"unknown gate {name!r}; valid gates: {', '.join(GATES)}")
    return GATES[name]
