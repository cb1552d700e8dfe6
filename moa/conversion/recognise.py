"""Telling whether a module is a feed-forward layer: by what it computes, not by what it is called."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa.activations import ACTIVATIONS, Activation
from moa.ffn import FeedForward

# Known so that a refusal can name them; moa mixes none of them unless it is added to ACTIVATIONS.
OTHER_ACTIVATIONS: dict[str, Activation] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda t: t * torch.sigmoid(1.702 * t),
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class FoundFFN:
    """A feed-forward layer: down(sigma(gate x)), or down(sigma(gate x) * up x).

    `gate` and `up` are one and the same layer where their rows lie in one weight, (2D, d); `gate_first` then says
    which half is which. `drop` is the probability of dropout just before `down`, `stray_drop` of one elsewhere.
    """

    name: str
    module: nn.Module
    gate: nn.Module
    up: nn.Module | None
    down: nn.Module
    gate_first: bool
    activation: str
    drop: float
    stray_drop: float

    @property
    def projections(self) -> int:
        """1 for Type-I, 2 for Type-II."""
        return 1 if self.up is None else 2

    @property
    def title(self) -> str:
        """Where it is and what it is called, for messages."""
        return f"{self.name} ({type(self.module).__name__})"


def recognise(name: str, module: nn.Module) -> FoundFFN | str | None:
    """Returns the feed-forward layer that `module` is, the reason why it is not one, or None if nothing suggests it.

    What suggests it are two or three Linear layers among its children that fit together. The proof is a rehearsal:
    the module's own forward runs with those layers replaced by stand-ins that give back numbers of our own, so that
    the input of the last one shows what happens in between, whatever the weights, their type and their device.
    """
    linears = {key: child for key, child in module.named_children() if is_linear(child)}
    widths = _possible_widths(list(linears.values()))
    if not widths:
        return None
    others = [key for key, child in module.named_children() if key not in linears and _has_state(child)]
    others += [key for key, value in (*module._parameters.items(), *module._buffers.items()) if value is not None]
    if others:
        return f"holds more than Linear layers and an activation: {', '.join(others)}"
    reason: str | None = None
    for d in widths:
        try:
            outcome = _rehearse(name, module, linears, d)
        except _OtherWidth:  # the layers run in another order
            continue
        if isinstance(outcome, FoundFFN):
            return outcome
        reason = reason or outcome
    return reason or "is not a feed-forward layer: its Linear layers do not follow each other as in one"


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a Linear layer or stands for one, such as a quantised or an adapted one."""
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return all(isinstance(size, int) for size in sizes) and not isinstance(module, FeedForward)


def features(linear: nn.Module) -> tuple[int, int]:
    """The input and output width of what `is_linear` accepts."""
    return int(getattr(linear, "in_features")), int(getattr(linear, "out_features"))  # noqa: B009


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _possible_widths(linears: list[nn.Module]) -> list[int]:
    """The input widths with which two or three layers can form d -> D -> d, in the order the layers are held."""
    if len(linears) not in (2, 3):
        return []
    return list(dict.fromkeys(features(order[0])[0] for order in permutations(linears) if _fits(list(order))))


def _fits(order: list[nn.Module]) -> bool:
    """Whether layers that run in this order can form d -> D -> d, or d -> 2D, D -> d."""
    *ups, (hidden, out) = [features(linear) for linear in order]
    fused = len(ups) == 1 and ups[0][1] == 2 * hidden
    return {d for d, _ in ups} == {out} and (fused or all(width == hidden for _, width in ups))


@dataclass(frozen=True)
class _Call:
    layer: nn.Module
    input: Tensor
    output: Tensor


class _OtherWidth(Exception):
    """A Linear layer was given an input of another width than its own."""


class _StandIn(nn.Module):
    """Notes what it is given; a stand-in for a Linear layer answers with numbers of our own."""

    def __init__(self, original: nn.Module, calls: list[_Call]) -> None:
        super().__init__()
        self.original = [original]  # in a list, so that it is not a submodule
        self.calls = calls
        self.weight = torch.empty(0, dtype=torch.float64, device="cpu")  # some layers ask for its dtype

    def forward(self, x: Tensor) -> Tensor:
        (original,) = self.original
        output = x
        if is_linear(original):
            d, width = features(original)
            if x.shape[-1] != d:
                raise _OtherWidth
            output = _numbers((*x.shape[:-1], width), seed=1 + len(self.calls))
        # Copies: an activation may work in place.
        self.calls.append(_Call(original, x.clone(), output.clone()))
        return output


