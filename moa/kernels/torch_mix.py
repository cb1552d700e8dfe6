"""The mixture and its hand-derived backward pass in torch: block by block in cache, or compiled into one loop.

The four forms, named as in `moa.fused`; g is dL/dh, and every sum over channels is a gate's gradient:

    type_one     h = S(y)          S(t) = sum_k pi_k sigma_k(t)
    one_sided    h = SiLU(y) S(z)
    bi_sided     h = R(y) S(z)     R(t) = sum_k rho_k sigma_k(t)
    quadratic    h = sum_k sigma_k(y) P_k,    P_k = sum_{l>=k} pi_kl sigma_l(z)

Nothing but y, z and the gates is needed to go back: activations are computed again, their values and slopes from one
sigmoid, one erf, one tanh and one comparison.

Shapes: N tokens, D channels, m activations, R mixing weights of a token: m, or m(m+1)/2 for the quadratic form.
"""

import math
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moa.activations import ACTIVATIONS
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
        return function(form, names, *tensors)

    own = types.FunctionType(rows.__code__.replace(), rows.__globals__, closure=rows.__closure__)
    return torch.compile(own, options=ONE_LOOP, fullgraph=True)  # a break would pass everything through memory


# What follows is elementwise in tokens, and small enough to be read beside the equations.


def forward_rows(
    form: str, names: tuple[str, ...], y: Tensor, z: Tensor | None, pi: Tensor, rho: Tensor | None
) -> Tensor:
    """h (N, D) of a block of tokens."""
    at_y, at_z = Point(y, False), None if z is None else Point(z, False)
    parts = basis(form, names)
    gates = [in_basis(columns(weights), names, parts) for weights in (pi, rho)]
    return FORMS[form].forward(parts, at_y, at_z, *gates).to(y.dtype)


def backward_rows(
    form: str, names: tuple[str, ...], g: Tensor, y: Tensor, z: Tensor | None, pi: Tensor, rho: Tensor | None
) -> tuple[Any, ...]:
    """The gradients of y and z, and the sums over channels (N, R) for pi and rho, of a block of tokens."""
    at_y, at_z = Point(y, True), None if z is None else Point(z, True)
    parts = basis(form, names)
    gates = [in_basis(columns(weights), names, parts) for weights in (pi, rho)]
    grad_y, grad_z, *sums = FORMS[form].backward(parts, widened(g), at_y, at_z, *gates)
    sums = [None if s is None else torch.stack(out_of_basis(s, names, parts), dim=-1) for s in sums]
    return grad_y.to(y.dtype), None if grad_z is None else grad_z.to(y.dtype), *sums


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


class Point:
    """The activations and their slopes at t; what several of them share is computed once."""

    def __init__(self, t: Tensor, with_slopes: bool) -> None:
        self.t = widened(t)
        self._values = VALUES_WITH_SLOPES if with_slopes else VALUES
        self._known: dict[str, Tensor] = {}

    def values(self, names: Sequence[str]) -> list[Tensor]:
        """sigma_k(t) for each name."""
        return [self[name] for name in names]

    def slopes(self, names: Sequence[str]) -> list[Any]:
        """sigma_k'(t) for each name, a tensor or a number."""
        return [SLOPES[name](self) for name in names]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            self._known[name] = self._values[name](self)
        return self._known[name]


LOG_DENSITY_AT_0 = -math.log(math.sqrt(2 * math.pi))  # of the standard normal distribution, whose integral is Phi

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
    "gelu": lambda at: at.t * at["Phi"],
    "silu": lambda at: at.t * at["sigmoid"],
    "sigmoid": lambda at: torch.sigmoid(at.t),
    "Phi": lambda at: torch.add(at.t.new_full((), 0.5), (at.t * math.sqrt(0.5)).erf_(), alpha=0.5),
    "density": lambda at: torch.addcmul(at.t.new_full((), LOG_DENSITY_AT_0), at.t, at.t, value=-0.5).exp_(),
    "step": lambda at: torch.sign(at["relu"]),  # faster than a comparison, which makes booleans first
}
SLOPES: dict[str, Callable[[Point], Any]] = {
    "id": lambda at: 1.0,
    "gelu": lambda at: torch.addcmul(at["Phi"], at.t, at["density"]),
    "silu": lambda at: torch.addcmul(at["sigmoid"], at["silu"], 1 - at["sigmoid"]),
    "relu2": lambda at: 2 * at["relu"],
    "leaky_relu": lambda at: (0.99 * at["step"]).add_(0.01),
    "tanh": lambda at: torch.addcmul(at.t.new_ones(()), at["tanh"], at["tanh"], value=-1),
    "relu": lambda at: at["step"],
}

_KNOWN = {name: ACTIVATIONS[name] for name in SLOPES}


def knows(name: str) -> bool:
    """Whether the derivative of this activation is here: of a name that still means what it did."""
    return name in _KNOWN and ACTIVATIONS.get(name) is _KNOWN[name]


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


def widened(t: Tensor) -> Tensor:
    """t in float32 at least, in which everything is computed."""
    return t.to(torch.promote_types(t.dtype, torch.float32))
