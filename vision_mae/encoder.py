"""The trained encoder as a plain timm model, for fine-tuning and for use elsewhere."""

from typing import Any

import torch
from timm.layers import Mlp, SwiGLU
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vision_mae.model import MAEConfig, MaskedAutoencoder, ViTFFNConfig, vit_arguments

# The names that `timm.create_model` knows, by width; every size is also given as arguments.
ARCHITECTURES = {
    192: "vit_tiny_patch16_224",
    384: "vit_small_patch16_224",
    768: "vit_base_patch16_224",
    1024: "vit_large_patch16_224",
    1280: "vit_huge_patch14_224",
}
# Kinds that timm has as layers of its own, and what it calls their parameters.
TIMM_LAYERS: dict[str, type[nn.Module]] = {"gelu": Mlp, "swiglu": SwiGLU}
TIMM_NAMES = {
    "gelu": {"w1": "fc1", "w2": "fc2"},
    "swiglu": {"w1": "fc1_g", "w2": "fc1_x", "w3": "fc2"},
}


def build_encoder(config: MAEConfig, **changes: Any) -> VisionTransformer:
    """Return a fresh timm encoder with the feed-forward layers of `moa`.

    Args:
        changes: arguments of timm's VisionTransformer other than those that make it this encoder, such as num_classes.
    """
    return VisionTransformer(**vit_arguments(config) | changes, mlp_layer=config.ffn.timm_layer())


def encoder_weights(model: MaskedAutoencoder) -> dict[str, Tensor]:
    """Return the state dict of `build_encoder` that holds what the autoencoder's encoder has learned.

    The fixed position table becomes timm's `pos_embed`.
    """
    return {"pos_embed": model.positions.clone(), **model.encoder.state_dict()}


def load_pretrained(encoder: VisionTransformer, weights: dict[str, Tensor]) -> None:
    """Copy weights into an encoder that may have a new head, and for average pooling a new last norm.

    Raises:
        ValueError: any other difference.
    """
    missing, unexpected = encoder.load_state_dict(weights, strict=False)
    wrong = [name for name in missing if not name.startswith(("head.", "fc_norm."))]
    wrong += [name for name in unexpected if not name.startswith("norm.")]
    if wrong:
        raise ValueError(f"the encoder's weights do not fit at {', '.join(wrong[:3])}")


def timm_layer(ffn: ViTFFNConfig) -> type[nn.Module]:
    """Return the class for `mlp_layer` whose parameters `timm_names` speaks of: timm's own where it has the kind."""
    return TIMM_LAYERS.get(ffn.kind) or ffn.timm_layer()


def timm_arguments(config: MAEConfig) -> dict[str, Any]:
    """Return the arguments of `timm.create_model` for the exported encoder, apart from `mlp_layer`: plain data."""
    arguments = vit_arguments(config)
    if config.ffn.kind == "swiglu":
        # timm's SwiGLU has the width it is told, where `moa.timm_mlp` takes two thirds of it, and no SiLU by itself.
        arguments |= {"mlp_ratio": (config.hidden + 0.5) / config.d, "act_layer": "silu"}
    return arguments


def timm_names(weights: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Rename the parameters of the kinds that timm has itself; biases that it has and we have not become zero."""
    names = TIMM_NAMES.get(kind)
    if names is None:
        return dict(weights)
    renamed = {}
    for name, value in weights.items():
        start, mlp, end = name.partition(".mlp.")
        if not mlp:
            renamed[name] = value
            continue
        layer, _, parameter = end.partition(".")
        renamed[f"{start}.mlp.{names[layer]}.{parameter}"] = value
        if parameter == "weight" and f"{start}.mlp.{layer}.bias" not in weights:
            renamed[f"{start}.mlp.{names[layer]}.bias"] = torch.zeros(len(value), dtype=value.dtype)
    return renamed
