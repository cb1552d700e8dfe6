"""What others would train: models of the same size as the `swiglu` baseline, each with its own usual loss.

`transformers` and `litgpt` are measured where they are installed; `plain` is a masked autoencoder written on timm and
torch alone. Compiled peers are compiled whole, as the training scripts of these libraries do it.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from timm.layers import LayerNorm, SwiGLU
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from benchmarks.harness import BASELINE
from benchmarks.sides import Batch, Side, Task
from lm.model import LlamaConfig
from lm.module import LanguageModule
from vision_mae.model import MAEConfig
from vision_mae.module import MaskedAutoencoderModule
from vision_mae.patches import patchify, sincos_table

LIBRARIES = ("transformers", "litgpt")

MeanLoss = Callable[[Batch], Tensor]


def build_peer(name: str, task: Task) -> Side:
    """Return a peer, one of `peer_names(task)`, whose library is there."""
    module: Any = task.module(BASELINE)
    torch.manual_seed(0)
    with torch.device(task.setting.device):
        model, mean_loss = PEERS[task.domain][name](module.config, task.setting.length)
    if task.setting.compile:
        model.compile()
    chosen = module.optimizer_config
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=chosen.peak_lr(task.setting.batch),
        betas=chosen.betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        fused=True,
    )
    return Side(model.train(), mean_loss, optimizer, task)


def peer_names(task: Task) -> list[str]:
    """Return the peers of a configuration: none for a mixture of experts, which none of them has in the same form."""
    return [] if getattr(task.config, "moe", None) is not None else list(PEERS[task.domain])


def import_peer(name: str) -> None:
    """Raises ImportError if the library of a peer is not installed, or does not load."""
    if name in LIBRARIES:
        importlib.import_module(name)


def transformers_llama(config: LlamaConfig, length: int) -> tuple[nn.Module, MeanLoss]:
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.ffn.width(config.d_model),
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            max_position_embeddings=length,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_base,
            initializer_range=config.init_std,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )

    def mean_loss(batch: Batch) -> Tensor:
        # The targets are shifted already; `labels` alone would be shifted once more.
        return model(input_ids=batch["inputs"], labels=batch["targets"], shift_labels=batch["targets"]).loss

    return model, mean_loss


def litgpt_gpt(config: LlamaConfig, length: int) -> tuple[nn.Module, MeanLoss]:
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    model = GPT(
        Config(
            block_size=length,
            vocab_size=config.vocab_size,
            padded_vocab_size=config.vocab_size,
            n_layer=config.n_layers,
            n_head=config.n_heads,
            n_embd=config.d_model,
            intermediate_size=config.ffn.width(config.d_model),
            mlp_class_name="LLaMAMLP",
            norm_class_name="RMSNorm",
            norm_eps=config.norm_eps,
            rotary_percentage=1.0,
            rope_base=round(config.rope_base),
            parallel_residual=False,
            bias=False,
        )
    )
    model.apply(model._init_weights)  # as its `generate` and `pretrain` scripts do; torch's own would be larger

    def mean_loss(batch: Batch) -> Tensor:
        return chunked_cross_entropy(model(batch["inputs"]), batch["targets"])

    return model, mean_loss


class PlainMAE(nn.Module):
    """A masked autoencoder as one writes it from the paper: timm's blocks with timm's SwiGLU, and torch."""

    def __init__(self, config: MAEConfig) -> None:
        super().__init__()
        d, e, side = config.d, config.decoder_width, config.image_size // config.patch_size
        self.n_visible, self.patch_size = config.n_visible, config.patch_size
        self.encoder = VisionTransformer(
            img_size=config.image_size,
            patch_size=config.patch_size,
            in_chans=config.in_channels,
            embed_dim=d,
            depth=config.depth,
            num_heads=config.heads,
            num_classes=0,
            pos_embed="none",
            mlp_layer=_swiglu(config.hidden),
        )
        self.encoder_positions = nn.Buffer(sincos_table(d, side))
        self.embed = nn.Linear(d, e)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, e))
        self.decoder_positions = nn.Buffer(sincos_table(e, side))
        self.blocks = nn.Sequential(
            *(
                Block(
                    e,
                    config.decoder_heads,
                    qkv_bias=True,
                    norm_layer=LayerNorm,
                    mlp_layer=_swiglu(config.decoder_hidden),
                )
                for _ in range(config.decoder_depth)
            )
        )
        self.norm = LayerNorm(e)
        self.head = nn.Linear(e, config.patch_values)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        """The mean squared error on masked patches, each normalised by its own mean and variance."""
        order = noise.argsort(dim=1)
        visible, restore = order[:, : self.n_visible], order.argsort(dim=1)
        x = self.encoder.patch_embed(images) + self.encoder_positions[:, 1:]
        x = x.gather(1, visible[:, :, None].expand(-1, -1, x.shape[-1]))
        first = (self.encoder.cls_token + self.encoder_positions[:, :1]).expand(len(x), -1, -1)
        x = self.embed(self.encoder.norm(self.encoder.blocks(torch.cat((first, x), dim=1))))

        masked = self.mask_token.expand(len(x), noise.shape[1] - self.n_visible, -1).to(x.dtype)
        patches = torch.cat((x[:, 1:], masked), dim=1)
        patches = patches.gather(1, restore[:, :, None].expand(-1, -1, x.shape[-1]))
        x = torch.cat((x[:, :1], patches), dim=1) + self.decoder_positions
        predictions = self.head(self.norm(self.blocks(x)))[:, 1:]

        targets = patchify(images, self.patch_size)
        variance, mean = torch.var_mean(targets, dim=-1, keepdim=True)
        errors = (predictions - (targets - mean) / (variance + 1e-6).sqrt()).square().mean(dim=-1)
        return (errors * (restore >= self.n_visible)).sum() / (noise.numel() - len(x) * self.n_visible)


def _swiglu(width: int) -> Any:
    def layer(in_features: int, **_: Any) -> nn.Module:
        return SwiGLU(in_features, width, bias=False)

    return layer


def plain_mae(config: MAEConfig, length: int) -> tuple[nn.Module, MeanLoss]:
    model = PlainMAE(config)
    return model, lambda batch: model(batch["images"], batch["noise"])


PEERS: dict[type, dict[str, Callable[[Any, int], tuple[nn.Module, MeanLoss]]]] = {
    LanguageModule: {"transformers": transformers_llama, "litgpt": litgpt_gpt},
    MaskedAutoencoderModule: {"plain": plain_mae},
}
