"""The masked autoencoder (He et al. 2021) on timm's VisionTransformer, with any feed-forward kind of `moa`.

Mathematics only. Shapes as in `vision_mae.patches`, and T = K + 1 tokens of the encoder, class token first.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from timm.layers import LayerNorm  # with the epsilon of 1e-6 that vision transformers have
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

import moa
from moa import FFNConfig
from vision_mae.patches import random_masking, sincos_table, take_patches

# width, depth, heads
SIZES = {
    "vit_tiny": (192, 12, 3),
    "vit_small": (384, 12, 6),
    "vit_base": (768, 12, 12),
    "vit_large": (1024, 24, 16),
    "vit_huge": (1280, 32, 16),
}
INIT_STD = 0.02
MAX_DEPTH = 10_000  # each block is some dozen Python objects and a line of every record, whatever its width

Pool = Literal["token", "avg"]
KnnPool = Literal["token", "avg", "patches"]


@dataclass
class ViTFFNConfig(FFNConfig):
    """Which feed-forward layer the blocks of encoder and decoder have.

    Raises:
        ValueError: as `moa.build_ffn`.
    """

    kind: str = "swiglu"
    """One of moa.kinds(), or `mlp`: the standard layer of a vision transformer, which is `gelu` with biases."""

    hidden_features: int | None = None
    """Hidden width in the encoder; the decoder's is in proportion. null: 4d for Type-I, int(8d/3) for Type-II."""

    def __post_init__(self) -> None:
        if self.kind == "mlp":
            self.kind, self.bias = "gelu", True
        super().__post_init__()

    def timm_layer(self) -> type[nn.Module]:
        """Return the class for timm's `mlp_layer`."""
        return moa.timm_mlp(
            self.kind,
            activations=self.activations,
            gate=self.gate,
            gate_bias=self.gate_bias,
            bias=self.bias,
            implementation=self.implementation,
        )

    def timm_ratio(self, d: int, hidden: int) -> float:
        """Return the `mlp_ratio` with which timm gives `timm_layer` exactly this hidden width.

        timm speaks of a Type-I layer, int(mlp_ratio * d), of which Type-II kinds take two thirds (`moa.timm_mlp`).
        """
        is_gated = moa.hidden_features(self.kind, d) < 4 * d
        type_one = -(-3 * hidden // 2) if is_gated else hidden
        return type_one / d if int(type_one / d * d) == type_one else (type_one + 0.5) / d


@dataclass
class MAEConfig:
    """The size of a masked autoencoder.

    Raises:
        ValueError: if the sizes do not fit together.
    """

    size: str | None = "vit_base"
    width: int | None = None
    depth: int | None = None
    heads: int | None = None
    patch_size: int = 16
    image_size: int = 224
    in_channels: int = 3
    mask_ratio: float = 0.75
    decoder_width: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16
    ffn: ViTFFNConfig = field(default_factory=ViTFFNConfig)
    init: Literal["timm", "xavier"] = "timm"

    def __post_init__(self) -> None:
        self._fill_in_size()
        for name in ("patch_size", "image_size", "decoder_width", "decoder_depth", "decoder_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}: it has to be at least 1")
        for name in ("depth", "decoder_depth"):
            if getattr(self, name) > MAX_DEPTH:
                raise ValueError(f"model.{name} is {getattr(self, name)}: it has to be at most {MAX_DEPTH}")
        if self.in_channels not in (1, 3):
            raise ValueError(f"model.in_channels is {self.in_channels}: it has to be 1 (grey) or 3 (colour)")
        if self.init not in ("timm", "xavier"):
            raise ValueError(f"model.init {self.init!r} is unknown: choose one of timm, xavier")
        if not 0 <= self.mask_ratio <= 1:
            raise ValueError(f"model.mask_ratio is {self.mask_ratio}: it has to lie between 0 and 1")
        halves = ((self.d, self.heads or 1, ""), (self.decoder_width, self.decoder_heads, "decoder_"))
        for width, heads, prefix in halves:
            if width % 4 or width % heads:
                raise ValueError(
                    f"model.{prefix}width {width} has to be a multiple of model.{prefix}heads {heads}, "
                    "and of 4 for the position table"
                )
        if self.image_size % self.patch_size:
            below = self.image_size // self.patch_size * self.patch_size
            nearest = f"{below} or {below + self.patch_size}" if below else str(self.patch_size)
            raise ValueError(
                f"model.image_size {self.image_size} is no multiple of model.patch_size {self.patch_size}: "
                f"the nearest sizes are {nearest}"
            )
        if not 1 <= self.n_visible < self.n_patches:
            raise ValueError(
                f"model.mask_ratio {self.mask_ratio} of {self.n_patches} patches leaves {self.n_visible} visible: "
                "at least one has to be visible and one masked"
            )

    def _fill_in_size(self) -> None:
        if self.size is not None and self.size not in SIZES:
            raise ValueError(f"model.size {self.size!r} is unknown: choose one of {', '.join(SIZES)}, or null")
        for name, default in zip(
            ("width", "depth", "heads"), SIZES[self.size] if self.size else (None,) * 3, strict=True
        ):
            value = default if getattr(self, name) is None else getattr(self, name)
            if self.size is not None and value != default:
                raise ValueError(
                    f"model.size {self.size} means model.{name} {default}, and {value} is set: set one of them to null"
                )
            if value is None or value < 1:
                raise ValueError(f"model.{name} is {value}: set it to at least 1, or choose model.size")
            setattr(self, name, value)

    @property
    def d(self) -> int:
        """The encoder's width."""
        assert self.width is not None
        return self.width

    @property
    def n_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def n_visible(self) -> int:
        return int(self.n_patches * (1 - self.mask_ratio) + 1e-6)  # 1 - 0.8 is a little less than 0.2

    @property
    def patch_values(self) -> int:
        return self.patch_size**2 * self.in_channels

    @property
    def hidden(self) -> int:
        """Hidden width of the encoder's feed-forward layers."""
        return self.ffn.width(self.d)

    @property
    def decoder_hidden(self) -> int:
        """The same in the decoder."""
        if self.ffn.hidden_features is None:
            return self.ffn.width(self.decoder_width)
        return max(1, round(self.ffn.hidden_features * self.decoder_width / self.d))


def vit_arguments(config: MAEConfig) -> dict[str, Any]:
    """Return what makes timm's VisionTransformer this encoder, apart from `mlp_layer`: plain data."""
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.in_channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": config.ffn.timm_ratio(config.d, config.hidden),
        "num_classes": 0,
        "global_pool": "token",
    }


