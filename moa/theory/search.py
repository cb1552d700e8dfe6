"""The whole search as two rounds of independent pieces of work, for one process or several."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moa.theory import sobolev
from moa.theory.constructions import staircase
from moa.theory.fitting import fit
from moa.theory.networks import Network, candidates, draw_starts
from moa.theory.sobolev import Distance
from moa.theory.targets import TARGETS, Target

POINTS = {1: 64, 2: 192, 3: 256}
"""d -> points that a network is fitted on."""


@dataclass(frozen=True)
class Effort:
    """How hard to look.

    Attributes:
        starts: of each network.
        seed: of starts and points.
        scout: least-squares steps from every start. The best quarter of them goes on, half of it with held kinks.
        finalists: how many fixed activations or pairs go on, the best by sum of squares.
        least_squares, minimax: steps of what goes on.
    """

    starts: int = 16
    seed: int = 0
    scout: int = 15
    finalists: int = 3
    least_squares: int = 50
    minimax: int = 20


@dataclass(frozen=True)
class Work:
    """A network to be fitted to a target, from the starts of its seed, or from some parameters on.

    Attributes:
        target: index into `TARGETS`.
        network: what is fitted.
        effort: how.
        theta, free: as in `fit`; None before the first round.
        loss: the best mean of squares after the first round.
    """

    target: int
    network: Network
    effort: Effort
    theta: Tensor | None = None
    free: Tensor | None = None
    loss: float = float("inf")


@dataclass(frozen=True)
class Fit:
    """The nearest network that a search found, by the distance on the grid; theta (P,)."""

    target: int
    network: Network
    theta: Tensor
    distance: Distance
    closed_form: bool = False
    """Whether it was written down, not found by descent."""


def first_round(widths: list[int], effort: Effort) -> list[Work]:
    """Every network of every width for every target, the long pieces of work first."""
    works = [
        Work(index, network, effort)
        for index, target in enumerate(TARGETS)
        for width in widths
        for network in candidates(target, width)
    ]
    return sorted(works, key=lambda work: (-work.network.d, -work.network.width, work.network.group == "fixed"))


def finalists(scouted: list[Work], effort: Effort) -> Iterator[Work]:
    """What goes on to the second round: LA, MoA and the best fixed networks of each target and width."""
    kept: dict[tuple[int, int], int] = {}
    chosen = set()
    for work in sorted(scouted, key=lambda work: work.loss):
        place = work.target, work.network.width
        if work.network.group != "fixed" or kept.get(place, 0) < effort.finalists:
            chosen.add(id(work))
            kept[place] = kept.get(place, 0) + (work.network.group == "fixed")
    return (work for work in scouted if id(work) in chosen)


def scout(work: Work) -> Work:
    """Takes a few steps from every start, and keeps those that promise most."""
    target, network, effort = TARGETS[work.target], work.network, work.effort
    points, goal = problem(target, effort.seed)
    # A seed of its own for each network, whatever else is fitted.
    name = f"{effort.seed} {target.name} {network.label} {network.width}"
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    theta, free = draw_starts(network, target, effort.starts, generator)
    theta = fit(network, theta, free, points, goal, least_squares=effort.scout, minimax=0)
    loss = (network.jet(theta, points) - goal).square().mean((1, 2)).nan_to_num(float("inf"))
    half = max(1, effort.starts // 8)
    kept = torch.cat([torch.arange(side, len(loss), 2)[loss[side::2].argsort(stable=True)[:half]] for side in (0, 1)])
    return Work(work.target, network, effort, theta[kept], free[kept], loss.min().item())


def refine(work: Work) -> Fit:
    """Fits to the end, and measures on the grid."""
    assert work.theta is not None
    assert work.free is not None
    target, network, effort = TARGETS[work.target], work.network, work.effort
    points, goal = problem(target, effort.seed)
    fitted = fit(network, work.theta, work.free, points, goal, least_squares=effort.least_squares, minimax=0)
    weighed = fit(network, fitted, work.free, points, goal, least_squares=0, minimax=effort.minimax)
    # Both are measured: of a network that can reach the target, the weights may have spoiled the convergence.
    ends = torch.cat([fitted, weighed])
    found = [(measure(target, network, theta), theta) for theta in ends]
    best, theta = min(found, key=lambda pair: pair[0].total)
    return Fit(work.target, network, theta, best)


def staircases(widths: list[int]) -> list[Fit]:
    """The fixed networks that are known in closed form, measured like the fits they compete with."""
    known = [(index, staircase(target, width)) for index, target in enumerate(TARGETS) for width in widths]
    return [
        Fit(index, it.network, it.theta, measure(TARGETS[index], it.network, it.theta), closed_form=True)
        for index, it in known
        if it is not None
    ]


def problem(target: Target, seed: int) -> tuple[Tensor, Tensor]:
    """The points to fit on (N, d), and the target's values and gradients there (N, 1 + d)."""
    points = sobolev.training_points(target, POINTS[target.d], seed)
    return points, sobolev.jet(target, points)


def measure(target: Target, network: Network, theta: Tensor) -> Distance:
    """The distance of a network, theta (P,), to its target on the grid."""
    points = sobolev.grid(target)
    return sobolev.distance(network.jet(theta[None], points)[0] - sobolev.jet(target, points))
