"""The activations of `moa.activations` and their derivatives in torch, sharing what they share.

Three ways to the same values, by what they cost:

- `VALUES`: each by the function that torch has for it, in one pass through a block of tokens;
- `VALUES_WITH_SLOPES`: where the slopes are needed too, from one sigmoid, one tanh and one comparison;
- `VALUES_IN_ONE_LOOP`: where inductor writes one loop in float32, and not passes but arithmetic is what costs: sums,
  products and quotients alone, and everything even in t from |t|.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moa.activations import ACTIVATIONS


class Point:
    """The activations and their slopes at t; what several of them share is computed once."""

    def __init__(self, t: Tensor, with_slopes: bool, in_one_loop: bool) -> None:
        self.t = widened(t)
        self._values, self._slopes = VALUES_WITH_SLOPES if with_slopes else VALUES, SLOPES
        if in_one_loop and self.t.dtype == torch.float32:
            self._values, self._slopes = VALUES_IN_ONE_LOOP, SLOPES_IN_ONE_LOOP
        self._known: dict[str, Tensor] = {}

    def values(self, names: Sequence[str]) -> list[Tensor]:
        """sigma_k(t) for each name."""
        return [self[name] for name in names]

    def slopes(self, names: Sequence[str]) -> list[Any]:
        """sigma_k'(t) for each name, a tensor or a number."""
        return [self._slopes[name](self) for name in names]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            self._known[name] = self._values[name](self)
        return self._known[name]


# The fewest passes through a block: a number that is the first argument of `add` or `addcmul` saves one.
VALUES: dict[str, Callable[[Point], Tensor]] = {
    "id": lambda at: at.t,
    "gelu": lambda at: F.gelu(at.t),
    "silu": lambda at: F.silu(at.t),
    "relu2": lambda at: at["relu"] * at["relu"],
    "leaky_relu": lambda at: F.leaky_relu(at.t, 0.01),
    "tanh": lambda at: torch.tanh(at.t),
    "relu": lambda at: torch.relu(at.t),
}
VALUES_WITH_SLOPES: dict[str, Callable[[Point], Tensor]] = VALUES | {
    "silu": lambda at: at.t * at["sigmoid"],
    "sigmoid": lambda at: torch.sigmoid(at.t),
    "step": lambda at: torch.sign(at["relu"]),  # faster than a comparison, which makes booleans first
}


# For float32, and without calls, as torch's exp, erf and tanh are: for a call, all that a loop holds has to leave the
# registers. Tails are computed as such, by which they keep their digits. The coefficients have the least largest error
# of their degrees, relative for 2^t, |t| <= 1/2, and absolute for tanh, |t| <= 8.25; a test finds that error again.
POWER_OF_TWO = (1.00000007, 0.69314697, 0.2402212, 0.05550713, 0.00967554, 0.00132764)
TANH_LIMIT = 8.25
TANH_ABOVE = (0.999999959, 0.134223312, 0.00354510818, 2.14473493e-05, 1.45746886e-08)
TANH_BELOW = (1, 0.467556478, 0.0260641344, 0.000336755293, 8.26259882e-07)


def polynomial(t: Tensor, coefficients: Sequence[float]) -> Tensor:
    """coefficients[0] + coefficients[1] t + coefficients[2] t^2 + ..."""
    total: Any = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        total = total * t + coefficient
    return total


def power_of_two(t: Tensor) -> Tensor:
    """2^t for -126 <= t <= 126: of the whole part by adding to the exponent, of the rest, |.| <= 1/2, a polynomial."""
    whole = torch.round(t)
    bits = polynomial(t - whole, POWER_OF_TWO).view(torch.int32) + (whole.to(torch.int32) << 23)
    return bits.view(torch.float32)


def _tanh(at: Point) -> Tensor:
    t = at.t.clamp(-TANH_LIMIT, TANH_LIMIT)
    square = t * t
    return t * (polynomial(square, TANH_ABOVE) / polynomial(square, TANH_BELOW))


def _lower_sigmoid(at: Point) -> Tensor:
    exponential = power_of_two((at["|t|"] * -math.log2(math.e)).clamp(min=-126))
    return exponential / (1 + exponential)