class Decoder(nn.Module):
    """A narrower transformer that fills in what is masked."""

    def __init__(self, config: MAEConfig) -> None:
        super().__init__()
        d = config.decoder_width
        self.embed = nn.Linear(config.d, d)
        self.mask_token = nn.Parameter(torch.empty(1, 1, d))
        self.blocks = nn.ModuleList(
            Block(
                dim=d,
                num_heads=config.decoder_heads,
                mlp_ratio=config.ffn.timm_ratio(d, config.decoder_hidden),
                qkv_bias=True,
                norm_layer=LayerNorm,
                mlp_layer=config.ffn.timm_layer(),
            )
            for _ in range(config.decoder_depth)
        )
        self.norm = LayerNorm(d)
        self.head = nn.Linear(d, config.patch_values)
        self.register_buffer("positions", torch.empty(1, config.n_patches + 1, d))
        self.positions: Tensor

    def forward(self, x_BTD: Tensor, visible_BK: Tensor) -> Tensor:
        """Return the predicted patches, visible ones included, (B, N, V)."""
        x = self.embed(x_BTD)
        patches = self.mask_token.to(x.dtype).expand(len(x), self.positions.shape[1] - 1, -1)
        patches = patches.scatter(1, visible_BK[:, :, None].expand(-1, -1, x.shape[-1]), x[:, 1:])
        x = torch.cat((x[:, :1], patches), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))[:, 1:]


