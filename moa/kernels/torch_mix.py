"""The mixture and its hand-derived backward pass in torch: block by block in cache, or compiled into one loop.

The four forms, named as in `moa.fused`; g is dL/dh, and every sum over channels is a gate's gradient:

    type_one     h = S(y)          S(t) = sum_k pi_k sigma_k(t)
    one_sided    h = SiLU(y) S(z)
    bi_sided     h = R(y) S(z)     R(t) = sum_k rho_k sigma_k(t)
    quadratic    h = sum_k sigma_k(y) P_k,    P_k = sum_{l>=k} pi_kl sigma_l(z)

Nothing but y, z and the gates is needed to go back: activations are computed again (`moa.kernels.torch_activations`).

Shapes: N tokens, D channels, m activations, R mixing weights of a token: m, or m(m+1)/2 for the quadratic form.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moa.kernels.torch_activations import Point, basis, in_basis, out_of_basis, widened
from moa.mixing import pairs

# (grad_y, grad_z, grad_pi, grad_rho); None for what a form does not have.
Gradients = tuple[Tensor, Tensor | None, Tensor, Tensor | None]

# Bytes of a block of rows, for each thread: small enough that the few blocks at work at a time stay in its cache.
BLOCK_BYTES = 2**18

# Makes inductor write everything in one loop over y, z and g. Left to itself it stores what several outputs share, and
# splits the work into several passes through memory.
ONE_LOOP: dict[str, Any] = {
    "realize_opcount_threshold": 10_000,
    "realize_reads_threshold": 1_000,
    "realize_acc_reads_threshold": 1_000,
    "max_fusion_size": 1_000,
    "cpp.enable_floating_point_contract_flag": "fast",  # a product and a sum in one instruction
}


def forward(
    form: str, y: Tensor, z: Tensor | None, pi: Tensor, rho: Tensor | None, names: Sequence[str], compiled: bool = False
) -> Tensor:
    """h (N, D), of the type of y.

    Args:
        form: one of the four above.
        y, z: (N, D); z is None for `type_one`.
        pi, rho: gates (N, R) of every token, or constants (R,); rho is None but for `bi_sided`.
        names: the activations.
        compiled: in one loop that inductor writes, instead of block by block.
    """
    if compiled and y.numel():
        return compiled_rows(forward_rows, form, tuple(names))(y, z, every_token(pi, y), every_token(rho, y))
    h = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    for rows in blocks(y):
        h[rows] = forward_rows(form, tuple(names), y[rows], *of_rows(rows, z, pi, rho))
    return h


def backward(
    form: str,
    g: Tensor,
    y: Tensor,
    z: Tensor | None,
    pi: Tensor,
    rho: Tensor | None,
    names: Sequence[str],
    compiled: bool = False,
) -> Gradients:
    """The gradients of y, z, pi and rho, each of the shape and type of its tensor; arguments as in `forward`."""
    if compiled and y.numel():
        gates = every_token(pi, y), every_token(rho, y)
        grad_y, grad_z, sums_pi, sums_rho = compiled_rows(backward_rows, form, tuple(names))(g, y, z, *gates)
    else:
        grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        grad_z = None if z is None else torch.empty_like(grad_y)
        sums_pi, sums_rho = (None if w is None else widened(y.new_empty(len(y), w.shape[-1])) for w in (pi, rho))
        for rows in blocks(y):
            block = backward_rows(form, tuple(names), g[rows], y[rows], *of_rows(rows, z, pi, rho))
            for whole, part in zip((grad_y, grad_z, sums_pi, sums_rho), block, strict=True):
                if whole is not None:
                    whole[rows] = part
    return grad_y, grad_z, over_tokens(sums_pi, pi), None if rho is None else over_tokens(sums_rho, rho)


def blocks(y: Tensor) -> Iterator[slice]:
    """Cuts the rows of y into blocks that stay in cache; at least one, also of no rows."""
    block = len(y)
    if y.device.type == "cpu":
        keep_freed_memory()
        row_bytes = 4 * max(1, y.shape[1])
        block = max(1, torch.get_num_threads() * BLOCK_BYTES // row_bytes)
    for start in range(0, max(1, len(y)), max(1, block)):
        yield slice(start, start + block)


def of_rows(rows: slice, z: Tensor | None, pi: Tensor, rho: Tensor | None) -> Iterator[Any]:
    """z, pi and rho of some tokens; constants are the same for all."""
    yield None if z is None else z[rows]
    for weights in (pi, rho):
        yield weights if weights is None or weights.ndim == 1 else weights[rows]


def every_token(weights: Tensor | None, y: Tensor) -> Tensor | None:
    """Gates (N, R) as they are, constants once for each token: without rows, inductor would split its loop."""
    return weights if weights is None or weights.ndim == 2 else weights.repeat(len(y), 1)


@cache
def keep_freed_memory() -> None:
    """Makes the C library keep the memory of freed blocks, instead of asking the system for it every time.

    glibc does so for sizes up to the largest that it has seen freed, at most 32 MiB. Fresh pages would take longer than
    the arithmetic on them.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def over_tokens(sums: Tensor, weights: Tensor) -> Tensor:
    """The gradient of gates from every token's sums over channels (N, R); that of constants adds the tokens up."""
    return (sums.sum(0) if weights.ndim == 1 else sums).to(weights.dtype)


