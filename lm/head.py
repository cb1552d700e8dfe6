"""The head of a language model, and its cross-entropy without all logits in memory.

At 8,192 tokens and a vocabulary of 50,304 the logits are 1.6 GB in float32, and a plain cross-entropy holds them three
times: as logits, as log-probabilities and as gradient. Here they exist for a chunk of tokens at a time. The gradients
of a chunk are computed at once, in the forward, so that no logit is needed twice: three matrix products in all, as many
as the plain head takes.

`F.linear_cross_entropy` (torch 2.14) has a mode that works alike, but torch 2.11 has none; and of bfloat16 it returns
the sum in bfloat16 (off by 2% at 512 tokens), rounds the weight's gradient to bfloat16 after every chunk, and does not
heed autocast. So this one serves every version; `python -m benchmarks.head_loss` compares the two.

Shapes: T tokens, C tokens of a chunk, V vocabulary, D model width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Logits of one chunk in float32, at most. A chunk's part of the weight's gradient is added to the whole, (V, D), so
# chunks must not be too small; on a GPU, which multiplies faster than it adds, still less so.
CHUNK_BYTES = 2**26
CHUNK_BYTES_GPU = 2**30


class Head(nn.Linear):
    """Logits of the next token or, where targets are given, their cross-entropy.

    One module does both, where a function could read `head.weight`, because sharding (FSDP2) puts a parameter together
    in the hooks of the module that owns it, and only a call of the module runs them.
    """

    def __init__(self, d_model: int, vocab_size: int) -> None:
        super().__init__(d_model, vocab_size, bias=False)

    def forward(self, x_BLD: Tensor, targets_BL: Tensor | None = None, ignore_index: int = -100) -> Tensor:
        """Return the logits, (B, L, V), or, given targets, the sum of their cross-entropy, a float32 scalar."""
        if targets_BL is None:
            return super().forward(x_BLD)
        return cross_entropy_sum(x_BLD.flatten(0, -2), self.weight, targets_BL.flatten(), ignore_index)


@torch.compiler.disable  # a loop whose length depends on the sizes
def cross_entropy_sum(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, ignore_index: int = -100, chunk_bytes: int | None = None
) -> Tensor:
    """Return the sum of the cross-entropy of softmax(weight hidden) at the targets, in float32 (float64 of float64).

    Products are in the type of autocast where it is on; softmax and all sums over tokens in float32. The gradients
    exist once: a second backward through the same result is an error.

    Args:
        targets_T: the true ids, int64; `ignore_index` stands for none.
        chunk_bytes: see `CHUNK_BYTES`, the default.

    Raises:
        RuntimeError: a target that is no row of the weight (on a GPU, an assertion on the device).
    """
    device = hidden_TD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_TD.dtype
    if chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES if device == "cpu" else CHUNK_BYTES_GPU
    chunk_size = max(1, chunk_bytes // (4 * len(weight_VD)))
    with torch.autocast(device, enabled=False):
        return _CrossEntropySum.apply(
            hidden_TD, weight_VD, targets_T, ignore_index, dtype, chunk_size, torch.is_grad_enabled()
        )


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        ignore_index: int,
        dtype: torch.dtype,
        chunk_size: int,
        is_training: bool,
    ) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        is_ignored_T = targets_T == ignore_index
        # A row of zeros adds nothing to the weight's gradient, whatever its target.
        x_TD, weight = hidden_TD.masked_fill(is_ignored_T[:, None], 0).to(dtype), weight_VD.to(dtype)
        targets_T1 = targets_T.masked_fill(is_ignored_T, 0)[:, None]
        hidden_gradient = torch.empty_like(hidden_TD) if is_training and ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight, dtype=exact) if is_training and ctx.needs_input_grad[1] else None

        log_likelihood_T = torch.empty(len(x_TD), dtype=exact, device=x_TD.device)
        # The same memory for every chunk: fresh pages of this size cost more time than what is written to them.
        shape = (min(chunk_size, len(x_TD)), len(weight))
        logits_CV = torch.empty(shape, dtype=dtype, device=x_TD.device)
        log_softmax_CV = torch.empty(shape, dtype=exact, device=x_TD.device)
        for start in range(0, len(x_TD), chunk_size):
            here = slice(start, start + chunk_size)
            x, target = x_TD[here], targets_T1[here]
            logits, log_softmax = logits_CV[: len(x)], log_softmax_CV[: len(x)]
            torch.mm(x, weight.T, out=logits)
            torch.log_softmax(logits, dim=-1, dtype=exact, out=log_softmax)
            log_likelihood_T[here] = log_softmax.gather(1, target)[:, 0]
            if hidden_gradient is None and weight_gradient is None:
                continue
            difference = log_softmax.exp_().scatter_add_(1, target, -torch.ones_like(target, dtype=exact)).to(dtype)
            if hidden_gradient is not None:
                hidden_gradient[here] = difference @ weight
            if weight_gradient is not None:
                _add_product(weight_gradient, difference.T, x)

        if hidden_gradient is not None:
            hidden_gradient.masked_fill_(is_ignored_T[:, None], 0)
        ctx.gradients, ctx.weight_dtype = (hidden_gradient, weight_gradient), weight_VD.dtype
        return -log_likelihood_T.masked_fill(is_ignored_T, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of the loss are used up: compute it anew for each backward")
        # In place and given away: a copy of the weight's gradient would be the largest tensor of the step.
        (hidden_gradient, weight_gradient), ctx.gradients = ctx.gradients, None
        if hidden_gradient is not None:
            hidden_gradient.mul_(upstream)
        if weight_gradient is not None:
            weight_gradient = weight_gradient.mul_(upstream).to(ctx.weight_dtype)
        return hidden_gradient, weight_gradient, None, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which may be of higher precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total += a @ b
