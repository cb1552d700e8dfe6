"""Llama and LlamaMoE with any feed-forward kind of `moa`: mathematics only.

A decoder-only Transformer: rotary positions, RMSNorm before each sublayer, multi-head attention, no biases, untied
embedding and head (Touvron et al. 2023; the paper's section 5 and appendix 7.1). LlamaMoE has a mixture of experts in
the place of each feed-forward layer, and is otherwise the same.

Shapes: B batch, L length, D model width, H heads, K head size, V vocabulary.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lm.cache import KeyValueCache, LayerCache
from lm.head import Head
from lm.moe import MoE, MoEConfig, Routing
from moa import FFNConfig

MAX_LAYERS = 10_000  # each is some dozen Python objects and a line of every record, whatever its width


@dataclass
class LlamaConfig:
    """The size of a Llama.

    Raises:
        ValueError: if the sizes do not fit together.
    """

    vocab_size: int = 50_304
    d_model: int = 768
    n_layers: int = 6
    n_heads: int = 12
    ffn: FFNConfig = field(default_factory=FFNConfig)
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}: it has to be at least 1")
        if self.n_layers > MAX_LAYERS:
            raise ValueError(f"model.n_layers is {self.n_layers}: it has to be at most {MAX_LAYERS}")
        for name in ("rope_base", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"model.{name} is {getattr(self, name)}: it has to be above 0")
        if not 0 <= self.init_std < math.inf:
            raise ValueError(f"model.init_std is {self.init_std}: it has to be 0 or more")
        if self.d_model % self.n_heads or self.head_size % 2:
            raise ValueError(
                f"model.d_model {self.d_model} over model.n_heads {self.n_heads} has to be an even head size: "
                "rotary positions turn pairs of channels"
            )
        if self.moe is not None:
            self.moe.check(self.ffn)

    @property
    def head_size(self) -> int:
        return self.d_model // self.n_heads


def rotary_tables(positions: torch.Tensor, head_size: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of the rotation angles (Su et al. 2021), each (..., L, K) in float32.

    Channels k and k + K/2 form a pair that turns by position * base^(-2k / K).
    """
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    angles = positions[..., None].float() / base**exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BHLK: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn queries or keys by their position."""
    first, second = x_BHLK.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BHLK * cos + turned * sin).to(x_BHLK.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention; with a mask, only within each document."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.q = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k = nn.Linear(config.d_model, config.d_model, bias=False)
        self.v = nn.Linear(config.d_model, config.d_model, bias=False)
        self.o = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self,
        x_BLD: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        q, k, v = (
            projection(x_BLD).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        # A single token behind cached ones sees them all: neither a mask, which fused kernels do not take, nor causal.
        is_causal = mask is None and x_BLD.shape[1] > 1
        out_BHLK = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return self.o(out_BHLK.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and feed-forward, each behind its norm and beside the residual stream.

    Returns the stream and, where the feed-forward is a mixture of experts, its `Routing`, else None.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        d, moe = config.d_model, config.moe
        self.ffn: nn.Module = config.ffn.build(d) if moe is None else MoE(moe, config.ffn, d)

    def forward(
        self,
        x_BLD: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        cache: LayerCache | None = None,
    ) -> tuple[torch.Tensor, Routing | None]:
        x_BLD = x_BLD + self.attn(self.attn_norm(x_BLD), cos, sin, mask, cache)
        out = self.ffn(self.ffn_norm(x_BLD))
        out_BLD, routing = out if isinstance(self.ffn, MoE) else (out, None)
        return x_BLD + out_BLD, routing


class Llama(nn.Module):
    """A Llama language model.

    Initialisation, all in `reset_parameters`:

    | parameters                                   | start                                                    |
    |----------------------------------------------|----------------------------------------------------------|
    | embedding, head, attention, FFN projections, | N(0, init_std^2)                                         |
    | router, experts' projections                 |                                                          |
    | gates u, v                                   | N(0, ffn.gate_init_std^2), init_std unless set           |
    | coefficients alpha, beta                     | ffn.coefficient_init                                     |
    | norm scales                                  | 1                                                        |
    | biases, loss-free balancing's included       | 0                                                        |
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.head = Head(config.d_model, config.vocab_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights, as the table above says."""
        std = self.config.init_std
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, Block):
                attn = module.attn
                for projection in (attn.q, attn.k, attn.v, attn.o):
                    nn.init.normal_(projection.weight, std=std)
                self.config.ffn.reset(module.ffn, std)
        nn.init.normal_(self.embed.weight, std=std)
        nn.init.normal_(self.head.weight, std=std)

    def forward(
        self,
        tokens_BL: torch.Tensor,
        segments_BL: torch.Tensor | None = None,
        *,
        cache: KeyValueCache | None = None,
        targets_BL: torch.Tensor | None = None,
        ignore_index: int = -100,
        with_routing: bool = False,
        last_only: bool = False,
    ) -> Any:
        """Return the logits of the next token, (B, L, V); arguments as in `hidden`.

        Args:
            targets_BL: return the sum of their cross-entropy instead, a scalar; the logits never exist all at once.
            ignore_index: stands for no target.
            with_routing: return (logits or sum, routing).
            last_only: give the logits at the last position alone, (B, 1, V).
        """
        x_BLD, routing = self.hidden(tokens_BL, segments_BL, cache)
        result = self.head(x_BLD[:, -1:] if last_only else x_BLD, targets_BL, ignore_index)
        return (result, routing) if with_routing else result

    def hidden(
        self, tokens_BL: torch.Tensor, segments_BL: torch.Tensor | None = None, cache: KeyValueCache | None = None
    ) -> tuple[torch.Tensor, Routing | None]:
        """Return what the head reads, (B, L, D), and what the routers did, one row a layer; None without experts.

        Args:
            tokens_BL: token ids.
            segments_BL: number of each token's document; attention and positions then stay within a document.
            cache: the tokens before these, which attention sees as well; these are added to it. Either all calls with
                a cache give segments, or none does.
        """
        cos, sin, mask = self._positions_and_mask(tokens_BL, segments_BL, cache)
        x_BLD, layers = self.embed(tokens_BL), []
        for index, block in enumerate(self.blocks):
            x_BLD, routing = block(x_BLD, cos, sin, mask, None if cache is None else cache.layers[index])
            layers.append(routing)
        routing = None if self.config.moe is None else Routing(*map(torch.stack, zip(*layers, strict=True)))
        return self.norm(x_BLD), routing

    def _positions_and_mask(
        self, tokens_BL: torch.Tensor, segments_BL: torch.Tensor | None, cache: KeyValueCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the rotation of each new token, and which tokens it sees; None: all before it."""
        past, length = (0 if cache is None else cache.length), tokens_BL.shape[1]
        if segments_BL is None:
            positions = torch.arange(past, past + length, device=tokens_BL.device)
            is_whole = past == 0 or length == 1
            mask = None if is_whole else tokens_BL.new_ones(length, past + length, dtype=torch.bool).tril(past)
        else:
            segments_BL = segments_BL if cache is None else cache.add_segments(segments_BL)
            positions = document_positions(segments_BL)[:, None, past:]
            mask = document_mask(segments_BL, past)
        return *rotary_tables(positions, self.config.head_size, self.config.rope_base), mask


def document_positions(segments_BL: torch.Tensor) -> torch.Tensor:
    """Return each token's position within its document, (B, L)."""
    index = torch.arange(segments_BL.shape[1], device=segments_BL.device)
    starts = torch.ones_like(segments_BL, dtype=torch.bool)
    starts[:, 1:] = segments_BL[:, 1:] != segments_BL[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def document_mask(segments_BL: torch.Tensor, past: int = 0) -> torch.Tensor:
    """Return which key (last axis) each query may see: earlier ones of its own document, (B, 1, L - past, L) bool.

    Args:
        past: tokens at the start that are keys only.
    """
    same = segments_BL[:, past:, None] == segments_BL[:, None, :]
    return same.tril(past)[:, None]


def num_parameters(config: LlamaConfig, activated: bool = False) -> dict[str, int]:
    """Return the number of parameters by role, in closed form: N = 2 V d + L (4 d^2 + FFN + 2 d) + d in all.

    Args:
        activated: count only what one token uses, embedding and head included: of the sparse experts, its own.
    """
    d, layers = config.d_model, config.n_layers
    if config.moe is None:
        projections = config.ffn.num_projection_parameters(d)
        per_layer = {"ffn": projections, "gates": config.ffn.num_parameters(d) - projections}
    else:
        per_layer = config.moe.num_parameters(config.ffn, d, activated)
    return {
        "embedding": config.vocab_size * d,
        "attention": layers * 4 * d * d,
        **{role: layers * number for role, number in per_layer.items()},
        "norm": layers * 2 * d + d,
        "head": config.vocab_size * d,
    }


def flops_per_token(config: LlamaConfig, length: int) -> int:
    """Return the floating-point operations of one token in training: forward and, twice as much, backward.

    Matrix products only, 2 per multiply-add, as MFU is counted (Chowdhery et al. 2022, appendix B): attention scores
    and their use of the values over the whole `length`, although half of it is masked. Of the experts, those that a
    token uses.
    """
    d, moe = config.d_model, config.moe
    feed_forward = config.ffn.flops_per_token(d) if moe is None else moe.flops_per_token(config.ffn, d)
    per_layer = 2 * 4 * d * d + 2 * 2 * length * d + feed_forward
    return 3 * (config.n_layers * per_layer + 2 * config.vocab_size * d)
