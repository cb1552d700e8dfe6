"""A mixture of experts, each a feed-forward layer of any kind of `moa`: mathematics only.

Each token x goes to the K of E sparse experts that its router scores highest, and to a shared expert besides:

    MoE(x) = FFN_shared(x) + sum_{i in top-K} s_i(x) FFN_i(x),   s = softmax(W_r x)

(the paper's LlamaMoE, section 5). Every expert has projections and gates of its own.

Data flows one way: the layer returns its output and a `Routing` record of what the router did. Nothing is kept on the
module, so neither evaluation nor the recomputation of activations can count a token twice.

Shapes: T tokens, K experts of each token, N = T K routed tokens, E experts, D model width, F hidden width, R mixing
weights.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moa
from lm.dispatch import Dispatch, Groups, gather_from_experts, grouped_linear, scatter_to_experts, sort_by_expert
from moa import FFNConfig

Scores = Literal["softmax", "sigmoid"]


@dataclass
class MoEConfig:
    """The mixture of experts of every block; the kind of the experts is `model.ffn`'s.

    Raises:
        ValueError: a value out of range.
    """

    n_experts: int = 32
    """Sparse experts in each layer."""

    top_k: int = 4
    """Sparse experts that each token is sent to. All of them take it: no token is dropped."""

    n_shared: int = 1
    """Experts that see every token. More than one are one feed-forward layer of n_shared times the width."""

    expert_hidden_features: int | None = None
    """Hidden width of a sparse expert. null: a quarter of a dense layer's, int(2d/3) for Type-II, d for Type-I."""

    shared_hidden_features: int | None = None
    """Hidden width of one shared expert. null: a dense layer's, int(8d/3) for Type-II, 4d for Type-I."""

    scores: Scores = "softmax"
    """How logits become scores: `softmax` over the experts, or a `sigmoid` for each."""

    renormalise: bool = False
    """Divide the scores of a token's experts by their sum."""

    balance_loss: float = 0.01
    """Weight, for each layer, of the balance loss E sum_i f_i P_i; see `lm.moe.balance_loss`."""

    z_loss: float = 1e-3
    """Weight, for each layer, of the router's z-loss, the mean of logsumexp(logits)^2."""

    bias_update_rate: float = 0.0
    """Step of the bias that balances without a loss, after each optimizer step; see `lm.moe.balanced_bias`. 0: off."""

    shared_gates: bool = False
    """Mix activations in all experts of a layer by one set of gates (or coefficients), the shared expert's."""

    dispatch: Dispatch = "auto"
    """`grouped`: F.grouped_mm. `loop`: expert by expert. `auto`: `grouped` for bfloat16 on CUDA, else `loop`."""

    def __post_init__(self) -> None:
        for name in ("n_experts", "top_k", "expert_hidden_features", "shared_hidden_features"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"model.moe.{name} is {value}: it has to be at least 1")
        if self.top_k > self.n_experts:
            raise ValueError(f"model.moe.top_k is {self.top_k}: there are only model.moe.n_experts {self.n_experts}")
        for name in ("n_shared", "balance_loss", "z_loss", "bias_update_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"model.moe.{name} is {getattr(self, name)}: it has to be 0 or more")
        for name, choices in (("scores", get_args(Scores)), ("dispatch", get_args(Dispatch))):
            if getattr(self, name) not in choices:
                raise ValueError(f"model.moe.{name} is {getattr(self, name)!r}: choose one of {', '.join(choices)}")
        if not self.n_shared and self.shared_hidden_features is not None:
            raise ValueError("model.moe.shared_hidden_features is set, but model.moe.n_shared is 0: leave one out")
        if not self.n_shared and self.shared_gates:
            raise ValueError("model.moe.shared_gates are the shared expert's: set model.moe.n_shared to at least 1")

    def check(self, ffn: FFNConfig) -> None:
        """Raise ValueError unless layers as `ffn` says can be experts of this mixture."""
        kind = moa.find_kind(ffn.kind)
        if kind.mixing is None:
            raise ValueError(
                f"model.ffn.kind {ffn.kind!r} cannot be an expert: it was registered as a class, and experts are "
                "computed together by a mixing function (y, z, weights, activations) -> h"
            )
        if ffn.hidden_features is not None:
            raise ValueError(
                f"model.ffn.hidden_features is {ffn.hidden_features}, but the model has experts: set "
                "model.moe.expert_hidden_features and model.moe.shared_hidden_features instead"
            )
        if self.shared_gates and kind.family == "fixed":
            raise ValueError(f"model.moe.shared_gates does not apply to {ffn.kind!r}, which has neither gates nor LA")

    def expert(self, ffn: FFNConfig, d: int) -> FFNConfig:
        """Return the feed-forward layer that one sparse expert of model width `d` is."""
        width = self.expert_hidden_features or moa.hidden_features(ffn.kind, d) // 4
        return replace(ffn, hidden_features=width)

    def shared(self, ffn: FFNConfig, d: int) -> FFNConfig | None:
        """Return the feed-forward layer that the shared experts together are; None without any."""
        if not self.n_shared:
            return None
        width = self.shared_hidden_features or moa.hidden_features(ffn.kind, d)
        return replace(ffn, hidden_features=self.n_shared * width)

    def router_loss(self, routing: "Routing") -> Tensor:
        """Return what training adds to the mean cross-entropy: balance and z-loss, summed over the layers."""
        return self.balance_loss * routing.balance_loss.sum() + self.z_loss * routing.z_loss.sum()

    def num_parameters(self, ffn: FFNConfig, d: int, activated: bool = False) -> dict[str, int]:
        """Return the parameters of one layer by role, in closed form.

        Args:
            activated: count only what one token uses: of the sparse experts, `top_k`.
        """
        expert, shared = self.expert(ffn, d), self.shared(ffn, d)
        used = self.top_k if activated else self.n_experts
        gates = expert.num_parameters(d) - expert.num_projection_parameters(d)
        return {
            "router": self.n_experts * d,
            "experts": used * expert.num_projection_parameters(d),
            "shared": shared.num_projection_parameters(d) if shared else 0,
            "gates": (0 if self.shared_gates else used * gates) + (gates if shared else 0),
        }

    def flops_per_token(self, ffn: FFNConfig, d: int) -> int:
        """Return the floating-point operations of one token's forward pass; see `moa.flops_per_token`."""
        expert, shared = self.expert(ffn, d), self.shared(ffn, d)
        if self.shared_gates:  # gates are computed once, in the shared expert: what is left are the matrices
            one_expert = 2 * replace(expert, bias=False).num_projection_parameters(d)
        else:
            one_expert = expert.flops_per_token(d)
        return 2 * self.n_experts * d + self.top_k * one_expert + (shared.flops_per_token(d) if shared else 0)


class Routing(NamedTuple):
    """What a router did with the tokens of one forward pass. A model stacks its layers': (L, ..)."""

    load: Tensor  # (E,) int64, tokens that each expert was given; K times the tokens in all
    balance_loss: Tensor  # scalar, 1 at perfect balance
    z_loss: Tensor  # scalar
    entropy: Tensor  # scalar, mean entropy of a token's scores in units of log E: 1 if they are all equal

    def detached(self) -> "Routing":
        """Return the same numbers without their graph."""
        return Routing(*(value.detach() for value in self))


def balance_loss(probabilities_TE: Tensor, load_E: Tensor) -> Tensor:
    """Return E sum_i f_i P_i (Switch Transformer, Fedus et al. 2021, equations 4 to 6).

    f_i is expert i's share of all N = T K choices and P_i its mean probability. It is 1 at perfect balance and E if one
    expert takes everything. The gradient flows through P alone: f is a count.
    """
    share_E = load_E.to(probabilities_TE.dtype) / load_E.sum()
    return len(load_E) * (share_E * probabilities_TE.mean(0)).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Return the mean over tokens of logsumexp(logits)^2: it keeps logits small (ST-MoE, Zoph et al. 2022, eq. 5)."""
    return logits_TE.logsumexp(-1).square().mean()


def balanced_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """Return the bias that loss-free balancing goes on with: b_i + rate sign(mean load - load_i).

    The bias is added to the scores when experts are chosen, never to the weights of their outputs (Wang et al. 2024;
    DeepSeek-V3, section 2.1.2).

    Args:
        load_E: tokens of each expert in a whole optimizer step.
    """
    load_E = load_E.to(bias_E.dtype)
    return bias_E + rate * (load_E.mean() - load_E).sign()


class MoE(nn.Module):
    """A router, `n_experts` sparse experts and a shared one: (..., D) -> (..., D) and a `Routing`.

    `router.weight` (E, D), `experts` (see `Experts`), `shared` (a `moa.FeedForward`, None without). The buffer
    `balance_bias` (E,) belongs to loss-free balancing: it is saved with the weights and has no gradient.

    Args:
        config: the mixture.
        ffn: what every expert is.
        d_model: D.

    Raises:
        ValueError: as `MoEConfig.check`.
    """

    balance_bias: Tensor

    def __init__(self, config: MoEConfig, ffn: FFNConfig, d_model: int) -> None:
        super().__init__()
        config.check(ffn)
        self.config = config
        self.router = nn.Linear(d_model, config.n_experts, bias=False)
        self.register_buffer("balance_bias", torch.zeros(config.n_experts))
        expert, own_mix = config.expert(ffn, d_model), not config.shared_gates
        self.experts = Experts(expert, d_model, config.n_experts, own_mix, config.dispatch)
        shared = config.shared(ffn, d_model)
        self.shared = shared.build(d_model) if shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Return the layer's output, of the shape of x, and what the router did.

        Args:
            x: (..., D).
        """
        x_TD = x.flatten(0, -2)
        logits_TE, probabilities_TE, weights_TK, experts_TK = self.route(x_TD)
        groups = sort_by_expert(experts_TK, self.config.n_experts)
        out_ND = self.experts(self._to_experts(x_TD, groups), groups, self._shared_mix(x_TD, groups))
        out_TKD = gather_from_experts(out_ND, groups, self.config.top_k)
        out_TD = (weights_TK[..., None].to(out_TKD.dtype) * out_TKD).sum(1)
        if self.shared is not None:
            out_TD = out_TD + self.shared(x_TD)
        load_E = groups.load()
        routing = Routing(
            load=load_E,
            balance_loss=balance_loss(probabilities_TE, load_E),
            z_loss=z_loss(logits_TE),
            entropy=mean_entropy(probabilities_TE.detach()),
        )
        return out_TD.reshape(x.shape), routing

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Choose experts for each token.

        Returns:
            logits (T, E); probabilities (T, E), the scores made to sum to one; and, of each token's experts, the
            weights (T, K) of their outputs and their numbers (T, K).
        """
        # In float32 at least: a rounded logit would send a token elsewhere (ST-MoE's selective precision).
        exact = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.to(exact), self.router.weight.to(exact))
            if self.config.scores == "softmax":
                scores_TE = probabilities_TE = logits_TE.softmax(-1)
            else:
                scores_TE = logits_TE.sigmoid()
                probabilities_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
            experts_TK = (scores_TE.detach() + self.balance_bias).topk(self.config.top_k).indices
            weights_TK = scores_TE.gather(-1, experts_TK)
            if self.config.renormalise:
                weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, probabilities_TE, weights_TK, experts_TK

    def gates(self, x: Tensor) -> dict[str, Tensor]:
        """Return the gates of the sparse experts at the tokens that they are sent: {"pi": (N, R)}, bi-sided also "rho".

        {} where the experts have none of their own. Args: x (..., D).
        """
        if not self.gate_labels():
            return {}
        x_TD = x.flatten(0, -2)
        *_, experts_TK = self.route(x_TD)
        groups = sort_by_expert(experts_TK, self.config.n_experts)
        return self.experts.mixing_weights(self._to_experts(x_TD, groups), groups)

    def gate_labels(self) -> dict[str, list[str]]:
        """Name the columns of `gates`, as `moa.FeedForward.gate_labels`."""
        return dict(self.experts.labels) if self.experts.own_mix and self.experts.gate is not None else {}

    def coefficients(self) -> dict[str, Tensor]:
        """Return the mean over the sparse experts of each LA coefficient: {"alpha": (R,)}, bi-sided also "beta"."""
        return {name: getattr(self.experts, name).mean(0) for name in self.coefficient_labels()}

    def coefficient_labels(self) -> dict[str, list[str]]:
        """Name the entries of `coefficients`."""
        if not self.experts.own_mix or self.experts.gate is not None:
            return {}
        return {moa.COEFFICIENT_NAMES[slot]: labels for slot, labels in self.experts.labels.items()}

    @torch.no_grad()
    def update_balance_bias(self, load_E: Tensor, skip: Tensor | None = None) -> None:
        """Move the bias one step towards balance, given the load of a whole optimizer step; not where `skip` is 1."""
        moved = balanced_bias(self.balance_bias, load_E, self.config.bias_update_rate)
        self.balance_bias.copy_(moved if skip is None else torch.where(skip > 0, self.balance_bias, moved))

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, gate_std: float | None = None, coefficient: float = 0.5) -> None:
        """Fill every parameter anew, as `moa.FeedForward.reset_parameters`; the router counts as a projection."""
        nn.init.normal_(self.router.weight, std=std)
        nn.init.zeros_(self.balance_bias)
        self.experts.reset_parameters(std, gate_std, coefficient)
        if self.shared is not None:
            self.shared.reset_parameters(std, gate_std, coefficient)

    def _to_experts(self, x_TD: Tensor, groups: Groups) -> Tensor:
        return scatter_to_experts(x_TD.to(compute_dtype(x_TD)), groups, self.config.top_k)

    def _shared_mix(self, x_TD: Tensor, groups: Groups) -> dict[str, Tensor] | None:
        """With `shared_gates`, the shared expert's mixing weights for every routed token, (N, R) each; else None."""
        if not self.config.shared_gates:
            return None
        assert self.shared is not None
        weights = self.shared.mixing_weights(x_TD)
        return {
            slot: scatter_to_experts(weight.expand(len(x_TD), -1), groups, self.config.top_k)
            for slot, weight in weights.items()
        }


class Experts(nn.Module):
    """The sparse experts of a layer, their parameters stacked: `w1` (E, F, D), and so on.

    The names and shapes are those of `moa.FeedForward` behind an axis for the experts: `w1`, `w2` and, for Type-II,
    `w3`, with biases `w1_bias` ..; gates `u`, `v` (E, R, D) with `u_bias`, `v_bias`; coefficients `alpha`, `beta`
    (E, R).

    Args:
        ffn: what each expert is, its width included.
        d_model: D.
        n_experts: E.
        own_mix: whether each expert has gates or coefficients of its own; if not, `forward` is given the weights.
        dispatch: see `lm.dispatch.grouped_linear`.
    """

    def __init__(
        self, ffn: FFNConfig, d_model: int, n_experts: int, own_mix: bool = True, dispatch: Dispatch = "auto"
    ) -> None:
        super().__init__()
        kind = moa.find_kind(ffn.kind)
        assert kind.mixing is not None
        self.kind = ffn.kind
        self.mixing = kind.mixing
        self.activations = kind.find_activations(ffn.activations)
        self.implementation = ffn.implementation
        self.labels = kind.labels(self.activations)
        self.gate = ffn.gate if kind.family == "moa" else None
        self.own_mix = own_mix
        self.dispatch = dispatch
        self.n_experts = n_experts

        width = ffn.width(d_model)
        into, out = (width, d_model), (d_model, width)
        self._projections = {"w1": into, "w2": into, "w3": out} if kind.projections == 2 else {"w1": into, "w2": out}
        for name, shape in self._projections.items():
            self._add_linear(name, shape, ffn.bias)
        for slot, labels in self.labels.items() if own_mix else ():
            if self.gate is not None:
                self._add_linear(moa.GATE_NAMES[slot], (len(labels), d_model), ffn.gate_bias)
            else:
                setattr(self, moa.COEFFICIENT_NAMES[slot], nn.Parameter(torch.empty(n_experts, len(labels))))
        self.reset_parameters()

    def forward(self, x_ND: Tensor, groups: Groups, weights: dict[str, Tensor] | None = None) -> Tensor:
        """Return what each expert makes of its tokens, (N, D).

        Args:
            x_ND: routed tokens, sorted by expert.
            groups: which expert has which of them.
            weights: mixing weights (N, R) of each slot, where the experts have none of their own.
        """
        y_NF = self._linear("w1", x_ND, groups)
        z_NF = self._linear("w2", x_ND, groups) if "w3" in self._projections else None
        weights = self.mixing_weights(x_ND, groups) if weights is None else weights
        weights = {slot: weight.to(y_NF.dtype) for slot, weight in weights.items()}
        h_NF = moa.fused.apply(self.mixing, y_NF, z_NF, weights, self.activations, self.implementation)
        return self._linear("w2" if z_NF is None else "w3", h_NF, groups)

    def mixing_weights(self, x_ND: Tensor, groups: Groups) -> dict[str, Tensor]:
        """Return, for each slot, the mixing weights of every routed token, (N, R); {} for fixed kinds."""
        if self.gate is None:
            names = {slot: moa.COEFFICIENT_NAMES[slot] for slot in self.labels}
            return {slot: getattr(self, name).index_select(0, groups.expert_N) for slot, name in names.items()}
        phi = moa.find_gate(self.gate)
        return {slot: phi(self._linear(moa.GATE_NAMES[slot], x_ND, groups)) for slot in self.labels}

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02, gate_std: float | None = None, coefficient: float = 0.5) -> None:
        """Fill every parameter anew; arguments as in `moa.FeedForward.reset_parameters`."""
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            elif name in moa.COEFFICIENT_NAMES.values():
                nn.init.constant_(parameter, coefficient)
            else:
                is_gate = name in moa.GATE_NAMES.values()
                nn.init.normal_(parameter, std=gate_std if is_gate and gate_std is not None else std)

    def extra_repr(self) -> str:
        gate = f", gate={self.gate}" if self.gate is not None else ""
        return f"{self.n_experts} x {self.kind}, activations={' '.join(self.activations)}{gate}"

    def _add_linear(self, name: str, shape: tuple[int, int], bias: bool) -> None:
        setattr(self, name, nn.Parameter(torch.empty(self.n_experts, *shape)))
        if bias:
            setattr(self, f"{name}_bias", nn.Parameter(torch.empty(self.n_experts, shape[0])))

    def _linear(self, name: str, x: Tensor, groups: Groups) -> Tensor:
        # Cast by hand: F.grouped_mm is not among the operations that autocast knows.
        bias = getattr(self, f"{name}_bias", None)
        bias = bias if bias is None else bias.to(x.dtype)
        return grouped_linear(x, getattr(self, name).to(x.dtype), bias, groups, self.dispatch)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type that a matrix product with x is computed in: autocast's, or x's own."""
    device: Any = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def mean_entropy(probabilities_TE: Tensor) -> Tensor:
    """Return the mean over tokens of the entropy of their probabilities, in units of log E."""
    n_experts = probabilities_TE.shape[-1]
    entropy_T = -(probabilities_TE * probabilities_TE.clamp_min(1e-12).log()).sum(-1)
    return entropy_T.mean() / math.log(max(n_experts, 2))
