"""The feed-forward layer as a setting: what a model's configuration says of it."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from moa.counts import flops_per_token, num_parameters, num_projection_parameters
from moa.ffn import FeedForward, build_ffn
from moa.registry import DEFAULT_GATE, hidden_features

MAX_FEATURES = 2**40  # torch counts the numbers of a matrix in 64 bits


@dataclass
class FFNConfig:
    """Which feed-forward layer a model has; `build_ffn` describes the choices.

    Raises:
        ValueError: as `build_ffn`, as soon as the configuration is made.
    """

    kind: str = "swiglu"
    """One of moa.kinds()."""

    hidden_features: int | None = None
    """Hidden width. null: 4d for Type-I, int(8d/3) for Type-II."""

    activations: list[str] | str | None = None
    """The dictionary, as names or the paper's letters ("gsr2"). null: the kind's default."""

    gate: str = DEFAULT_GATE
    """sigmoid, tanh or softmax."""

    gate_bias: bool = False
    """Add a constant to each gate's logit."""

    bias: bool = False
    """Give the projections biases."""

    gate_init_std: float | None = None
    """Standard deviation of the gates' initial weights. null: that of the projections."""

    coefficient_init: float = 0.5
    """Initial value of every coefficient of learnable activations."""

    implementation: str = "auto"
    """How a mixture is computed: auto, reference, torch, inductor or triton; see moa.fused."""

    def __post_init__(self) -> None:
        if self.hidden_features is not None and self.hidden_features > MAX_FEATURES:
            raise ValueError(f"ffn.hidden_features is {self.hidden_features}: it has to be at most 2^40")
        self.build(2, hidden_features=1 if self.hidden_features is None else self.hidden_features, device="meta")
        if self.gate_init_std is not None and not 0 <= self.gate_init_std < math.inf:
            raise ValueError(f"ffn.gate_init_std is {self.gate_init_std}: it has to be 0 or more")
        if not math.isfinite(self.coefficient_init):
            raise ValueError(f"ffn.coefficient_init is {self.coefficient_init}: it has to be a number")

    def width(self, d: int) -> int:
        """Return the hidden width of a layer of model width `d`."""
        return hidden_features(self.kind, d) if self.hidden_features is None else self.hidden_features

    def build(self, d: int, hidden_features: int | None = None, device: Any = None) -> FeedForward:
        """Return a layer of model width `d`, with `moa`'s own fresh weights; see `reset`."""
        return build_ffn(
            self.kind,
            d,
            self.width(d) if hidden_features is None else hidden_features,
            activations=self.activations,
            gate=self.gate,
            gate_bias=self.gate_bias,
            bias=self.bias,
            device=device,
            implementation=self.implementation,
        )

    @torch.no_grad()
    def reset(self, layer: Any, std: float) -> None:
        """Draw the weights of a layer as configured; `std` is that of the projections.

        Args:
            layer: a `FeedForward`, or what has a `reset_parameters` like it.
        """
        layer.reset_parameters(std=std, gate_std=self.gate_init_std, coefficient=self.coefficient_init)

    def num_parameters(self, d: int) -> int:
        """Return the parameters of a layer of model width `d`, in closed form."""
        return num_parameters(
            self.kind, d, self.width(d), activations=self.activations, gate_bias=self.gate_bias, bias=self.bias
        )

    def num_projection_parameters(self, d: int) -> int:
        """Return those of its projections alone: the layer without gates and coefficients."""
        return num_projection_parameters(self.kind, d, self.width(d), bias=self.bias)

    def flops_per_token(self, d: int) -> int:
        """Return the floating-point operations of one token's forward pass."""
        return flops_per_token(
            self.kind, d, self.width(d), activations=self.activations, gate_bias=self.gate_bias, bias=self.bias
        )
