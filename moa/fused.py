"""The mixture as one operation, `torch.ops.moa.mix`, that keeps only y, z and the mixing weights for its backward pass.

Autograd through the reference keeps every activation, up to eleven tensors (..., D) where this keeps two, and goes
through memory as often. Compilers, autocast, activation checkpointing and data-parallel wrappers see a single node.
Behind it are several implementations of the same two functions, forward and backward:

| name        | what                                           | `auto` takes it                    |
|-------------|------------------------------------------------|------------------------------------|
| `reference` | `moa.mixing` and autograd                      | for what the others do not know    |
| `torch`     | `moa.kernels.torch_mix`, block by block        | without a compiler, or triton      |
| `inductor`  | the same, compiled into one loop               | on a CPU, inside `torch.compile`   |
| `triton`    | `moa.kernels.triton_mix`                       | on CUDA, but for float64           |

What the others do not know: fixed kinds, kinds and activations of a user, and the transforms of torch.func. Second
derivatives need implementation="reference" too, which `auto` cannot foresee: an error says so.
"""

import importlib.util
import os
from collections.abc import Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moa import mixing
from moa.kernels import torch_activations, torch_mix

IMPLEMENTATIONS = ("auto", "reference", "torch", "inductor", "triton")

FORMS = {
    mixing.type_one_mixture: "type_one",
    mixing.one_sided_mixture: "one_sided",
    mixing.bi_sided_mixture: "bi_sided",
    mixing.quadratic_mixture: "quadratic",
}
"""The mixing functions that have a fused form."""


def check_implementation(name: str, kind: str, function: mixing.Mixing | None, activations: Sequence[str]) -> None:
    """Raises ValueError for an unknown implementation, or one that a layer of this kind cannot have."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {name!r}; valid implementations: {', '.join(IMPLEMENTATIONS)}")
    if name in ("auto", "reference"):
        return
    if function not in FORMS:
        raise ValueError(f"implementation={name!r} does not apply to {kind!r}, which has no fused form: leave it out")
    unknown = [activation for activation in activations if not torch_activations.knows(activation)]
    if unknown:
        raise ValueError(f"implementation={name!r} does not know the activation {unknown[0]!r}: leave it out")
    if name == "triton" and not (has_triton() and (torch.cuda.is_available() or _is_interpreted())):
        raise ValueError("implementation='triton' needs a CUDA device and the package triton: leave it out")


def apply(
    function: mixing.Mixing,
    y: Tensor,
    z: Tensor | None,
    weights: mixing.Weights,
    activations: Sequence[str],
    implementation: str = "auto",
) -> Tensor:
    """`function(y, z, weights, activations)`, computed by the chosen implementation.

    Args:
        function: a mixing function; without a fused form it is called itself.
        y, z, weights, activations: as `moa.mixing` describes them.
        implementation: one of `IMPLEMENTATIONS`.
    """
    form = FORMS.get(function)
    if form is not None and implementation == "auto":
        implementation = choose(y, activations)
    if form is None or implementation == "reference":
        return function(y, z, weights, activations)
    return mix(form, y, z, weights["pi"], weights.get("rho"), activations, implementation)


def choose(y: Tensor, activations: Sequence[str]) -> str:
    """What `auto` means for this tensor and dictionary."""
    if not all(map(torch_activations.knows, activations)) or _is_transformed():
        return "reference"
    if y.device.type == "cuda" and has_triton() and y.dtype != torch.float64:
        return "triton"
    return "inductor" if y.device.type == "cpu" and torch.compiler.is_compiling() else "torch"


@lru_cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _is_transformed() -> bool:
    """Whether torch.func is at work (grad, vmap, jvp ..), which knows no rules for the operation."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def mix(
    form: str,
    y: Tensor,
    z: Tensor | None,
    pi: Tensor,
    rho: Tensor | None,
    activations: Sequence[str],
    implementation: str,
) -> Tensor:
    """h (..., D), of the type of y.

    Args:
        form: one of `FORMS`' values.
        y, z: (..., D); z is None for "type_one".
        pi, rho: gates (..., R) or constants (R,); rho is None but for "bi_sided".
        activations: names.
        implementation: "torch", "inductor" or "triton".

    Raises:
        ValueError: "triton" for a tensor that is not on a CUDA device, or a transform of torch.func.
    """
    if implementation == "triton" and not (y.is_cuda or y.is_meta or _is_interpreted()):
        raise ValueError(f"implementation='triton' computes on a CUDA device, not on {y.device}")
    if _is_transformed():
        raise ValueError(f"implementation={implementation!r} does not know torch.func: use 'auto' or 'reference'")
    lead = y.shape[:-1]

    def of_tokens(weights: Tensor | None) -> Tensor | None:
        if weights is None or weights.ndim == 1:
            return weights
        return weights.expand(*lead, weights.shape[-1]).reshape(-1, weights.shape[-1])

    flat_z = None if z is None else z.reshape(-1, z.shape[-1])
    flat_y = y.reshape(-1, y.shape[-1])
    h = _mix(flat_y, flat_z, of_tokens(pi), of_tokens(rho), form, " ".join(activations), implementation)
    return h.reshape(y.shape)


