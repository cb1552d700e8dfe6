"""Sending tokens to experts: sort them by expert, multiply each group by its own matrix, and put them back.

Dropless: every token reaches every expert that was chosen for it, whatever the load. Pure torch.

Shapes: T tokens, K experts of each token, N = T K routed tokens, E experts, I and O features going in and out.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Dispatch = Literal["auto", "grouped", "loop"]

GROUPED_MM_ALIGNMENT = 16  # bytes; F.grouped_mm refuses rows that start elsewhere, on every device


class Groups(NamedTuple):
    """The routed tokens in the order of their experts, equal experts in the order of the tokens."""

    order_N: Tensor  # which (token, choice), as token * K + choice, stands in each place
    place_N: Tensor  # its inverse: where each (token, choice) stands
    expert_N: Tensor  # the expert of each place
    ends_E: Tensor  # int32, one past the last place of each expert

    def load(self) -> Tensor:
        """Return how many tokens each expert has, (E,) int64."""
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1)).long()


def sort_by_expert(experts_TK: Tensor, n_experts: int) -> Groups:
    """Return the order in which every expert's tokens lie together.

    Args:
        experts_TK: the experts chosen for each token, int64.
    """
    expert_N, order_N = experts_TK.flatten().sort(stable=True)
    place_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
    # Ends by search rather than by counting: torch.bincount would make the host wait for the device.
    experts_E = torch.arange(n_experts, device=expert_N.device)
    ends_E = torch.searchsorted(expert_N, experts_E, right=True, out_int32=True)
    return Groups(order_N, place_N, expert_N, ends_E)


def scatter_to_experts(x_TI: Tensor, groups: Groups, top_k: int) -> Tensor:
    """Return a row for each routed token, sorted by expert: (T, I) -> (N, I)."""
    return _PermuteRows.apply(x_TI, groups.order_N, groups.place_N, top_k)


def gather_from_experts(x_NI: Tensor, groups: Groups, top_k: int) -> Tensor:
    """Undo the sorting: (N, I) -> (T, K, I)."""
    return _PermuteRows.apply(x_NI, groups.place_N, groups.order_N, 1).unflatten(0, (-1, top_k))


class _PermuteRows(torch.autograd.Function):
    """Rows of x, each repeated `copies` times, in another order.

    Its gradient is a permutation back and a sum over the copies: the same on every run, where the gradient of plain
    indexing adds in the order in which a GPU's threads arrive.
    """

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (inverse,) = ctx.saved_tensors
        rows = gradient.index_select(0, inverse)
        if ctx.copies > 1:
            rows = rows.unflatten(0, (-1, ctx.copies)).sum(1)
        return rows, None, None, None


def grouped_linear(
    x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, groups: Groups, dispatch: Dispatch = "auto"
) -> Tensor:
    """Apply to each row of x the linear map of its expert: (N, I) -> (N, O).

    Args:
        x_NI: routed tokens, sorted by expert.
        weight_EOI: one matrix for each expert.
        bias_EO: one bias for each expert, or None.
        dispatch: `loop` multiplies expert by expert; `grouped` calls `F.grouped_mm`; `auto` takes the faster of the
            two: `grouped` for bfloat16 on CUDA, which has a kernel of its own, `loop` elsewhere, where `F.grouped_mm`
            is a loop as well and needs padding on top.
    """
    if dispatch == "auto":
        dispatch = "grouped" if x_NI.is_cuda and x_NI.dtype == torch.bfloat16 else "loop"
    if dispatch == "loop":
        return _linear_in_a_loop(x_NI, weight_EOI, bias_EO, groups.ends_E)
    out_NO = _grouped_mm(x_NI, weight_EOI, groups.ends_E)
    return out_NO if bias_EO is None else out_NO + bias_EO.index_select(0, groups.expert_N)


@torch.compiler.disable  # sizes that change with every batch would compile it anew every time
def _linear_in_a_loop(x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, ends_E: Tensor) -> Tensor:
    """The reference: one product for each expert. Experts without a token multiply an empty matrix."""
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    # `unbind`, not indexing: the gradient of an index is as large as the whole stack, for every expert.
    biases = [None] * len(sizes) if bias_EO is None else bias_EO.unbind()
    experts = zip(x_NI.split(sizes), weight_EOI.unbind(), biases, strict=True)
    return torch.cat([F.linear(x, weight, bias) for x, weight, bias in experts])


def _grouped_mm(x_NI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """One call for all experts. Widths that F.grouped_mm refuses (682 in bf16) are filled up with zeros."""
    step = max(1, GROUPED_MM_ALIGNMENT // x_NI.element_size())
    features_out, features_in = weight_EOI.shape[1:]
    pad_in, pad_out = -features_in % step, -features_out % step
    if pad_in or pad_out:
        weight_EOI = F.pad(weight_EOI, (0, pad_in, 0, pad_out))
    if pad_in:
        x_NI = F.pad(x_NI, (0, pad_in))
    # Compiled, it takes bfloat16 only.
    product = F.grouped_mm if x_NI.dtype == torch.bfloat16 else _eager_grouped_mm
    out_NO = _ContiguousGradient.apply(product(x_NI.contiguous(), weight_EOI.contiguous().mT, offs=ends_E))
    return out_NO[:, :features_out] if pad_out else out_NO


_eager_grouped_mm = torch.compiler.disable(F.grouped_mm)


class _ContiguousGradient(torch.autograd.Function):
    """The identity, for an operation whose backward cannot read a broadcast gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
