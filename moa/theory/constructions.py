"""The networks that equal the targets, and the best fixed one that is known in closed form."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import atanh
from typing import Any

import torch
from torch import Tensor

from moa.theory.networks import Network
from moa.theory.targets import LAMBDA, TYPE_ONE, TYPE_TWO, Target

Values = Mapping[str, Mapping[Any, float]]
"""Name of a parameter -> index -> value; the other entries are 0."""


@dataclass(frozen=True)
class Construction:
    """A network with its parameters: theta (P,)."""

    label: str
    network: Network
    theta: Tensor


def exact(target: Target) -> list[Construction]:
    """The networks of one neuron that equal a target; wider ones follow by adding neurons of weight 0."""
    return {"sum": _sum, "gated": _gated, "product": _product}[target.name](target.d)


def _sum(d: int) -> list[Construction]:
    la = Network("LA", "la", "la", TYPE_ONE, d, 1)
    moa = Network("MoA", "moa", "moa", TYPE_ONE, d, 1)
    used = [TYPE_ONE.index("relu"), TYPE_ONE.index("relu2")]
    neuron = {"w1.weight": {(0, 0): 1.0}}
    return [
        build("one LA neuron", la, {**neuron, "alpha": dict.fromkeys(used, 1.0), "w2.weight": {(0, 0): 1.0}}),
        # MoA contains LA by constant gates: tanh(b) = 1/2, doubled by the output.
        build(
            "one MoA neuron, gates constant by their bias",
            moa,
            {**neuron, "u.bias": dict.fromkeys(used, atanh(1 / 2)), "w2.weight": {(0, 0): 2.0}},
        ),
    ]


def _gated(d: int) -> list[Construction]:
    moa = Network("MoA", "moa", "moa", TYPE_ONE, d, 1)
    gate = {(TYPE_ONE.index("relu"), 0): LAMBDA}
    neuron = {"w1.weight": {(0, 1): 1.0}, "w2.weight": {(0, 0): 1.0}}
    return [build("one MoA neuron", moa, {**neuron, "u.weight": gate})]


def _product(d: int) -> list[Construction]:
    neuron: Values = {"w1.weight": {(0, 1): 1.0}, "w2.weight": {(0, 2): 1.0}}
    quadratic = Network("MoA", "qd-moa", "qd-moa", TYPE_TWO, d, 1)
    two_sided = Network("MoA", "bi-moa", "bi-moa", TYPE_TWO, d, 1)
    relu = TYPE_TWO.index("relu")
    pair = quadratic.layer.gate_labels()["pi"].index("relu*relu")
    return [
        build(
            "one qd-MoA neuron",
            quadratic,
            {**neuron, "u.weight": {(pair, 0): LAMBDA}, "w3.weight": {(0, 0): 1.0}},
        ),
        build(
            "one bi-MoA neuron, gates of one branch constant by their bias",
            two_sided,
            {**neuron, "v.weight": {(relu, 0): LAMBDA}, "u.bias": {relu: atanh(1 / 2)}, "w3.weight": {(0, 0): 2.0}},
        ),
    ]


def staircase(target: Target, width: int) -> Construction | None:
    """A piecewise-linear network of m ReLU neurons near the best for the first target, None for the others.

    Kinks at 0, 1/m, .., (m-1)/m and the slope of the chord between them: the gradient is off by 1/m, the value by
    1/(8 m^2) after a shift. Descent does not find it, since it does not feel where a gradient's step is.
    """
    if target.name != "sum":
        return None
    network = Network("fixed", "relu", "relu", None, 1, width)
    first, rise = 1 + 1 / width, 2 / width
    values: Values = {
        "w1.weight": {(j, 0): 1.0 for j in range(width)},
        "w1.bias": {j: -j / width for j in range(width)},
        "w2.weight": {(0, j): rise if j else first for j in range(width)},
        "w2.bias": {0: -1 / (8 * width**2)},
    }
    return build(f"{width} ReLU neurons, kinks evenly spaced", network, values)


def build(label: str, network: Network, values: Values) -> Construction:
    """A network with these parameters."""
    parameters = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in network.shapes.items()}
    for name, entries in values.items():
        for index, value in entries.items():
            parameters[name][index] = value
    return Construction(label, network, network.flatten(parameters))
