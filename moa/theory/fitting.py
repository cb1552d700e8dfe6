"""Fits many starts at once: Levenberg-Marquardt on values and gradients, then weights towards the least maximum."""

from collections.abc import Callable

import torch
from torch import Tensor

from moa.theory.networks import Network
from moa.theory.sobolev import norms

SOLVED = 1e-12
"""A start with an error below this is not refined any further."""


def fit(
    network: Network,
    theta: Tensor,
    free: Tensor,
    points: Tensor,
    goal: Tensor,
    *,
    least_squares: int,
    minimax: int,
    advance: Callable[[], object] = lambda: None,
) -> Tensor:
    """Moves every start towards the goal, independently of the others.

    The first steps minimise the sum of squares of all differences in value and gradient. Then, as in Lawson's
    algorithm, points are weighed by their differences time and again, which leads from the least sum of squares
    towards the least maximum. A step that makes the weighted sum larger is not taken, and damped more the next time.

    Args:
        network: gives residuals and Jacobian.
        theta: the starts (S, P).
        free: which entries may move (S, P).
        points: (N, d).
        goal: value and gradient to be met there (N, 1 + d).
        least_squares, minimax: numbers of steps of both phases.
        advance: called after each step.

    Returns:
        Of each start the parameters (S, P) whose sum of the two maxima over the points was the smallest.
    """
    damping = torch.full((len(theta), 1), 1e-2, dtype=theta.dtype)
    residual = network.jet(theta, points) - goal
    weights = torch.ones_like(residual[..., :2])
    best, best_error = theta, norms(residual).sum(-1)
    for step in range(least_squares + minimax):
        if step >= least_squares and (step - least_squares) % 2 == 0:
            weights = reweigh(weights, residual)
        scale = spread(weights, goal.shape[-1]).sqrt()
        change = damped_step(network.jacobian(theta, points), residual, scale, free, damping)
        trial = theta + change
        trial_residual = network.jet(trial, points) - goal
        before, after = ((scale * r).square().sum((1, 2)) for r in (residual, trial_residual))
        better = after < before  # false where it is not a number
        theta = torch.where(better[:, None], trial, theta)
        residual = torch.where(better[:, None, None], trial_residual, residual)
        damping = torch.where(better[:, None], damping / 5, damping * 4).clamp(1e-14, 1e10)
        error = norms(residual).sum(-1)
        best = torch.where((error < best_error)[:, None], theta, best)
        best_error = torch.minimum(error, best_error)
        advance()
    return best


def damped_step(jacobian: Tensor, residual: Tensor, scale: Tensor, free: Tensor, damping: Tensor) -> Tensor:
    """The step of Levenberg and Marquardt, (S, P): (J^T J + damping diag(J^T J)) step = -J^T r.

    Args:
        jacobian: (S, N, 1 + d, P).
        residual, scale: (S, N, 1 + d); the scale multiplies residuals, and so J.
        free: (S, P); other entries do not move.
        damping: (S, 1).
    """
    scaled = (jacobian * scale[..., None] * free[:, None, None, :]).flatten(1, 2)
    gradient = scaled.mT @ (residual * scale).flatten(1)[..., None]
    normal = scaled.mT @ scaled
    diagonal = normal.diagonal(dim1=1, dim2=2)
    # The floor keeps held entries and dead neurons, whose rows are zero, out of a singular matrix.
    floor = 1e-10 * diagonal.mean(1, keepdim=True) + torch.finfo(normal.dtype).tiny
    normal.diagonal(dim1=1, dim2=2).add_(damping * diagonal + floor)
    factor, failed = torch.linalg.cholesky_ex(normal)
    step = torch.cholesky_solve(-gradient, factor)[..., 0]
    return torch.where((failed[:, None] == 0) & free, step, torch.zeros_like(step))


def reweigh(weights: Tensor, residual: Tensor) -> Tensor:
    """Lawson's weights for the next problem: (S, N, 2), of value and gradient at each point, from (S, N, 1 + d)."""
    sizes = torch.stack([residual[..., 0].abs(), residual[..., 1:].norm(dim=-1)], dim=-1)
    largest = sizes.amax((1, 2), keepdim=True)
    grown = weights * (sizes / largest.clamp_min(SOLVED)).clamp_min(1e-2)
    grown = grown / grown.mean((1, 2), keepdim=True)
    return torch.where(largest > SOLVED, grown.clamp_min(1e-4), weights)


def spread(weights: Tensor, n: int) -> Tensor:
    """Weights of value and gradient for each of the n = 1 + d residuals: (S, N, 2) -> (S, N, n)."""
    return torch.cat([weights[..., :1], weights[..., 1:].expand(*weights.shape[:-1], n - 1)], dim=-1)
