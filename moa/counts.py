"""Parameters and floating-point operations of a layer, without building it."""

from collections.abc import Sequence

from torch import nn

from moa.ffn import FeedForward, build_ffn, check_sizes
from moa.registry import Kind, find_kind


def num_parameters(
    kind: str,
    in_features: int,
    hidden_features: int,
    *,
    out_features: int | None = None,
    activations: str | Sequence[str] | None = None,
    gate_bias: bool = False,
    bias: bool = False,
) -> int:
    """The number of parameters of `build_ffn(...)` with the same arguments.

    With p input projections (1 for Type-I, 2 for Type-II) and r activations or pairs over all branches:
    p (d + bias) D + (D + bias) out, plus r for LA kinds, plus r (d + gate_bias) for MoA kinds.

    Raises:
        ValueError: as `build_ffn`.
    """
    d, D, out = in_features, hidden_features, in_features if out_features is None else out_features
    row, num_weights = _look_up(kind, d, D, out, activations, gate_bias)
    if row.layer is not None:
        layer = _meta_layer(kind, d, D, out, activations, gate_bias, bias)
        return sum(parameter.numel() for parameter in layer.parameters())
    weight_size = {"fixed": 0, "la": 1, "moa": d + gate_bias}[row.family]
    return num_projection_parameters(kind, d, D, out_features=out, bias=bias) + num_weights * weight_size


def num_projection_parameters(
    kind: str, in_features: int, hidden_features: int, *, out_features: int | None = None, bias: bool = False
) -> int:
    """The number of parameters of the projections `w1`, `w2`, `w3` alone, without gates and coefficients.

    Raises:
        ValueError: an unknown kind.
    """
    d, D, out = in_features, hidden_features, in_features if out_features is None else out_features
    return find_kind(kind).projections * (d + bias) * D + (D + bias) * out


def flops_per_token(
    kind: str,
    in_features: int,
    hidden_features: int,
    *,
    out_features: int | None = None,
    activations: str | Sequence[str] | None = None,
    gate_bias: bool = False,
    bias: bool = False,
) -> int:
    """The floating-point operations of one token's forward pass; the backward pass takes twice as many.

    As is the convention for model FLOPs utilisation, these are the matrix multiplications, 2 for each multiply-add:
    the projections and the gates. Elementwise work is not counted: activations, mixing, and the biases, which are
    accepted so that one set of options serves both counts.

    Raises:
        ValueError: as `build_ffn`.
    """
    d, D, out = in_features, hidden_features, in_features if out_features is None else out_features
    row, num_weights = _look_up(kind, d, D, out, activations, gate_bias)
    if row.layer is not None:
        layer = _meta_layer(kind, d, D, out, activations, gate_bias, bias)
        return 2 * sum(module.weight.numel() for module in layer.modules() if isinstance(module, nn.Linear))
    gates = num_weights * d if row.family == "moa" else 0
    return 2 * (row.projections * d * D + D * out + gates)


def _look_up(
    kind: str, d: int, D: int, out: int, activations: str | Sequence[str] | None, gate_bias: bool
) -> tuple[Kind, int]:
    """The kind and how many mixing weights it has over all branches, once the options are known to apply to it."""
    row = find_kind(kind)
    row.check_gate(gate_bias=gate_bias)
    check_sizes(d, D, out)
    labels = row.labels(row.find_activations(activations))
    return row, sum(len(names) for names in labels.values())


def _meta_layer(
    kind: str, d: int, D: int, out: int, activations: str | Sequence[str] | None, gate_bias: bool, bias: bool
) -> FeedForward:
    """A layer without memory, for the kinds whose class may hold parameters that no formula here knows."""
    return build_ffn(kind, d, D, out, activations, gate_bias=gate_bias, bias=bias, device="meta")
