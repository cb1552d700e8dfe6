"""The norm of W^{1,inf}, ||f||_inf + ||grad f||_inf, estimated on points.

The weak gradient is defined almost everywhere, and at a kink it is not: there a network has to match the gradient on
either side. So no point lies on a plane where the target's gradient jumps; the grid has a point on each side instead,
`ONE_SIDED` away from it. At every point a piecewise-smooth network is smooth with probability one, so that the maximum
over the grid is a lower bound of its true distance: a gap that is reported is real. A network with a continuous
gradient pays half the jump; one with a kink pays nothing if, and only if, its kink lies where the target's does (to
1e-9). Fits never see the points beside a kink (`training_points`), so no steep smooth network is made to pass between.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from moa.theory.targets import Target

ONE_SIDED = 1e-9
"""Distance of the nearest points of a grid to a kink of the target."""

GRID = {1: 2001, 2: 65, 3: 17}
"""d -> points on each axis of the grid; odd, so that 0 is among them."""


@dataclass(frozen=True)
class Distance:
    """How far a network is from a target, in W^{1,inf} on a grid."""

    value: float
    """max |f - T|"""
    gradient: float
    """max ||grad f - grad T||, Euclidean"""

    @property
    def total(self) -> float:
        """The norm in W^{1,inf} of the difference."""
        return self.value + self.gradient


def grid(target: Target, per_axis: int | None = None) -> Tensor:
    """The points where errors are measured: (N, d), on [-1, 1]^d with its boundary, on both sides of each kink."""
    axis = torch.linspace(-1, 1, per_axis or GRID[target.d], dtype=torch.float64)
    beside = torch.tensor([-ONE_SIDED, ONE_SIDED], dtype=torch.float64)
    broken = torch.cat([axis[axis < -ONE_SIDED], beside, axis[axis > ONE_SIDED]])
    return torch.cartesian_prod(*(broken if k in target.kinks else axis for k in range(target.d))).view(-1, target.d)


def training_points(target: Target, n: int, seed: int) -> Tensor:
    """The points that networks are fitted on: (n, d), a scrambled Sobol sequence in [-1, 1]^d."""
    sobol = torch.quasirandom.SobolEngine(target.d, scramble=True, seed=seed)
    return 2 * sobol.draw(n, dtype=torch.float64) - 1


def jet(target: Target, x: Tensor) -> Tensor:
    """The target's value and gradient: (N, d) -> (N, 1 + d)."""
    return torch.cat([target.function(x)[:, None], vmap(grad(target.function))(x)], dim=1)


def distance(difference: Tensor) -> Distance:
    """Args: difference of two jets (N, 1 + d). Not a number counts as infinite."""
    worst = norms(difference).nan_to_num(float("inf"))
    return Distance(worst[0].item(), worst[1].item())


def norms(difference: Tensor) -> Tensor:
    """The two parts of the norm: differences of jets (..., N, 1 + d) -> (..., 2), of value and of gradient."""
    gradient = difference[..., 1:].norm(dim=-1)
    return torch.stack([difference[..., 0].abs().amax(-1), gradient.amax(-1)], dim=-1)
