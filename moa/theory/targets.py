"""The functions that separate the classes, on the cube [-1, 1]^d, and what can be proven of the distance to them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moa.activations import relu2

LAMBDA = 2.0
"""The slope of the target's gate, tanh(lambda x1)."""

TYPE_ONE = ("relu", "relu2", "leaky_relu", "gelu", "silu", "tanh")
"""The dictionary of theorem 4.1."""

TYPE_TWO = ("id", *TYPE_ONE)
"""The dictionary of theorem 4.2."""


@dataclass(frozen=True)
class Target:
    """A function to be represented.

    Attributes:
        name: for file keys and options.
        formula: for people.
        d: number of inputs.
        function: (..., d) -> (...).
        kinks: the axes k whose plane x_k = 0 the gradient jumps across. There is no other kink.
        two_branches: whether Type-II networks are fitted to it, rather than Type-I.
        bound: (group, width) -> a proven lower bound of the distance of every network of that class, 0 if none.
    """

    name: str
    formula: str
    d: int
    function: Callable[[Tensor], Tensor]
    kinks: tuple[int, ...]
    two_branches: bool
    bound: Callable[[str, int], float]


def sum_of_two(x: Tensor) -> Tensor:
    """ReLU(x1) + ReLU2(x1), which LA has and no fixed activation."""
    return F.relu(x[..., 0]) + relu2(x[..., 0])


def gated(x: Tensor) -> Tensor:
    """tanh(lambda x1) ReLU(x2), which MoA has and LA has not."""
    return torch.tanh(LAMBDA * x[..., 0]) * F.relu(x[..., 1])


def three_factors(x: Tensor) -> Tensor:
    """tanh(lambda x1) ReLU(x2) ReLU(x3); the copy of the paper names "a three-factor product", these three are ours."""
    return gated(x) * F.relu(x[..., 2])


def sum_of_two_bound(group: str, width: int) -> float:
    """min(1/2, 1/m) for fixed networks of width m.

    The derivative jumps by 1 at 0. One that is continuous there, as with smooth activations, ReLU2, or a
    piecewise-linear network without a kink at 0, misses one side by 1/2. A piecewise-linear network with a kink at 0
    has at most m pieces on (0, 1], where the derivative 1 + 2x runs through an interval of length 2: on some piece
    through one of 2/m, of which a constant misses an end by 1/m.
    """
    return min(1 / 2, 1 / width) if group == "fixed" else 0.0


def gated_bound(group: str, width: int) -> float:
    """tanh(lambda) / 2 for fixed and LA networks of any width.

    Across x2 = 0 the gradient of such a network jumps by the same c at almost every x1: only neurons whose kink is that
    line contribute, each a constant. The target's jump is tanh(lambda x1), so they differ by tanh(lambda) at an end,
    and half of that is missed on one side of the line.
    """
    return float(torch.tanh(torch.tensor(LAMBDA))) / 2 if group != "MoA" else 0.0


TARGETS = (
    Target("sum", "ReLU(x1) + ReLU2(x1)", 1, sum_of_two, (0,), False, sum_of_two_bound),
    Target("gated", f"tanh({LAMBDA:g} x1) ReLU(x2)", 2, gated, (1,), False, gated_bound),
    # Here the jump across x2 = 0 is itself a function that a wider network comes nearer to: no bound for every width.
    Target("product", f"tanh({LAMBDA:g} x1) ReLU(x2) ReLU(x3)", 3, three_factors, (1, 2), True, lambda *_: 0.0),
)
