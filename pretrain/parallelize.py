"""How a model is compiled (and, on several devices, sharded): outside the model, from `configure_model`."""

from torch import nn


def parallelize(model: nn.Module, compiled_block: type[nn.Module] | None) -> None:
    """Compile, in place, every submodule of class `compiled_block`; None leaves the model as it is.

    Block by block, since equal blocks share one compilation. `module.compile()` keeps the names of the state dict.
    """
    if compiled_block is None:
        return
    for module in model.modules():
        if isinstance(module, compiled_block):
            module.compile()
