"""The four mixtures of `moa.mixing` and their gradients on a GPU: plain functions that launch the Triton kernels.

Neither takes part in autograd. Shapes: y, z, grad_h and h are (N, D), N tokens of D channels. There are m activations
and R weights for each token: R = m, or m(m+1)/2 pairs for "quadratic".
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from moa.kernels.triton_activations import SUPPORTED, basis
from moa.kernels.triton_kernels import backward_kernel, forward_kernel

INTERPRETED = triton.knobs.runtime.interpret
"""Whether the kernels run on the CPU, in Triton's interpreter: TRITON_INTERPRET=1 when Triton was imported."""

# One warp owns a row: its sums over channels then need neither shared memory nor barriers, and a few hundred channels
# fill it. A few thousand tokens fill an H200, which holds 12 to 32 such warps on each of its 132 processors.
WARPS = 1
LANES = 32 * WARPS


def forward(
    form: str, y: Tensor, z: Tensor | None, pi: Tensor, rho: Tensor | None, activations: Sequence[str]
) -> Tensor:
    """The hidden activation h (N, D), contiguous, in the dtype of y; the equations are those of `moa.mixing`.

    Args:
        form: "type_one", "one_sided", "bi_sided" or "quadratic".
        y, z: (N, D), float32, bfloat16 or float16, any strides; z is None for "type_one".
        pi: (N, R), the gates of each token, or (R,), the constants of LA; any floating dtype and strides.
        rho: (N, m) or (m,) for "bi_sided", else None.
        activations: m names of `moa.kernels.triton_activations.SUPPORTED`.

    Raises:
        ValueError: an activation that has no kernel.
    """
    h = _empty_like(y)
    y_rows, z_rows = _readable(y), None if z is None else _readable(z)
    arguments = [*_strided(y_rows), *_strided(z_rows), *_strided(pi), *_strided(rho), h]
    _launch(forward_kernel, arguments, [h, y_rows, z_rows], form, activations)
    return h


def backward(
    form: str,
    grad_h: Tensor,
    y: Tensor,
    z: Tensor | None,
    pi: Tensor,
    rho: Tensor | None,
    activations: Sequence[str],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """The gradients (grad_y, grad_z, grad_pi, grad_rho) from grad_h (N, D) of any strides and `forward`'s arguments.

    Each is contiguous and has the shape and dtype of its tensor; None where there is none. Repeated calls give the
    same bits. Raises as `forward`.
    """
    grad_y, grad_z = _empty_like(y), None if z is None else _empty_like(z)
    row_grad_pi = _row_gradient(pi, y)
    row_grad_rho = None if rho is None else _row_gradient(rho, y)
    g_rows, y_rows, z_rows = _readable(grad_h), _readable(y), None if z is None else _readable(z)
    arguments = [*_strided(g_rows), *_strided(y_rows), *_strided(z_rows), *_strided(pi), *_strided(rho)]
    arguments += [grad_y, grad_z, row_grad_pi, row_grad_rho]
    _launch(backward_kernel, arguments, [grad_y, grad_z, g_rows, y_rows, z_rows], form, activations)
    grad_rho = None if rho is None or row_grad_rho is None else _gate_gradient(rho, row_grad_rho)
    return grad_y, grad_z, _gate_gradient(pi, row_grad_pi), grad_rho


def _empty_like(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)  # contiguous, which torch.empty_like need not be


def _readable(t: Tensor) -> Tensor:
    """`t` itself if its rows lie in order (stride 1) or are one number each (stride 0), else a copy."""
    return t if t.stride(-1) in (0, 1) else t.contiguous()


def _strided(t: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A tensor (N, columns) with its strides; of constants (columns,), every row is the same one."""
    if t is None:
        return None, 0, 0
    return t, 0 if t.dim() == 1 else t.stride(0), t.stride(-1)


def _row_gradient(weights: Tensor, y: Tensor) -> Tensor:
    """Room for one gradient in each row; those of constants stay float32 until they are summed."""
    dtype = torch.float32 if weights.dim() == 1 else weights.dtype
    return torch.empty(y.shape[0], weights.shape[-1], dtype=dtype, device=y.device)


def _gate_gradient(weights: Tensor, row_gradient: Tensor) -> Tensor:
    return row_gradient.sum(dim=0).to(weights.dtype) if weights.dim() == 1 else row_gradient


def _launch(
    kernel: Any, arguments: Sequence[Any], matrices: Sequence[Tensor | None], form: str, activations: Sequence[str]
) -> None:
    """Starts one program for each row; `matrices` are those of the arguments that are (N, D), the first an output."""
    names = tuple(activations)
    if not SUPPORTED.issuperset(names):
        raise ValueError(f"no Triton kernel for {sorted(set(names) - SUPPORTED)}; there are for {sorted(SUPPORTED)}")
    present = [t for t in matrices if t is not None]
    rows, D = present[0].shape
    if rows == 0:
        return
    vector = _vector(present)
    with torch.cuda.device_of(present[0]):  # Triton launches on the current device, wherever the tensors are
        kernel[(rows,)](
            *arguments,
            D=D,
            FORM=form,
            NAMES=names,
            BASIS=names if form == "quadratic" else basis(names),
            STEPS=_steps(D, vector),
            LANES=LANES,
            VECTOR=vector,
            HARDWARE=not INTERPRETED and torch.version.hip is None,
            COARSE=present[0].dtype == torch.bfloat16,
            num_warps=WARPS,
        )


def _vector(matrices: Sequence[Tensor]) -> int:
    """How many neighbouring channels one instruction moves: at most 16 bytes, aligned in every row of every matrix."""
    if any(t.data_ptr() % 16 for t in matrices):
        return 1
    most = 16 // max(t.element_size() for t in matrices)
    return math.gcd(most, matrices[0].shape[1], *(t.stride(0) for t in matrices))


def _steps(D: int, vector: int) -> int:
    """How many vectors a lane takes at a time: 8 channels, for enough loads under way, or 4 if that saves a tenth."""
    eight, four = (triton.cdiv(D, LANES * channels) * channels for channels in (8, 4))
    channels = 4 if vector <= 4 and four <= 0.9 * eight else 8
    return channels // vector
