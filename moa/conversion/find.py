"""Finding the feed-forward layers of any model."""

from collections.abc import Callable

from torch import nn

from moa.conversion.recognise import FoundFFN, recognise
from moa.ffn import FeedForward
from moa.registry import find_kind

Where = Callable[[str, nn.Module], bool]


def find_ffns(model: nn.Module, where: Where | None = None) -> tuple[list[FoundFFN], dict[str, str]]:
    """Returns every feed-forward layer of `model`, and what merely looks like one: {name: reason}.

    Args:
        where: (name, module) -> whether it is wanted; None wants all.

    Raises:
        ValueError: a mixture of experts or a layer that already mixes activations, where that is wanted.
    """
    found: list[FoundFFN] = []
    left: dict[str, str] = {}
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        refusal = _refusal(module)
        ffn = None if refusal else recognise(name, module)
        if (refusal or isinstance(ffn, FoundFFN)) and where is not None and not where(name, module):
            left[name] = "left out by where="
            return
        if refusal:
            raise ValueError(f"{name or 'the model'} ({type(module).__name__}) {refusal}; where= can leave it out")
        if isinstance(ffn, FoundFFN):
            found.append(ffn)
            return
        if ffn is not None:
            left[name] = ffn
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return found, left


def _refusal(module: nn.Module) -> str | None:
    if isinstance(module, FeedForward) and find_kind(module.kind).family != "fixed":
        return f"is already a layer of kind {module.kind!r}"
    stacked = [key for key, p in module.named_parameters(recurse=False) if p.ndim == 3 and p.shape[0] > 1]
    if len(stacked) > 1:
        return f"is a mixture of experts with stacked weights ({', '.join(stacked)})"
    for key, child in module.named_children():
        experts = list(child.children()) if isinstance(child, nn.ModuleList) else []
        if len(experts) > 1 and all(isinstance(recognise("", expert), FoundFFN) for expert in experts):
            rest = [p for other, m in module.named_children() if other != key for p in m.parameters()]
            if any(p.ndim == 2 and p.shape[0] == len(experts) for p in (*rest, *module.parameters(recurse=False))):
                return f"is a mixture of experts: it routes to the {len(experts)} layers of {key}"
    return None
