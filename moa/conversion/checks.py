"""What cannot be converted, and why: everything here is asked before a model is changed."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from moa.conversion.preserve import OPEN
from moa.conversion.recognise import FoundFFN
from moa.registry import Kind, find_kind, kinds

INITS = ("preserve", "fresh")

Holders = dict[tuple[str, int], set[tuple[int, str]]]

# Classes that hold a model or its parameters in a way that a replaced layer would escape.
WRAPPERS = {
    "OptimizedModule": "compiled",
    "ScriptModule": "scripted",
    "DataParallel": "wrapped in DataParallel",
    "DistributedDataParallel": "wrapped in DistributedDataParallel",
    "FullyShardedDataParallel": "sharded",
    "FSDPModule": "sharded",
}


@dataclass(frozen=True)
class Settings:
    """The options of `moa.convert`, filled in."""

    row: Kind
    activations: tuple[str, ...]
    gate: str
    gate_bias: bool
    preserve: bool
    shut: float | None


def check_options(
    kind: str,
    activations: str | Sequence[str] | None,
    gate: str,
    gate_bias: bool | None,
    init: str,
    shut: float | None,
) -> Settings:
    """Returns the options of `moa.convert` with defaults filled in; raises ValueError if they do not go together."""
    row = find_kind(kind)
    if init not in INITS:
        raise ValueError(f"unknown init {init!r}; valid: {', '.join(INITS)}")
    preserve, mixes = init == "preserve", row.family == "moa"
    row.check_gate(gate, bool(gate_bias))
    if preserve and mixes and gate not in OPEN:
        raise ValueError(f"init='preserve' cannot open and shut the gate {gate!r}; those it can: {', '.join(OPEN)}")
    if preserve and mixes and gate_bias is False:
        raise ValueError("init='preserve' needs gate_bias: without biases no gate can be open for every token")
    if shut is not None and not (preserve and mixes and gate != "tanh"):
        raise ValueError("shut= applies to sigmoid and softmax gates of MoA kinds with init='preserve' only")
    bias = preserve and mixes if gate_bias is None else gate_bias
    return Settings(row, row.find_activations(activations), gate, bias, preserve, shut)


def check_model(model: nn.Module) -> None:
    """Raises ValueError for a model that is compiled, wrapped or sharded, as a whole or in part."""
    for name, module in model.named_modules():
        state = next((WRAPPERS[base.__name__] for base in type(module).__mro__ if base.__name__ in WRAPPERS), None)
        if state is None and getattr(module, "_compiled_call_impl", None) is not None:
            state = "compiled"
        if state is not None:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is {state}: convert the model before that"
            )


def nothing_found(model: nn.Module, left: dict[str, str]) -> str:
    """Returns the error for a model in which `find_ffns` found nothing to replace."""
    message = f"no feed-forward layer to convert in {type(model).__name__}"
    if not left:
        return f"{message}: no module holds two Linear layers d -> D -> d, or three, with an activation between them"
    # Attention has fitting Linear layers too, but needs more than one input: it is the least telling.
    name, reason = min(left.items(), key=lambda item: "does not run" in item[1])
    return f"{message}; what comes closest, {name or 'the model itself'}, {reason}"


def find_holders(model: nn.Module) -> Holders:
    """Returns who holds each module (parent, key) and each parameter's memory (module, key).

    More than one holder of a parameter's memory means that it is tied.
    """
    holders: Holders = defaultdict(set)
    for module in model.modules():
        for key, child in module._modules.items():
            holders["module", id(child)].add((id(module), key))
        for key, parameter in module._parameters.items():
            if parameter is not None:
                holders["memory", _address(parameter)].add((id(module), key))
    return holders


def _address(parameter: Tensor) -> int:
    try:
        return parameter.data_ptr() or id(parameter)
    except RuntimeError:  # a tensor subclass without memory of its own
        return id(parameter)


def check_layer(ffn: FoundFFN, row: Kind, holders: Holders) -> None:
    """Raises ValueError, with the reason, for a feed-forward layer that no layer of the kind `row` can replace."""
    if ffn.name == "":
        raise ValueError("the model is itself one feed-forward layer: put it into a module, to be replaced there")
    if ffn.projections != row.projections:
        shape = {1: "Type-I, W2 sigma(W1 x)", 2: "Type-II, W3 (sigma(W1 x) * W2 x)"}
        takers = [kind for kind in kinds() if find_kind(kind).projections == ffn.projections]
        wrong_type = f"{ffn.title} is {shape[ffn.projections]}, and {row.name!r} is not"
        raise ValueError(f"{wrong_type}; kinds that are: {', '.join(takers)}; where= can leave it out")
    if ffn.stray_drop > 0:
        raise ValueError(
            f"{ffn.title} drops with p={ffn.stray_drop} elsewhere than once before its last Linear layer, where moa's "
            f"layers have no dropout: set that p to 0 first"
        )
    reason = next((reason for module in ffn.module.modules() if (reason := _attachment(module))), None)
    for linear in (ffn.gate, ffn.up, ffn.down):
        reason = reason or (None if linear is None else _unusable(linear, ffn.down, holders))
    if reason is not None:
        raise ValueError(f"{ffn.title} cannot be converted: {reason}; where= can leave it out")


def _attachment(module: nn.Module) -> str | None:
    if any(value for key, value in vars(module).items() if key.endswith("_hooks") and isinstance(value, dict)):
        return f"its {type(module).__name__} has hooks, which would be lost"
    if "forward" in vars(module):
        return f"the forward of its {type(module).__name__} has been replaced"
    return None


def _unusable(linear: nn.Module, down: nn.Module, holders: Holders) -> str | None:
    if type(linear) is not nn.Linear:
        origin = f"{type(linear).__module__}.{type(linear).__name__}"
        return f"it holds a {origin}, quantised or adapted, where a torch.nn.Linear is needed"
    reference = down.weight
    if len(holders["module", id(linear)]) > 1:
        return "it shares a Linear layer with another module"
    for parameter in linear.parameters():
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point() or parameter.is_inference():
            return f"its weights are a {type(parameter).__name__} of {parameter.dtype}, not ordinary parameters"
        if parameter.is_meta:
            return "its weights are on the meta device: give them values first"
        if parameter.dtype != reference.dtype or parameter.device != reference.device:
            return "its weights differ in type or device"
        if len(holders["memory", _address(parameter)]) > 1:
            return "its weights are tied to those of another layer"
    return None