def _numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    """(.., tokens, width): where activations bend, and in every eighth token also where a clipped one would show."""
    generator = torch.Generator().manual_seed(seed)
    numbers = 12 * torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") - 6
    numbers[:, ::8] *= 10
    return numbers


@torch.no_grad()
def _rehearse(name: str, module: nn.Module, linears: dict[str, nn.Module], d: int) -> FoundFFN | str:
    calls: list[_Call] = []
    x = _numbers((1, 8 + 2048 // d, d), seed=0)  # thousands of numbers, also in a narrow layer
    try:
        twin = copy.copy(module)
        twin._modules = dict(module._modules)
        for key, child in module.named_children():
            replaced = key in linears or type(child) is nn.Dropout
            # A copy, in training mode, so that nothing random can hide there.
            twin._modules[key] = _StandIn(child, calls) if replaced else copy.deepcopy(child).train()
        twin.training = True
        with torch.random.fork_rng(devices=[]):
            output = type(module).forward(twin, x)  # not a forward set on the instance, nor hooks
            own: dict[str, Activation] = {
                type(m).__name__: m for m in twin._modules.values() if m is not None and type(m) is not _StandIn
            }
            return _read(name, module, calls, x, output, own)
    except _OtherWidth:
        raise
    except Exception as error:  # somebody else's forward, called in a way it may not be meant for
        return f"is not a feed-forward layer: it does not run on one input of width {d} ({type(error).__name__})"


def _read(
    name: str, module: nn.Module, calls: list[_Call], x: Tensor, output: object, own: dict[str, Activation]
) -> FoundFFN | str:
    """What a rehearsal tells."""
    linear_calls = [call for call in calls if is_linear(call.layer)]
    layers = [call.layer for call in linear_calls]
    *ups, last = linear_calls
    if len(set(layers)) < len(layers) or not _fits(layers) or not all(_same(up.input, x) for up in ups):
        return "is not a feed-forward layer: its Linear layers do not follow each other as in one"
    if not isinstance(output, Tensor) or not _same(output, last.output):
        return "is not a feed-forward layer: it does something to the output of its last Linear layer"

    fused = len(ups) == 1 and ups[0].output.shape[-1] == 2 * last.input.shape[-1]
    branches = list(ups[0].output.chunk(2, dim=-1)) if fused else [up.output for up in ups]
    match = next(_matches(last.input, branches, own), None)
    if match is None:
        return "is not a feed-forward layer: between its Linear layers it does more than apply an activation"
    activation, gate_first = match
    gate, *rest = (ups if gate_first else ups[::-1]) * (2 if fused else 1)
    up = rest[0].layer if rest else None
    drop, stray_drop = _find_drops(calls, n_before=len(ups))
    return FoundFFN(name, module, gate.layer, up, last.layer, gate_first, activation, drop, stray_drop)


def _matches(h: Tensor, branches: list[Tensor], own: dict[str, Activation]) -> Iterator[tuple[str, bool]]:
    """(activation, whether it acts on the first branch) for every activation that explains h."""
    y, z = branches[0], branches[-1]
    if len(branches) == 1 and _same(h, y):
        return  # two linear maps in a row, such as a low-rank adapter
    for name, sigma in {**ACTIVATIONS, **OTHER_ACTIVATIONS, **own}.items():
        if _same(h, sigma(y) if len(branches) == 1 else sigma(y) * z):
            yield name, True
        elif len(branches) == 2 and _same(h, sigma(z) * y):
            yield name, False


def _same(a: Tensor, b: Tensor) -> bool:
    # Loose enough for activations that compute in float32 inside; gelu and its approximations differ by 5e-4 and more.
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6)


def _find_drops(calls: list[_Call], n_before: int) -> tuple[float, float]:
    """The probability of dropout just before the last Linear layer, and of what drops elsewhere or again."""
    drop, stray, n_linears = 0.0, 0.0, 0
    for call in calls:
        if is_linear(call.layer):
            n_linears += 1
        elif n_linears == n_before and drop == 0:
            drop = float(call.layer.p)  # type: ignore[arg-type]
        else:
            stray = max(stray, float(call.layer.p))  # type: ignore[arg-type]
    return drop, stray