def _lower_normal(at: Point) -> Tensor:
    """Equation 7.1.26 of Abramowitz and Stegun for erfc(|t| / sqrt 2) / 2, within 1e-7."""
    u = 1 / (1 + 0.3275911 * math.sqrt(0.5) * at["|t|"])
    series = u * (0.254829592 + u * (-0.284496736 + u * (1.421413741 + u * (-1.453152027 + u * 1.061405429))))
    return 0.5 * series * at["exp(-t^2/2)"]


VALUES_IN_ONE_LOOP: dict[str, Callable[[Point], Tensor]] = VALUES_WITH_SLOPES | {
    "|t|": lambda at: at.t.abs(),
    "exp(-t^2/2)": lambda at: power_of_two((at.t * at.t * (-0.5 * math.log2(math.e))).clamp(min=-126)),
    "sigmoid(-|t|)": _lower_sigmoid,
    "Phi(-|t|)": _lower_normal,
    "silu": lambda at: at["relu"] - at["|t|"] * at["sigmoid(-|t|)"],
    "gelu": lambda at: at["relu"] - at["|t|"] * at["Phi(-|t|)"],
    "tanh": _tanh,
    "step": lambda at: torch.where(at.t > 0, 1.0, 0.0),
    "-sign": lambda at: 1 - 2 * at["step"],
}


def _silu_slope(at: Point) -> Tensor:
    """At -|t|; at |t| it is 1 less that."""
    sigmoid = at["sigmoid(-|t|)"]
    return at["step"] + at["-sign"] * (sigmoid - at["|t|"] * sigmoid * (1 - sigmoid))


def _gelu_slope(at: Point) -> Tensor:
    """As that of SiLU, with the density of the normal distribution."""
    density = at["exp(-t^2/2)"] * (1 / math.sqrt(2 * math.pi))
    return at["step"] + at["-sign"] * (at["Phi(-|t|)"] - at["|t|"] * density)


SLOPES: dict[str, Callable[[Point], Any]] = {
    "id": lambda at: 1.0,
    "gelu": lambda at: torch.ops.aten.gelu_backward(torch.ones_like(at.t), at.t),  # faster than an erf of its own
    "silu": lambda at: torch.addcmul(at["sigmoid"], at["silu"], 1 - at["sigmoid"]),
    "relu2": lambda at: 2 * at["relu"],
    "leaky_relu": lambda at: (0.99 * at["step"]).add_(0.01),
    "tanh": lambda at: torch.addcmul(at.t.new_ones(()), at["tanh"], at["tanh"], value=-1),
    "relu": lambda at: at["step"],
}
SLOPES_IN_ONE_LOOP: dict[str, Callable[[Point], Any]] = SLOPES | {
    "silu": _silu_slope,
    "gelu": _gelu_slope,
}

_KNOWN = {name: ACTIVATIONS[name] for name in SLOPES}


def knows(name: str) -> bool:
    """Whether the derivative of this activation is here: of a name that still means what it did."""
    return name in _KNOWN and ACTIVATIONS.get(name) is _KNOWN[name]


def widened(t: Tensor) -> Tensor:
    """t in float32 at least, in which everything is computed."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


# A mixture needs no leaky ReLU of its own: it is a sum of others.
LEAKY_RELU = {"id": 0.01, "relu": 0.99}


def basis(form: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The functions that span a dictionary; the quadratic form would have more pairs of them than of the names."""
    if form == "quadratic" or "leaky_relu" not in names:
        return names
    others = [name for name in names if name != "leaky_relu"]
    return (*others, *[part for part in LEAKY_RELU if part not in others])


def in_basis(weights: list[Tensor], names: tuple[str, ...], parts: tuple[str, ...]) -> list[Tensor]:
    """The weights of a basis from those of the names."""
    if parts == names or not weights:
        return weights
    of = dict(zip(names, weights, strict=True))
    leaky = of.pop("leaky_relu")
    for part, share in LEAKY_RELU.items():
        of[part] = of[part] + share * leaky if part in of else share * leaky
    return [of[part] for part in parts]


def out_of_basis(sums: list[Tensor], names: tuple[str, ...], parts: tuple[str, ...]) -> list[Tensor]:
    """The gradients of the names' weights from those of a basis: what `in_basis` does, backwards."""
    if parts == names:
        return sums
    of = dict(zip(parts, sums, strict=True))
    of["leaky_relu"] = LEAKY_RELU["id"] * of["id"] + LEAKY_RELU["relu"] * of["relu"]
    return [of[name] for name in names]
