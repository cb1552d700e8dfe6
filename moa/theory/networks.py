"""The classes of networks, as layers of `build_ffn` that are functions of one flat vector of parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

from moa.ffn import GATE_NAMES, FeedForward, build_ffn
from moa.theory.targets import TYPE_ONE, TYPE_TWO, Target

GROUPS = ("fixed", "LA", "MoA")


@dataclass(frozen=True)
class Network:
    """A scalar network of one class and width, f(theta, x), with all biases that the augmented input (x, 1) gives.

    The output has a bias too, which the classes of the theorems may not have: it can only bring the weaker ones nearer.

    Attributes:
        group: "fixed", "LA" or "MoA".
        label: which activation, pair or kind.
        kind, activations: as in `build_ffn`. A fixed pair of Type-II is a quadratic LA layer with a held coefficient.
        d, width: numbers of inputs and hidden channels.
        held: coefficients that are no parameters of this class, by name.
    """

    group: str
    label: str
    kind: str
    activations: tuple[str, ...] | None
    d: int
    width: int
    held: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @cached_property
    def layer(self) -> FeedForward:
        """A layer with this class's parameters, whose values are of no account."""
        gates: dict[str, Any] = {"gate": "tanh", "gate_bias": True} if self.group == "MoA" else {}
        # The reference: `vmap` has no rule for the fused operation.
        return build_ffn(
            self.kind,
            self.d,
            self.width,
            out_features=1,
            activations=self.activations,
            bias=True,
            implementation="reference",
            dtype=torch.float64,
            **gates,
        )

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Name -> shape of each parameter, in the order of theta."""
        return {name: parameter.shape for name, parameter in self.layer.named_parameters()}

    @property
    def inputs(self) -> list[str]:
        """The names of the input projections: one, or two of Type-II."""
        return ["w1"] if self.layer.w3 is None else ["w1", "w2"]

    def flatten(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Parameters by name -> theta (P,)."""
        return torch.cat([parameters[name].reshape(-1).to(torch.float64) for name in self.shapes])

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """theta (P,) -> parameters by name."""
        pieces = theta.split([shape.numel() for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    def value(self, theta: Tensor, x: Tensor) -> Tensor:
        """f(theta, x): (P,), (d,) -> ()."""
        return functional_call(self.layer, self.unflatten(theta), (x,)).squeeze(-1)

    def jet_at(self, theta: Tensor, x: Tensor) -> Tensor:
        """Value and gradient in x: (P,), (d,) -> (1 + d,)."""
        return torch.cat([self.value(theta, x)[None], grad(self.value, 1)(theta, x)])

    def jet(self, theta: Tensor, x: Tensor) -> Tensor:
        """Value and gradient in x: (S, P), (N, d) -> (S, N, 1 + d)."""
        return vmap(vmap(self.jet_at, (None, 0)), (0, None))(theta, x)

    def jacobian(self, theta: Tensor, x: Tensor) -> Tensor:
        """The derivative of `jet` in theta: (S, P), (N, d) -> (S, N, 1 + d, P)."""
        return vmap(vmap(jacrev(self.jet_at), (None, 0)), (0, None))(theta, x)


def candidates(target: Target, width: int) -> list[Network]:
    """Every class that is fitted to a target: all fixed activations, or pairs of them, then LA, then MoA."""
    if not target.two_branches:
        fixed = [Network("fixed", name, name, None, target.d, width) for name in TYPE_ONE]
        return [
            *fixed,
            Network("LA", "la", "la", TYPE_ONE, target.d, width),
            Network("MoA", "moa", "moa", TYPE_ONE, target.d, width),
        ]
    pairs = [(p, q) for index, p in enumerate(TYPE_TWO) for q in TYPE_TWO[index:]]
    return [
        *(fixed_pair(p, q, target.d, width) for p, q in pairs),
        Network("LA", "qd-la", "qd-la", TYPE_TWO, target.d, width),
        Network("MoA", "qd-moa", "qd-moa", TYPE_TWO, target.d, width),
    ]


def fixed_pair(p: str, q: str, d: int, width: int) -> Network:
    """sum_j a_j sigma_p(w_j . x) sigma_q(u_j . x)."""
    names, alpha = ((p,), (1.0,)) if p == q else ((p, q), (0.0, 1.0, 0.0))
    return Network("fixed", f"{p}*{q}", "qd-la", names, d, width, {"alpha": alpha})


@torch.no_grad()
def draw_starts(network: Network, target: Target, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where fits start, and what they may move: theta (n, P), and whether each entry of it is free (n, P).

    Every other start holds kinks where the target has them: each neuron's plane w . x + b = 0, of either branch, has an
    even chance to be that of a random kink, for good. A descent alone cannot put a kink in exactly the right place
    unless the values call for it, and without that the gradient is wrong beside it.
    """
    thetas, free = [], []
    for index in range(n):
        parameters = {name: torch.randn(shape, generator=generator).double() for name, shape in network.shapes.items()}
        movable = {name: torch.ones(shape, dtype=torch.bool) for name, shape in network.shapes.items()}
        for name in (name for name in parameters if name.split(".")[0] in GATE_NAMES.values()):
            parameters[name] *= 0.3  # a gate that starts saturated hardly moves
        for name in network.inputs:
            weight = parameters[f"{name}.weight"].mul_(2)
            anchor = 2 * torch.rand(network.width, network.d, generator=generator).double() - 1
            parameters[f"{name}.bias"] = -(weight * anchor).sum(1)
            if index % 2:
                _hold_kinks(name, parameters, movable, target, generator)
        for name, value in network.held.items():
            parameters[name] = torch.tensor(value)
            movable[name].fill_(False)
        thetas.append(network.flatten(parameters))
        free.append(network.flatten(movable).bool())
    return torch.stack(thetas), torch.stack(free)


def _hold_kinks(
    name: str,
    parameters: dict[str, Tensor],
    movable: dict[str, Tensor],
    target: Target,
    generator: torch.Generator,
) -> None:
    weight, bias = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
    for row in range(len(weight)):
        held, axis = (
            torch.randint(2, (1,), generator=generator),
            torch.randint(len(target.kinks), (1,), generator=generator),
        )
        if held:
            k = target.kinks[int(axis)]
            other = [i for i in range(weight.shape[1]) if i != k]
            weight[row, other], bias[row] = 0.0, 0.0
            movable[f"{name}.weight"][row, other] = False
            movable[f"{name}.bias"][row] = False
