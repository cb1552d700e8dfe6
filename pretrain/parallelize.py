"""How a model's blocks are recomputed and compiled (and, on several devices, sharded): outside the model."""

from functools import cache, partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ActivationCheckpointing = Literal["none", "full", "selective"]

# What `selective` keeps: matrix products and attention, in which nearly all of the time goes. All else is elementwise.
_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def parallelize(
    model: nn.Module,
    block_class: type[nn.Module] | None,
    *,
    compiled: bool = False,
    activation_checkpointing: ActivationCheckpointing = "none",
) -> None:
    """Prepare, in place, every submodule of class `block_class` for training; the names of the state dict stay.

    Block by block, since equal blocks share one compilation. The recomputation is compiled with its block; where that
    is not one graph (experts multiplied in a loop), the two settings together run eagerly.

    Args:
        block_class: None leaves the model as it is.
        compiled: compile the blocks.
        activation_checkpointing: what of a block is not held for the backward, but computed anew in it: `none`, `full`
            (everything inside the block) or `selective` (all but the results of matrix products and attention).

    Raises:
        ValueError: an unknown `activation_checkpointing`.
    """
    check_activation_checkpointing(activation_checkpointing)
    if block_class is None:
        return
    for module in [module for module in model.modules() if isinstance(module, block_class)]:
        if activation_checkpointing != "none":
            module.__class__ = _recomputing(type(module), activation_checkpointing)  # type: ignore[arg-type]
        if compiled:
            module.compile()


def check_activation_checkpointing(value: str) -> None:
    """Raise a ValueError unless this is one of `ActivationCheckpointing`."""
    if value not in get_args(ActivationCheckpointing):
        raise ValueError(
            f"model.activation_checkpointing {value!r} is unknown: choose one of "
            f"{', '.join(get_args(ActivationCheckpointing))}"
        )


@cache  # equal blocks stay of one class, for which the compiler works once
def _recomputing(kind: type[nn.Module], mode: ActivationCheckpointing) -> type[nn.Module]:
    """Return a class of modules that compute their forward anew in the backward.

    A subclass, as FSDP2 makes them too: a module around the module would enter the names of its parameters.
    """
    settings: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        kept = [getattr(torch.ops.aten, name).default for name in _KEPT]
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, kept)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Draws the same random numbers both times; without gradients it is the plain forward.
        return checkpoint(partial(kind.forward, self), *args, **settings, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})
