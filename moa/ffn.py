"""The feed-forward layer, one module for every kind, and the function that builds it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa import fused
from moa.gates import find_gate
from moa.registry import DEFAULT_GATE, find_kind

# The parameters behind each set of mixing weights, in the paper's letters: pi_k = phi(u_k . x) or the constant alpha_k.
GATE_NAMES = {"pi": "u", "rho": "v"}
COEFFICIENT_NAMES = {"pi": "alpha", "rho": "beta"}


class FeedForward(nn.Module):
    """A feed-forward layer of any kind: (..., in_features) -> (..., out_features).

    `build_ffn` makes one and describes the arguments. Parameters, d = in_features, D = hidden_features:

    - `w1` (D, d); Type-I also `w2` (out, D); Type-II also `w2` (D, d) and `w3` (out, D);
    - LA kinds: `alpha` and, bi-sided, `beta`, one coefficient for each activation or pair;
    - MoA kinds: `u` and, bi-sided, `v`, one row of length d for each activation or pair.

    Attributes:
        kind, activations (names), gate (a name, None without gates), implementation, in_features, hidden_features,
        out_features.
    """

    def __init__(
        self,
        kind: str,
        in_features: int,
        hidden_features: int,
        *,
        out_features: int | None = None,
        activations: str | Sequence[str] | None = None,
        gate: str = DEFAULT_GATE,
        gate_bias: bool = False,
        bias: bool = False,
        drop: float = 0.0,
        implementation: str = "auto",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        table_row = find_kind(kind)
        table_row.check_gate(gate, gate_bias)
        self.kind = kind
        self.activations = table_row.find_activations(activations)
        self.gate = gate if table_row.family == "moa" else None
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.out_features = in_features if out_features is None else out_features
        check_sizes(self.in_features, self.hidden_features, self.out_features)
        self._mixing = table_row.mixing
        fused.check_implementation(implementation, kind, self._mixing, self.activations)
        self.implementation = implementation
        self._labels = table_row.labels(self.activations)

        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.w1 = nn.Linear(in_features, hidden_features, bias=bias, **factory)
        self.w3: nn.Linear | None = None
        if table_row.projections == 2:
            self.w2 = nn.Linear(in_features, hidden_features, bias=bias, **factory)
            self.w3 = nn.Linear(hidden_features, self.out_features, bias=bias, **factory)
        else:
            self.w2 = nn.Linear(hidden_features, self.out_features, bias=bias, **factory)
        self.drop = nn.Dropout(drop)
        for slot, labels in self._labels.items():
            if self.gate is not None:
                setattr(self, GATE_NAMES[slot], nn.Linear(in_features, len(labels), bias=gate_bias, **factory))
            else:
                setattr(self, COEFFICIENT_NAMES[slot], nn.Parameter(torch.empty(len(labels), **factory)))
        # Not self.reset_parameters(): a subclass has not yet made the parameters that its own version fills.
        FeedForward.reset_parameters(self)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        y = self.w1(x)
        z, output = (None, self.w2) if self.w3 is None else (self.w2(x), self.w3)
        # Float32 coefficients would otherwise promote the whole hidden activation under autocast.
        weights = {slot: weight.to(y.dtype) for slot, weight in self.mixing_weights(x).items()}
        return output(self.drop(self.mix(y, z, weights)))

    def mix(self, y: Tensor, z: Tensor | None, weights: dict[str, Tensor]) -> Tensor:
        """The hidden activation (..., D) from the branches y and z, both (..., D), as `moa.mixing` defines it."""
        if self._mixing is None:
            raise NotImplementedError(f"{type(self).__name__}, the layer of kind {self.kind!r}, must define mix()")
        return fused.apply(self._mixing, y, z, weights, self.activations, self.implementation)

    def mixing_weights(self, x: Tensor) -> dict[str, Tensor]:
        """What `mix` reads, "pi" and, bi-sided, "rho": each token's gates (..., rows), or coefficients (rows,)."""
        return self.gates(x) or {slot: getattr(self, COEFFICIENT_NAMES[slot]) for slot in self._labels}

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        """The mixing weights of each token: {"pi": (..., rows)}, bi-sided also "rho"; {} for fixed and LA kinds.

        `gate_labels` names the columns. Args: x (..., in_features).
        """
        if self.gate is None:
            return {}
        phi = find_gate(self.gate)
        logits = _side_by_side([getattr(self, GATE_NAMES[slot]) for slot in self._labels], x)
        return {slot: phi(part) for slot, part in zip(self._labels, logits, strict=True)}

    def gate_labels(self) -> dict[str, list[str]]:
        """What each gate weighs, in the order of its rows; {} for fixed and LA kinds.

        An activation, {"pi": ["id", "gelu", ..]}, or for qd-moa a product: "id*gelu" is Id(y) * GELU(z).
        """
        if self.gate is None:
            return {}
        return {slot: list(labels) for slot, labels in self._labels.items()}

    def coefficients(self) -> dict[str, Tensor]:
        """The learned constants of an LA kind: {"alpha": (rows,)}, bi-sided also "beta"; {} for all other kinds."""
        if self.gate is not None:
            return {}
        return {COEFFICIENT_NAMES[slot]: getattr(self, COEFFICIENT_NAMES[slot]) for slot in self._labels}

    def coefficient_labels(self) -> dict[str, list[str]]:
        """What each coefficient weighs, in its order, named as in `gate_labels`; {} for all but LA kinds."""
        if self.gate is not None:
            return {}
        return {COEFFICIENT_NAMES[slot]: list(labels) for slot, labels in self._labels.items()}

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, gate_std: float | None = None, coefficient: float = 0.5) -> None:
        """Fills every parameter anew.

        Args:
            std: of the projections, drawn from N(0, std^2); their biases become zero.
            gate_std: of the gate rows; None means `std`. Gate biases become zero.
            coefficient: every LA coefficient. The default is what a sigmoid gate gives at u = 0, so that LA and MoA
                start from the same function.
        """
        gate_std = std if gate_std is None else gate_std
        for name, layer in self.named_children():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=gate_std if name in GATE_NAMES.values() else std)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        self.reset_coefficients(coefficient)

    @torch.no_grad()
    def reset_coefficients(self, coefficient: float = 0.5) -> None:
        """Fills the LA coefficients alone, which no initialisation of `nn.Linear` reaches."""
        for value in self.coefficients().values():
            nn.init.constant_(value, coefficient)

    def extra_repr(self) -> str:
        gate = f", gate={self.gate}" if self.gate is not None else ""
        return f"{self.kind}, activations={' '.join(self.activations)}{gate}"