@lru_cache
def _kernels(implementation: str) -> Any:
    """The two functions of an implementation: `forward` and `backward`, as `torch_mix` describes them."""
    if implementation == "triton":
        from moa.kernels import triton_mix  # imports triton

        return triton_mix
    if implementation == "inductor":
        return SimpleNamespace(
            forward=partial(torch_mix.forward, compiled=True), backward=partial(torch_mix.backward, compiled=True)
        )
    return torch_mix


# The operations take (N, D) and say their dictionary in one string, since a schema has no list of strings; a gradient
# that does not exist is an empty tensor, since it has no optional outputs.


@torch.library.custom_op("moa::mix", mutates_args=())
def _mix(
    y: Tensor,
    z: Tensor | None,
    pi: Tensor,
    rho: Tensor | None,
    form: str,
    activations: str,
    implementation: str,
) -> Tensor:
    with torch.autocast(y.device.type, enabled=False):
        return _kernels(implementation).forward(form, y, z, pi, rho, activations.split())


@torch.library.custom_op("moa::mix_backward", mutates_args=())
def _mix_backward(
    g: Tensor,
    y: Tensor,
    z: Tensor | None,
    pi: Tensor,
    rho: Tensor | None,
    form: str,
    activations: str,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast(y.device.type, enabled=False):
        grads = _kernels(implementation).backward(form, g, y, z, pi, rho, activations.split())
    grad_y, grad_z, grad_pi, grad_rho = (y.new_empty(0) if grad is None else grad for grad in grads)
    return grad_y, grad_z, grad_pi, grad_rho


@_mix.register_fake
def _(y, z, pi, rho, form, activations, implementation):
    return y.new_empty(y.shape)


@_mix_backward.register_fake
def _(g, y, z, pi, rho, form, activations, implementation):
    return tuple(y.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in (y, z, pi, rho))


def _keep(ctx, inputs, output):
    y, z, pi, rho, *ctx.constants = inputs
    ctx.save_for_backward(y, z, pi, rho)


def _differentiate(ctx, g):
    y, z, pi, rho = ctx.saved_tensors
    grad_y, grad_z, grad_pi, grad_rho = _mix_backward(g, y, z, pi, rho, *ctx.constants)
    return grad_y, None if z is None else grad_z, grad_pi, None if rho is None else grad_rho, None, None, None


_mix.register_autograd(_differentiate, setup_context=_keep)


def _refuse(ctx, *gradients):
    raise RuntimeError("the fused mixture has no second derivative: build the layer with implementation='reference'")


_mix_backward.register_autograd(_refuse)
