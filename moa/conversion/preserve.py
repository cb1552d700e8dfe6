"""Starting an LA or MoA layer from the function of a fixed one: which weight is open, how far the others are shut."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa.activations import ACTIVATIONS
from moa.ffn import COEFFICIENT_NAMES, GATE_NAMES, FeedForward, build_ffn
from moa.gates import find_gate
from moa.registry import find_kind

OPEN = {"sigmoid": 0.0, "softmax": 0.0, "tanh": math.atanh(0.5)}
"""The logit of an open gate. Sigmoid and tanh then weigh 1/2: the slope is large, and folding 2 is exact."""

SHUT = {"sigmoid": -14.0, "softmax": -14.0, "tanh": 0.0}
"""The logit of a shut gate: a weight of e^-14 = 8e-7, or 0 for tanh."""


@dataclass(frozen=True)
class Opening:
    """The mixing weight of each slot that makes a kind compute sigma(y) or sigma(y) * z, where the others are zero.

    `swap`: with W1 and W2 exchanged, which a quadratic kind needs if sigma comes before `id` in its dictionary.
    """

    swap: bool
    index: dict[str, int]


def find_opening(kind: str, activations: Sequence[str], sigma: str) -> Opening | None:
    """Finds by trial how `kind` over the dictionary `activations` contains the fixed layer of activation `sigma`.

    Returns None if it does not. Every single weight (pair of weights, bi-sided) is tried on numbers, in float64, so
    that it holds for any registered kind.
    """
    row = find_kind(kind)
    with torch.random.fork_rng(devices=[]):
        layer = build_ffn(kind, 1, 64, activations=activations or None, device="cpu", dtype=torch.float64)
    y = torch.linspace(-8, 8, 64, dtype=torch.float64, device="cpu")
    z = y.roll(23)[None]
    y = y[None]
    wanted = ACTIVATIONS[sigma](y) if row.projections == 1 else ACTIVATIONS[sigma](y) * z
    sizes = {slot: len(labels) for slot, labels in row.labels(activations).items()}
    for swap in (False, True)[: row.projections]:
        branches = (z, y) if swap else (y, z if row.projections == 2 else None)
        for choice in product(*(range(size) for size in sizes.values())):
            index = dict(zip(sizes, choice, strict=True))
            weights = {slot: _one_hot(sizes[slot], index[slot]) for slot in sizes}
            with torch.no_grad():
                mixed = layer.mix(*branches, weights)
            if torch.allclose(mixed, wanted, rtol=1e-9, atol=1e-12):
                return Opening(swap, index)
    return None


@torch.no_grad()
def set_open(layer: FeedForward, opening: Opening, shut: float | None = None) -> float:
    """Sets the coefficients, or the gates' rows to zero and their biases, and returns the weight that is left open.

    The output projection has to be divided by that weight (a product over both branches, bi-sided): 1 for LA.

    Args:
        shut: the logit of the gates that are shut; None for `SHUT`.
    """
    if layer.gate is None:
        for slot, index in opening.index.items():
            coefficients: nn.Parameter = getattr(layer, COEFFICIENT_NAMES[slot])
            coefficients.copy_(_one_hot(coefficients.numel(), index))
        return 1.0
    weight = 1.0
    for slot, index in opening.index.items():
        rows: nn.Linear = getattr(layer, GATE_NAMES[slot])
        nn.init.zeros_(rows.weight)
        nn.init.constant_(rows.bias, SHUT[layer.gate] if shut is None else shut)
        rows.bias[index] = OPEN[layer.gate]
        weight *= find_gate(layer.gate)(rows.bias)[index].item()
    return weight


@torch.no_grad()
def relative_error(layer: FeedForward, w1: nn.Linear, w2: nn.Linear | None, down: nn.Linear, opening: Opening) -> float:
    """The largest change of an output of a MoA layer, as a part of the largest output, on standard normal tokens.

    The layer has the gates of `set_open` and no projections yet; `w1`, `w2` and `down` are those of the layer it
    replaces. In float32, so that it measures the gates that are not quite shut and not the rounding of the model.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, w1.in_features, generator=generator, device="cpu").to(down.weight.device)
    y, z = _apply(w1, x), None if w2 is None else _apply(w2, x)
    twin = copy.deepcopy(layer).float()
    weights = twin.mixing_weights(x)
    others_zero = {slot: torch.zeros_like(weight) for slot, weight in weights.items()}
    for slot, index in opening.index.items():
        others_zero[slot][..., index] = weights[slot][..., index]
    exact, mixed = (F.linear(twin.mix(y, z, gates), down.weight.float()) for gates in (others_zero, weights))
    largest = exact.abs().max().item()
    return (mixed - exact).abs().max().item() / largest if largest > 0 else 0.0


def _apply(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.float(), None if linear.bias is None else linear.bias.float())


def _one_hot(size: int, index: int) -> Tensor:
    weights = torch.zeros(size, dtype=torch.float64, device="cpu")
    weights[index] = 1
    return weights
