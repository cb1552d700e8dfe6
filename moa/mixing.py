"""The reference: what happens between the input projections and the output projection, equation by equation.

Every function here is a pure function `(y, z, weights, activations) -> h`:

- `y = W1 x` and `z = W2 x`, both (..., D); a Type-I layer has no second branch, so there z is None;
- `weights` holds "pi" and, for the bi-sided mixture, "rho". One function serves LA and MoA: weights of shape (m,) are
  the constants of LA (alpha for pi, beta for rho), weights of shape (..., m) are the per-token gates of MoA;
- `activations` are the names sigma_1 .. sigma_m;
- `h` is (..., D), the hidden activation that the output projection reads.

A weight is one scalar per token and activation, shared by all D channels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add

import torch.nn.functional as F
from torch import Tensor

from moa.activations import ACTIVATIONS

Weights = Mapping[str, Tensor]
Mixing = Callable[..., Tensor]


def type_one(y: Tensor, z: None, weights: Weights, activations: Sequence[str]) -> Tensor:
    """Equation (1): sigma(y)."""
    (sigma,) = activations
    return ACTIVATIONS[sigma](y)


def type_two(y: Tensor, z: Tensor, weights: Weights, activations: Sequence[str]) -> Tensor:
    """Equation (2): sigma(y) * z; SwiGLU with sigma = SiLU."""
    (sigma,) = activations
    return ACTIVATIONS[sigma](y) * z


def type_one_mixture(y: Tensor, z: None, weights: Weights, activations: Sequence[str]) -> Tensor:
    """Equations (3) and (7): sum_k pi_k sigma_k(y)."""
    return _mixture(y, weights["pi"], activations)


def one_sided_mixture(y: Tensor, z: Tensor, weights: Weights, activations: Sequence[str]) -> Tensor:
    """Equations (4) and (8): SiLU(y) * sum_k pi_k sigma_k(z)."""
    return F.silu(y) * _mixture(z, weights["pi"], activations)


def bi_sided_mixture(y: Tensor, z: Tensor, weights: Weights, activations: Sequence[str]) -> Tensor:
    """Equations (5) and (9): sum_k rho_k sigma_k(y) * sum_l pi_l sigma_l(z)."""
    return _mixture(y, weights["rho"], activations) * _mixture(z, weights["pi"], activations)


def quadratic_mixture(y: Tensor, z: Tensor, weights: Weights, activations: Sequence[str]) -> Tensor:
    """Equations (6) and (10): sum_{k<=l} pi_kl sigma_k(y) * sigma_l(z), pi in the order of `pairs(m)`."""
    # Written as sum_k sigma_k(y) * (sum_{l>=k} pi_kl sigma_l(z)): m products of (..., D) to keep for the backward
    # instead of one for every pair.
    sigma_y = [ACTIVATIONS[name](y) for name in activations]
    sigma_z = [ACTIVATIONS[name](z) for name in activations]
    column = {pair: index for index, pair in enumerate(pairs(len(activations)))}
    terms = []
    for k in range(len(activations)):
        partners = [
            weights["pi"][..., column[k, j], None] * sigma_z[j]  # j is the equation's l
            for j in range(k, len(activations))
        ]
        terms.append(sigma_y[k] * reduce(add, partners))
    return reduce(add, terms)


def pairs(m: int) -> list[tuple[int, int]]:
    """The index set 0 <= k <= l < m of the quadratic mixture: (0, 0), (0, 1), .., (0, m-1), (1, 1), .."""
    return [(k, j) for k in range(m) for j in range(k, m)]


def _mixture(t: Tensor, weights: Tensor, activations: Sequence[str]) -> Tensor:
    """sum_k weights_k sigma_k(t); t (..., D), weights (m,) or (..., m)."""
    return reduce(add, [weights[..., k, None] * ACTIVATIONS[name](t) for k, name in enumerate(activations)])
