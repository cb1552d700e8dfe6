"""How the layers of a language model use their activations: for each token, and for each sparse expert.

Shapes as in `lm.moe`: T tokens, K experts of each, N = T K routed tokens, E experts, R mixing weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lm.dispatch import sort_by_expert
from lm.moe import MoE
from pretrain.inspection import Mix, layer_inputs, layer_mixes, mixing_layers


@dataclass(frozen=True)
class ExpertMix:
    """The mixing weights of one layer's sparse experts, for one of their gates.

    Attributes:
        layer, gate, labels: as in `pretrain.inspection.Mix`.
        weights_NR: of each routed token; of learnable activations each expert's own (E, R).
        expert_N: which expert a row belongs to.
        token_N: which token; None for learnable activations.
        load_E: rows of each expert.
    """

    layer: str
    gate: str
    labels: Sequence[str]
    weights_NR: Tensor
    expert_N: Tensor
    token_N: Tensor | None
    load_E: Tensor

    def by_expert(self) -> Mix:
        """Return each expert's mean mix over the tokens routed to it; experts without a token are left out."""
        sums_ER = self.weights_NR.new_zeros(len(self.load_E), self.weights_NR.shape[1])
        sums_ER.index_add_(0, self.expert_N, self.weights_NR)
        used = self.load_E.nonzero().flatten()
        means = sums_ER[used] / self.load_E[used, None]
        return Mix(self.layer, self.gate, self.labels, means, "expert", [f"expert {i}" for i in used.tolist()])

    def by_token(self, names: Sequence[str]) -> Mix:
        """Return each token's mix, the mean over its experts."""
        assert self.token_N is not None
        sums_TR = self.weights_NR.new_zeros(len(names), self.weights_NR.shape[1])
        sums_TR.index_add_(0, self.token_N, self.weights_NR)
        top_k = len(self.token_N) // len(names)
        layer = f"{self.layer} (mean of each token's {top_k})"
        return Mix(layer, self.gate, self.labels, sums_TR / top_k, "token", names)

    def table(self) -> str:
        """Return each expert's tokens and mean mix as text."""
        mix, width = self.by_expert(), max(8, *(len(label) + 2 for label in self.labels))
        routed = self.token_N is not None
        what = "mean over the tokens sent to each expert" if routed else "constants of each expert"
        heading = f"  {'':<12}{'tokens' if routed else '':>8}" + "".join(f"{label:>{width}}" for label in self.labels)
        lines = [f"{self.layer}, {self.gate}: {what}", heading]
        loads = self.load_E[self.load_E > 0].tolist()
        for name, load, row in zip(mix.names, loads, mix.weights.tolist(), strict=True):
            numbers = "".join(f"{value:>{width}.3f}" for value in row)
            lines.append(f"  {name:<12}{f'{load:,}' if routed else '':>8}{numbers}")
        if unused := (self.load_E == 0).nonzero().flatten().tolist():
            lines.append(f"  no token was sent to experts {', '.join(map(str, unused))}")
        return "\n".join(lines)


@torch.no_grad()
def expert_mixes(name: str, layer: MoE, x: Tensor | None) -> list[ExpertMix]:
    """Return the mix of every gate of the sparse experts, or of their constants.

    Args:
        name: what the layer is called.
        layer: a mixture whose experts have weights of their own; for others there is nothing to return.
        x: the layer's input, (T, D); constants need none.
    """
    experts = layer.experts
    if layer.gate_labels():
        assert x is not None
        *_, experts_TK = layer.route(x)
        groups = sort_by_expert(experts_TK, experts.n_experts)
        token_N = groups.order_N // layer.config.top_k
        gates, labels = layer.gates(x), layer.gate_labels()
        return [
            ExpertMix(name, gate, labels[gate], weights.float(), groups.expert_N, token_N, groups.load())
            for gate, weights in gates.items()
        ]
    each = torch.arange(experts.n_experts)
    return [
        ExpertMix(name, gate, labels, getattr(experts, gate).float(), each, None, torch.ones_like(each))
        for gate, labels in layer.coefficient_labels().items()
    ]


def model_mixes(
    layers: Mapping[str, nn.Module], forward: Callable[[], Any], names: Sequence[str]
) -> tuple[list[Mix], list[ExpertMix]]:
    """Return the mixes of feed-forward layers in a forward pass: of the layers that see every token, and of experts.

    Args:
        layers: name -> feed-forward layer or mixture of experts.
        forward: runs the model on the tokens; not called for learnable activations, which are the same for all.
        names: what each token is called.
    """
    found = {
        f"{name} {part}".rstrip(): module
        for name, layer in layers.items()
        for part, module in mixing_layers(layer).items()
    }
    gated = {name: layer for name, layer in found.items() if layer.gate_labels()}
    inputs = layer_inputs(gated, forward) if gated else {}
    mixes: list[Mix] = []
    experts: list[ExpertMix] = []
    for name, layer in found.items():
        if isinstance(layer, MoE):
            experts += expert_mixes(f"{name} experts", layer, inputs.get(name))
        else:
            mixes += layer_mixes(name, layer, inputs.get(name), names=names)
    return mixes, experts