class MaskedAutoencoder(nn.Module):
    """Encoder over the visible patches, decoder over all.

    Initialisation, all in `reset_parameters`:

    | parameters                    | init: timm                             | init: xavier, as the public MAE      |
    |-------------------------------|----------------------------------------|--------------------------------------|
    | linear layers, gates u and v  | N(0, 0.02^2) truncated at +-2          | uniform, Xavier                      |
    | their biases                  | 0                                      | 0                                    |
    | gates, ffn.gate_init_std set  | N(0, gate_init_std^2)                  | the same                             |
    | coefficients alpha, beta      | ffn.coefficient_init                   | the same                             |
    | patch embedding               | torch's own for a convolution          | uniform, Xavier, as a linear layer   |
    | norms                         | scale 1, shift 0                       | the same                             |
    | class token, mask token       | N(0, 0.02^2)                           | the same                             |
    | position tables               | fixed, sin-cos                         | the same                             |
    """

    def __init__(self, config: MAEConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = VisionTransformer(
            **vit_arguments(config), pos_embed="none", weight_init="skip", mlp_layer=config.ffn.timm_layer()
        )
        self.register_buffer("positions", torch.empty(1, config.n_patches + 1, config.d))
        self.positions: Tensor
        self.decoder = Decoder(config)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw fresh weights, as the table above says."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                self._reset_projection(module)
            elif isinstance(module, LayerNorm):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, moa.FeedForward):
                self._reset_mixing(module)
        nn.init.normal_(self._class_token, std=INIT_STD)
        nn.init.normal_(self.decoder.mask_token, std=INIT_STD)
        side = self.config.image_size // self.config.patch_size
        for module in (self, self.decoder):
            if module.positions.is_meta:  # the table itself takes memory
                continue
            module.positions.copy_(sincos_table(module.positions.shape[-1], side))

    def _reset_projection(self, layer: nn.Linear | nn.Conv2d) -> None:
        if self.config.init == "xavier":
            nn.init.xavier_uniform_(layer.weight.flatten(1))
        elif isinstance(layer, nn.Conv2d):
            layer.reset_parameters()
            return
        else:
            nn.init.trunc_normal_(layer.weight, std=INIT_STD)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)

    def _reset_mixing(self, layer: moa.FeedForward) -> None:
        for coefficient in layer.coefficients().values():
            nn.init.constant_(coefficient, self.config.ffn.coefficient_init)
        for name in ("u", "v"):
            if hasattr(layer, name) and self.config.ffn.gate_init_std is not None:
                nn.init.normal_(getattr(layer, name).weight, std=self.config.ffn.gate_init_std)

    @property
    def _class_token(self) -> Tensor:
        assert self.encoder.cls_token is not None
        return self.encoder.cls_token

    def encode(self, images_BCHW: Tensor, visible_BK: Tensor | None = None) -> Tensor:
        """Return the encoder's tokens after its last norm, class token first.

        Args:
            images_BCHW: normalised pictures.
            visible_BK: indices of the patches to look at; None: all of them.

        Returns:
            (B, T, D), patches in the order of `visible_BK`.
        """
        encoder = self.encoder
        x = encoder.patch_embed(images_BCHW.to(self._class_token.dtype)) + self.positions[:, 1:]
        if visible_BK is not None:
            x = take_patches(x, visible_BK)
        first = (self._class_token + self.positions[:, :1]).expand(len(x), -1, -1)
        x = torch.cat((first.to(x.dtype), x), dim=1)
        for block in encoder.blocks:
            x = block(x)
        return encoder.norm(x)

    def forward(self, images_BCHW: Tensor, noise_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Mask and reconstruct.

        Args:
            images_BCHW: normalised pictures.
            noise_BN: what decides the mask, see `random_masking`.

        Returns:
            (predictions, mask): the predicted patches (B, N, V), in units of the targets; 1 where masked (B, N).
        """
        visible_BK, mask_BN = random_masking(noise_BN, self.config.n_visible)
        return self.decoder(self.encode(images_BCHW, visible_BK), visible_BK), mask_BN

    def features(self, images_BCHW: Tensor, pool: KnnPool) -> Tensor:
        """Return one vector for each unmasked picture.

        Args:
            images_BCHW: normalised pictures.
            pool: `token`, the class token (B, D); `avg`, the mean over the patches (B, D); `patches`, all of them side
                by side (B, N * D).
        """
        x = self.encode(images_BCHW)
        if pool == "patches":
            return x[:, 1:].flatten(1)
        return x[:, 0] if pool == "token" else x[:, 1:].mean(dim=1)


def num_parameters(config: MAEConfig) -> dict[str, int]:
    """Return the number of trained parameters by role, in closed form."""
    d, e, v = config.d, config.decoder_width, config.patch_values
    counts = {"encoder patches": v * d + d, "encoder class": d}
    counts |= _block_counts("encoder", config, d, config.depth or 0, config.hidden)
    counts |= {"decoder embed": d * e + e, "decoder mask": e}
    counts |= _block_counts("decoder", config, e, config.decoder_depth, config.decoder_hidden)
    counts["decoder head"] = e * v + v
    return counts


def _block_counts(side: str, config: MAEConfig, d: int, depth: int, hidden: int) -> dict[str, int]:
    ffn = config.ffn
    projections = moa.num_projection_parameters(ffn.kind, d, hidden, bias=ffn.bias)
    in_all = moa.num_parameters(
        ffn.kind, d, hidden, activations=ffn.activations, gate_bias=ffn.gate_bias, bias=ffn.bias
    )
    return {
        f"{side} attention": depth * (4 * d * d + 4 * d),
        f"{side} ffn": depth * projections,
        f"{side} gates": depth * (in_all - projections),
        f"{side} norm": depth * 4 * d + 2 * d,
    }


def flops_per_image(config: MAEConfig) -> int:
    """Return the floating-point operations of one picture in training: forward and, twice as much, backward.

    Matrix products only, 2 per multiply-add, over the tokens that each half really sees. Every patch is embedded,
    visible or not.
    """
    d, e, v = config.d, config.decoder_width, config.patch_values
    n, seen = config.n_patches, config.n_visible + 1
    encoder = 2 * n * v * d + _block_flops(config, d, config.depth or 0, config.hidden, seen)
    decoder = _block_flops(config, e, config.decoder_depth, config.decoder_hidden, n + 1)
    return 3 * (encoder + 2 * seen * d * e + decoder + 2 * (n + 1) * e * v)


def encoder_flops(config: MAEConfig) -> int:
    """Return the floating-point operations of the encoder on one unmasked picture, forward."""
    d, n = config.d, config.n_patches
    return 2 * n * config.patch_values * d + _block_flops(config, d, config.depth or 0, config.hidden, n + 1)


def _block_flops(config: MAEConfig, d: int, depth: int, hidden: int, tokens: int) -> int:
    ffn = config.ffn
    layer = moa.flops_per_token(ffn.kind, d, hidden, activations=ffn.activations, gate_bias=ffn.gate_bias)
    return depth * tokens * (2 * 4 * d * d + 2 * 2 * tokens * d + layer)