@cache
def compiled_rows(function: Callable[..., Any], form: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """`forward_rows` or `backward_rows` of one form and dictionary, compiled."""

    # A code object of its own for each: Dynamo limits how often one is compiled, and is generous with sizes and types.
    def rows(*tensors):
        return function(form, names, *tensors, in_one_loop=True)

    own = types.FunctionType(rows.__code__.replace(), rows.__globals__, closure=rows.__closure__)
    return torch.compile(own, options=ONE_LOOP, fullgraph=True)  # a break would pass everything through memory


# What follows is elementwise in tokens, and small enough to be read beside the equations.


def forward_rows(
    form: str,
    names: tuple[str, ...],
    y: Tensor,
    z: Tensor | None,
    pi: Tensor,
    rho: Tensor | None,
    in_one_loop: bool = False,
) -> Tensor:
    """h (N, D) of a block of tokens."""
    at_y, at_z = (None if t is None else Point(t, with_slopes=False, in_one_loop=in_one_loop) for t in (y, z))
    parts = basis(form, names)
    gates = [in_basis(columns(weights), names, parts) for weights in (pi, rho)]
    return FORMS[form].forward(parts, at_y, at_z, *gates).to(y.dtype)


def backward_rows(
    form: str,
    names: tuple[str, ...],
    g: Tensor,
    y: Tensor,
    z: Tensor | None,
    pi: Tensor,
    rho: Tensor | None,
    in_one_loop: bool = False,
) -> tuple[Any, ...]:
    """The gradients of y and z, and the sums over channels (N, R) for pi and rho, of a block of tokens."""
    at_y, at_z = (None if t is None else Point(t, with_slopes=True, in_one_loop=in_one_loop) for t in (y, z))
    parts = basis(form, names)
    gates = [in_basis(columns(weights), names, parts) for weights in (pi, rho)]
    grad_y, grad_z, *sums = FORMS[form].backward(parts, widened(g), at_y, at_z, *gates)
    sums = [None if s is None else torch.stack(out_of_basis(s, names, parts), dim=-1) for s in sums]
    return grad_y.to(y.dtype), None if grad_z is None else grad_z.to(y.dtype), *sums


class TypeOne:
    """h = S(y)"""

    @staticmethod
    def forward(names, at_y, at_z, pi, rho):
        return weighted(pi, at_y.values(names))

    @staticmethod
    def backward(names, g, at_y, at_z, pi, rho):
        return g * weighted(pi, at_y.slopes(names)), None, over_channels(g, at_y.values(names)), None


class OneSided:
    """h = SiLU(y) S(z)"""

    @staticmethod
    def forward(names, at_y, at_z, pi, rho):
        return at_y["silu"] * weighted(pi, at_z.values(names))

    @staticmethod
    def backward(names, g, at_y, at_z, pi, rho):
        (slope,) = at_y.slopes(("silu",))
        grad_y = g * weighted(pi, at_z.values(names)) * slope
        grad_s = g * at_y["silu"]
        return grad_y, grad_s * weighted(pi, at_z.slopes(names)), over_channels(grad_s, at_z.values(names)), None


class BiSided:
    """h = R(y) S(z)"""

    @staticmethod
    def forward(names, at_y, at_z, pi, rho):
        return weighted(rho, at_y.values(names)) * weighted(pi, at_z.values(names))

    @staticmethod
    def backward(names, g, at_y, at_z, pi, rho):
        grad_r = g * weighted(pi, at_z.values(names))
        grad_s = g * weighted(rho, at_y.values(names))
        grad_y, grad_z = grad_r * weighted(rho, at_y.slopes(names)), grad_s * weighted(pi, at_z.slopes(names))
        return grad_y, grad_z, over_channels(grad_s, at_z.values(names)), over_channels(grad_r, at_y.values(names))


class Quadratic:
    """h = sum_k sigma_k(y) P_k = sum_l Q_l sigma_l(z),    Q_l = sum_{k<=l} pi_kl sigma_k(y)"""

    @staticmethod
    def forward(names, at_y, at_z, pi, rho):
        return weighted(at_y.values(names), _partners_of_y(pi, at_z.values(names)))

    @staticmethod
    def backward(names, g, at_y, at_z, pi, rho):
        values_y, values_z = at_y.values(names), at_z.values(names)
        grad_y = g * weighted(_partners_of_y(pi, values_z), at_y.slopes(names))
        grad_z = g * weighted(_partners_of_z(pi, values_y), at_z.slopes(names))
        grads = [g * value for value in values_y]
        sums = [(grads[k] * values_z[j]).sum(-1) for k, j in pairs(len(names))]
        return grad_y, grad_z, sums, None


def _partners_of_y(pi: Sequence[Tensor], values_z: Sequence[Tensor]) -> list[Tensor]:
    """P_k for every k."""
    m, weight = len(values_z), dict(zip(pairs(len(values_z)), pi, strict=True))
    return [weighted([weight[k, j] for j in range(k, m)], values_z[k:]) for k in range(m)]


def _partners_of_z(pi: Sequence[Tensor], values_y: Sequence[Tensor]) -> list[Tensor]:
    """Q_l for every l."""
    m, weight = len(values_y), dict(zip(pairs(len(values_y)), pi, strict=True))
    return [weighted([weight[k, j] for k in range(j + 1)], values_y[: j + 1]) for j in range(m)]


FORMS: dict[str, Any] = {"type_one": TypeOne, "one_sided": OneSided, "bi_sided": BiSided, "quadratic": Quadratic}


def weighted(weights: Sequence[Any], terms: Sequence[Any]) -> Any:
    """sum_k weights_k terms_k, (N, D), or (N, 1) if all terms are numbers; terms (N, D) or numbers."""
    total = None  # in place: fresh memory costs a CPU more than the arithmetic
    numbers = [weight * term for weight, term in zip(weights, terms, strict=True) if not isinstance(term, Tensor)]
    for weight, term in zip(weights, terms, strict=True):
        if isinstance(term, Tensor):
            total = weight * term if total is None else total.addcmul_(weight, term)
    if not numbers:
        return total
    number = sum(numbers[1:], start=numbers[0])
    return number if total is None else total.add_(number)


def over_channels(g: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """sum_D g sigma_k for every k, each (N,)."""
    return [(g * value).sum(-1) for value in values]


def columns(weights: Tensor | None) -> list[Tensor]:
    """Mixing weights one by one, each (N, 1) or a constant (1,)."""
    return [] if weights is None else [column[..., None] for column in widened(weights).unbind(-1)]
