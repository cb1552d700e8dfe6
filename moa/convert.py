"""Puts LA and MoA layers into a model that has ordinary feed-forward layers, keeping its weights."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from moa.activations import ACTIVATIONS
from moa.conversion.checks import Settings, check_layer, check_model, check_options, find_holders, nothing_found
from moa.conversion.find import Where, find_ffns
from moa.conversion.preserve import Opening, find_opening, relative_error, set_open
from moa.conversion.recognise import FoundFFN
from moa.ffn import FeedForward, build_ffn
from moa.registry import DEFAULT_GATE

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Replacement:
    """One feed-forward layer that was replaced."""

    name: str
    """Where it is; the first place if it is shared by several."""
    places: int
    old_class: str
    activation: str
    in_features: int
    hidden_features: int
    added: int
    """Parameters of the new layer beyond those of the old one."""
    error: float
    """The largest change of an output as a part of the largest one, on standard normal tokens; nan if not kept."""


@dataclass(frozen=True)
class Conversion:
    """What `convert` did; `str` of it is a table."""

    kind: str
    init: str
    replaced: tuple[Replacement, ...]
    left: dict[str, str] = field(default_factory=dict)
    """Name -> reason, of what looks like a feed-forward layer and was not replaced."""

    @property
    def added(self) -> int:
        """Parameters added to the model."""
        return sum(row.added for row in self.replaced)

    @property
    def error(self) -> float:
        """The largest error of a layer; see `Replacement`."""
        return max(row.error for row in self.replaced)

    def __str__(self) -> str:
        n = len(self.replaced)
        kept = f"each keeps its outputs to {self.error:.1e}" if self.error > 0 else "each keeps its outputs"
        weights = kept if self.init == "preserve" else "fresh mixing weights"
        lines = [f"{self.kind} in {n} feed-forward layer{'s' * (n > 1)}, {self.added:,} parameters added; {weights}"]
        width = max(len(row.name) for row in self.replaced)
        for row in self.replaced:
            shared = f", in {row.places} places" if row.places > 1 else ""
            sizes = f"{row.in_features} -> {row.hidden_features} -> {row.in_features}"
            lines.append(f"  {row.name:<{width}}  {row.old_class} ({row.activation}), {sizes}, +{row.added:,}{shared}")
        alike: dict[str, list[str]] = defaultdict(list)
        for name, reason in self.left.items():
            alike[reason].append(name)
        for reason, (first, *more) in alike.items():
            lines.append(f"left: {first}{f' and {len(more)} more' if more else ''}: {reason}")
        return "\n".join(lines)


def convert(
    model: nn.Module,
    kind: str,
    *,
    activations: str | Sequence[str] | None = None,
    gate: str = DEFAULT_GATE,
    gate_bias: bool | None = None,
    init: str = "preserve",
    shut: float | None = None,
    where: Where | None = None,
) -> Conversion:
    """Replaces every feed-forward layer of `model`, in place, by one of `kind` with the same projections.

        model = timm.create_model("vit_small_patch16_224", pretrained=True)
        print(moa.convert(model, "moa"))
        model = AutoModelForCausalLM.from_pretrained(...)    # Llama, Qwen, Mistral, ...
        print(moa.convert(model, "qd-moa", gate="tanh"))

    A feed-forward layer is a module with two Linear layers, d -> D -> d, and an activation between them (Type-I), or
    with three, d -> D twice and D -> d of the product (Type-II); `gate` and `up` may be one fused weight, which is then
    split. It is found by running its forward on numbers of our own, so that its class and names do not matter. A
    Type-I layer becomes a kind of Type-I, a Type-II layer one of Type-II.

    The weights are the same Parameters as before, with their type, device, biases and `requires_grad` (except for the
    copies of a fused one); state-dict names become those of `build_ffn`. Make the optimizer afterwards, since the
    mixing weights are new Parameters. A model's own configuration, such as `config` of transformers, does not know
    of the change: to load a saved state dict, build the original model and convert it in the same way first.

    `init="preserve"` keeps the function of the model, so that a checkpoint can go on training:

    - LA kinds: one coefficient is 1 and the others are 0, and the outputs are the same to the last bit (to rounding
      where a fused weight was split and in 16-bit types, in which a mixture is rounded once, at its end; not where an
      activation overflows in float16: 0 times infinity).
    - MoA kinds: all gate rows u, v start at 0, so that gates do not depend on the token at first; biases open one gate
      and shut the others. The open gates weigh 1/2 (1/4 over both branches of `bi-moa`; about 1 with softmax), by
      whose inverse the output projection is multiplied, in place.
      With `gate="tanh"` a shut gate is exactly 0, where the slope of tanh is 1: the function is kept to rounding, and
      every gate learns from the first step on. A sigmoid or softmax gate is never 0, and its slope falls with its
      weight: at `shut` = -14, a weight of 8e-7 keeps the outputs of a layer to 1e-4 or better, and its gradient is as
      much smaller. Adam makes up for that as long as its own eps is well below the gradients (1e-12 rather than
      1e-8); plain SGD does not. A softmax layer is hardest to move, its open gate too has a slope near 0. In bfloat16
      the bias of a shut gate moves in steps of 1/16 only; keep such parameters in float32.
      What is kept is measured on standard normal tokens. Where hidden activations are large, relu2 and products are
      larger still: prefer tanh, or lower `shut`.

    `init="fresh"` keeps the projections alone: gate rows are drawn from N(0, 0.02^2), gate biases are 0, coefficients
    are 1/2, as in a new layer, and the layer's activation need not be in the dictionary.

    Args:
        model: any module that has feed-forward layers; not yet compiled, wrapped or sharded.
        kind: one of `kinds()`.
        activations: the dictionary, as in `build_ffn`; to be preserved, a layer's activation has to be in it (for a
            Type-II kind usually `id` as well). `gelu` is the exact one: its tanh approximation differs by 5e-4 and
            QuickGELU by 2e-2, so they count as others, which can be added to `moa.ACTIVATIONS`.
        gate: phi of a MoA kind.
        gate_bias: whether gates have biases. None: those of MoA kinds do for "preserve", which needs them.
        init: "preserve" or "fresh".
        shut: the logit of a shut sigmoid or softmax gate for "preserve"; None means -14.
        where: (name, module) -> whether this layer is to be replaced; None means every one.

    Returns:
        What was replaced, by how many parameters the model grew, and what was left and why.

    Raises:
        ValueError: in one line, before anything is changed: there is no feed-forward layer, or one of them cannot be
            converted (other type than the kind's, an activation that the kind does not contain, quantised, adapted,
            hooked, tied, sharded, on the meta device, a mixture of experts, already converted), or an option is wrong.
    """
    settings = check_options(kind, activations, gate, gate_bias, init, shut)
    check_model(model)
    found, left = find_ffns(model, where)
    if not found:
        raise ValueError(nothing_found(model, left))
    holders = find_holders(model)
    for ffn in found:
        check_layer(ffn, settings.row, holders)
    plans = [_plan(ffn, settings) for ffn in found]

    new_layers = {}
    for ffn, plan in zip(found, plans, strict=True):
        plan.attach()
        new_layers[id(ffn.module)] = plan.layer
    places: dict[int, int] = defaultdict(int)
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if id(child) in new_layers:
                parent.register_module(key, new_layers[id(child)])
                places[id(child)] += 1
    replaced = [plan.describe(places[id(plan.ffn.module)]) for plan in plans]
    return Conversion(kind, init, tuple(replaced), left)


@dataclass(frozen=True)
class _Plan:
    """A new layer without its projections, which `attach` adds: nothing of the model has changed until then."""

    ffn: FoundFFN
    layer: FeedForward
    projections: dict[str, nn.Linear]
    scale: float
    error: float

    @torch.no_grad()
    def attach(self) -> None:
        for name, projection in self.projections.items():
            setattr(self.layer, name, projection)
        if self.scale != 1:
            list(self.projections.values())[-1].weight.mul_(self.scale)

    def describe(self, places: int) -> Replacement:
        d, hidden = self.layer.in_features, self.layer.hidden_features
        added = _size(self.layer) - _size(self.ffn.module)
        old_class = type(self.ffn.module).__name__
        return Replacement(self.ffn.name, places, old_class, self.ffn.activation, d, hidden, added, self.error)


def _plan(ffn: FoundFFN, settings: Settings) -> _Plan:
    gate, up = _split(ffn)
    assert isinstance(ffn.down, nn.Linear)
    layer = build_ffn(
        settings.row.name,
        ffn.down.out_features,
        ffn.down.in_features,
        activations=settings.activations or None,
        gate=settings.gate,
        gate_bias=settings.gate_bias,
        drop=ffn.drop,
        device="meta",
        dtype=ffn.down.weight.dtype,
    )
    # Only the mixing weights get memory, and random numbers: the projections are those of the model.
    for name in ("w1", "w2", "w3"):
        setattr(layer, name, None)
    layer.to_empty(device=ffn.down.weight.device).reset_parameters()
    layer.train(ffn.module.training)
    opening = _opening(ffn, settings) if settings.preserve else Opening(swap=False, index={})
    inputs = [gate] if up is None else [up, gate] if opening.swap else [gate, up]
    projections = dict(zip(("w1", "w2", "w3"), (*inputs, ffn.down), strict=False))
    if not settings.preserve:
        return _Plan(ffn, layer, projections, scale=1.0, error=float("nan"))
    weight = set_open(layer, opening, settings.shut)
    error = 0.0
    if layer.gate is not None:
        error = relative_error(layer, inputs[0], None if up is None else inputs[1], ffn.down, opening)
    if not error <= TOLERANCE:
        raise ValueError(
            f"{ffn.title}: shut {layer.gate} gates would change its outputs by {error:.1e}, more than {TOLERANCE}: "
            f"lower shut=, or use gate='tanh', whose shut gates are 0"
        )
    return _Plan(ffn, layer, projections, 1 / weight, error)


def _opening(ffn: FoundFFN, settings: Settings) -> Opening:
    formula = f"{ffn.activation}(W1 x)" + (" * W2 x" if ffn.up is not None else "")
    if ffn.activation not in ACTIVATIONS:
        raise ValueError(
            f"{ffn.title} computes {formula}, and {ffn.activation} is none of moa's activations (its gelu is the exact "
            f"one): add it to moa.ACTIVATIONS and to activations=, or use init='fresh'"
        )
    opening = find_opening(settings.row.name, settings.activations, ffn.activation)
    if opening is None:
        dictionary = ", ".join(settings.activations) or "nothing"
        raise ValueError(
            f"{ffn.title} computes {formula}, which {settings.row.name!r} over {dictionary} does not contain: "
            f"choose other activations= or another kind, or use init='fresh'"
        )
    return opening


def _split(ffn: FoundFFN) -> tuple[nn.Linear, nn.Linear | None]:
    """The gate and up layers, as they are, or as copies of the halves of a fused one."""
    assert isinstance(ffn.gate, nn.Linear)
    if ffn.up is not ffn.gate:
        assert ffn.up is None or isinstance(ffn.up, nn.Linear)
        return ffn.gate, ffn.up
    halves = []
    for half in range(2):
        linear = nn.Linear(ffn.gate.in_features, ffn.gate.out_features // 2, ffn.gate.bias is not None, device="meta")
        for name, parameter in ffn.gate.named_parameters():
            rows = parameter.detach().chunk(2)[half].clone()
            linear.register_parameter(name, nn.Parameter(rows, requires_grad=parameter.requires_grad))
        halves.append(linear.train(ffn.gate.training))
    gate, up = halves if ffn.gate_first else halves[::-1]
    return gate, up


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