def _side_by_side(layers: Sequence[nn.Module], x: Tensor) -> Sequence[Tensor]:
    """What linear layers of few rows make of x: in one product, since each product goes through all of x.

    One by one, if somebody has wrapped a layer or hangs on it.
    """
    if len(layers) == 1 or not all(map(_is_plain, layers)):
        return [layer(x) for layer in layers]
    weights, biases = zip(*((layer.weight, layer.bias) for layer in layers), strict=True)
    bias = None if biases[0] is None else torch.cat(biases)
    return F.linear(x, torch.cat(weights), bias).split([len(weight) for weight in weights], dim=-1)


def _is_plain(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and not any(hooks)


def build_ffn(
    kind: str,
    in_features: int,
    hidden_features: int,
    out_features: int | None = None,
    activations: str | Sequence[str] | None = None,
    gate: str = DEFAULT_GATE,
    gate_bias: bool = False,
    bias: bool = False,
    drop: float = 0.0,
    device: Any = None,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
) -> FeedForward:
    """Builds a feed-forward layer, (..., in_features) -> (..., out_features).

    Args:
        kind: one of `kinds()`. `gelu` with `bias=True` is the standard MLP.
        in_features: d.
        hidden_features: D; `moa.hidden_features(kind, d)` gives the usual width.
        out_features: None means `in_features`.
        activations: the dictionary of an LA or MoA kind: a list of names, or the paper's letters ("gsr2l"), to which
            the one-, bi- and qd- kinds add the identity in front. None means `default_activations(kind)`.
        gate: phi of a MoA kind: "sigmoid", "tanh" or "softmax" (over each branch, for qd- kinds over all pairs).
        gate_bias: a constant added to each gate's logit (the paper's augmented input of section 4), with which MoA
            contains LA exactly.
        bias: whether the projections have biases.
        drop: probability of dropout on the hidden activation, before the output projection, as the first of the two
            in timm's Mlp.
        device: where the parameters are made; on "meta", follow with `to_empty(...)` and `reset_parameters()`.
        dtype: of the parameters.
        implementation: how the mixture is computed: "auto", "reference", "torch", "inductor" or "triton"; see
            `moa.fused`.

    Raises:
        ValueError: an unknown kind, activation or gate (with the valid ones), an option that does not apply to the
            kind (with the kinds that take it), or a size below 1.
    """
    layer = find_kind(kind).layer or FeedForward
    return layer(
        kind,
        in_features,
        hidden_features,
        out_features=out_features,
        activations=activations,
        gate=gate,
        gate_bias=gate_bias,
        bias=bias,
        drop=drop,
        implementation=implementation,
        device=device,
        dtype=dtype,
    )


def check_sizes(in_features: int, hidden_features: int, out_features: int) -> None:
    """Raises ValueError unless every size is a positive integer."""
    sizes = {"in_features": in_features, "hidden_features": hidden_features, "out_features": out_features}
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a positive integer, not {size!r}")
