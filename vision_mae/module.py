"""The masked autoencoder as a LightningModule: loss, metrics and rules; everything else is `pretrain`'s."""

from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from timm.models.vision_transformer import Block
from torch import nn

from pretrain.errors import UserError
from pretrain.module import PretrainModule
from pretrain.optim import Decay, OptimizerConfig, Rule, decay_rules
from pretrain.parallelize import ActivationCheckpointing
from pretrain.schedules import ScheduleConfig
from vision_mae.callbacks import KnnProbe, Reconstructions
from vision_mae.model import MAEConfig, MaskedAutoencoder, ViTFFNConfig, flops_per_image, num_parameters
from vision_mae.patches import masked_mean_squared_error, patch_targets
from vision_mae.probes import ProbeConfig


@dataclass
class ViTOptimizerConfig(OptimizerConfig):
    """The optimizer of a run, with the defaults of masked autoencoders. Give exactly one of `lr` and `base_lr`.

    Raises:
        ValueError: an unknown name, a value out of range, or a setting that the named optimizer does not use.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay of the running means of the gradient and of its square."""

    weight_decay: float = 0.05
    """Decoupled weight decay: each step takes lr * weight_decay off a parameter."""

    decay: Decay = "matrices"
    """`matrices`: no decay on biases, norms, coefficients, class and mask token. `all`: every parameter decays."""


DEFAULT_PROBE = ProbeConfig()
BLOCK_MATRICES = r"\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.(w[123]|fc[12]))\.weight$"


class MaskedAutoencoderModule(PretrainModule):
    """Pre-train a masked autoencoder.

    Args:
        ffn: the feed-forward layer of every block, of encoder and decoder.
        optimizer: see `pretrain.optim`.
        schedule: see `pretrain.schedules`.
        size: vit_tiny, vit_small, vit_base, vit_large or vit_huge; null: width, depth and heads say it.
        width: width of the encoder; null: the size's.
        depth: its number of blocks; null: the size's.
        heads: its attention heads; null: the size's.
        patch_size: side of a patch, in pixels.
        image_size: side of a picture, in pixels, a multiple of patch_size.
        in_channels: 3 for colour, 1 for grey.
        mask_ratio: share of the patches that the encoder does not see.
        norm_pixel_loss: compare with each patch normalised by its own mean and variance.
        decoder_width: width of the decoder.
        decoder_depth: its number of blocks.
        decoder_heads: its attention heads.
        init: how linear layers start: timm (truncated normal, 0.02) or xavier, as the public MAE.
        probe: the nearest-neighbour probe during training.
        compile_blocks: compile every block with torch.compile; null: on a GPU.
        activation_checkpointing: what of a block is computed anew in the backward, to hold less memory: none, full
            (everything), or selective (all but the results of matrix products and attention).
    """

    unit = "images"
    block_class = Block
    called_methods = ("features",)
    may_change_on_resume = (*PretrainModule.may_change_on_resume, "probe", "ffn.implementation")
    settings_of_training = (
        *PretrainModule.settings_of_training,
        "init",
        "probe",
        "mask_ratio",
        "norm_pixel_loss",
        "ffn.gate_init_std",
        "ffn.coefficient_init",
        "ffn.implementation",
    )

    def __init__(
        self,
        ffn: ViTFFNConfig,
        optimizer: ViTOptimizerConfig,
        schedule: ScheduleConfig,
        size: str | None = "vit_base",
        width: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        patch_size: int = 16,
        image_size: int = 224,
        in_channels: int = 3,
        mask_ratio: float = 0.75,
        norm_pixel_loss: bool = True,
        decoder_width: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        init: Literal["timm", "xavier"] = "timm",
        probe: ProbeConfig = DEFAULT_PROBE,
        compile_blocks: bool | None = None,
        activation_checkpointing: ActivationCheckpointing = "none",
    ) -> None:
        super().__init__(optimizer, schedule, compile_blocks, activation_checkpointing)
        self.config = MAEConfig(
            size=size,
            width=width,
            depth=depth,
            heads=heads,
            patch_size=patch_size,
            image_size=image_size,
            in_channels=in_channels,
            mask_ratio=mask_ratio,
            decoder_width=decoder_width,
            decoder_depth=decoder_depth,
            decoder_heads=decoder_heads,
            ffn=ffn,
            init=init,
        )
        self.norm_pixel_loss = norm_pixel_loss
        self.probe_config = probe

    @classmethod
    def data_links(cls) -> dict[str, str]:
        return {name: name for name in ("image_size", "patch_size", "in_channels")}

    def build_model(self) -> nn.Module:
        return MaskedAutoencoder(self.config)

    def loss(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum over the pictures of the mean squared error on their masked patches, and the number of pictures."""
        assert self.model is not None
        predictions, mask = self.model(batch["images"], batch["noise"])
        return self._sum_over_pictures(predictions, mask, batch)

    def _sum_over_pictures(
        self, predictions: torch.Tensor, mask: torch.Tensor, batch: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = patch_targets(batch["images"], self.config.patch_size, self.norm_pixel_loss)
        present = batch["present"].to(torch.float32)
        return (masked_mean_squared_error(predictions, targets, mask) * present).sum(), present.sum()

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._mean_sums = torch.zeros_like(self._val_sums)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Besides the model's loss, that of predicting each patch's mean, on the same patches."""
        assert self.model is not None
        predictions, mask = self.model(batch["images"], batch["noise"])
        patches = patch_targets(batch["images"], self.config.patch_size, normalise=False)
        means = torch.zeros_like(patches) if self.norm_pixel_loss else patches.mean(dim=-1, keepdim=True)
        self._val_sums += torch.stack(self._sum_over_pictures(predictions, mask, batch)).to(self._val_sums.dtype)
        self._mean_sums += torch.stack(self._sum_over_pictures(means, mask, batch)).to(self._val_sums.dtype)

    def validation_metrics(self, loss: float) -> dict[str, float]:
        """`val/relative_loss`: the loss over that of predicting each patch's mean.

        With normalised pixels of V values a patch the latter is (V - 1) / V, or 0 for a patch of V equal values.
        """
        sums = self.trainer.strategy.reduce(self._mean_sums, reduce_op="sum")
        baseline = float(sums[0] / sums[1])
        return {"val/relative_loss": loss / baseline if baseline else float("nan")}

    def rules(self) -> list[Rule]:
        rules = decay_rules([r"cls_token$", r"mask_token$"])
        if self.optimizer_config.name == "muon_adamw":  # as in a language model; timm's q, k and v are one matrix
            rules.insert(0, Rule("matrices", BLOCK_MATRICES, optimizer="muon"))
        return rules

    def callbacks(self) -> list[L.Callback]:
        return [Reconstructions(), KnnProbe(self.probe_config)]

    def parameter_counts(self) -> dict[str, Any]:
        roles = num_parameters(self.config)
        total = sum(roles.values())
        return {"total": total, "activated": total, "roles": roles}

    def least_sizes(self, data: Any) -> tuple[int, int]:
        config = self.config
        picture = config.n_patches * config.patch_values
        enters_encoder = config.n_visible * config.d * (config.depth or 0)
        enters_decoder = config.n_patches * config.decoder_width * config.decoder_depth
        return self.parameter_counts()["total"], picture + enters_encoder + enters_decoder

    def flops_per_unit(self) -> float:
        return flops_per_image(self.config)

    def check_data(self, data: Any) -> None:
        check_same_pictures(self.config, data)


def check_same_pictures(config: MAEConfig, data: Any) -> None:
    """Raise a UserError unless the data gives pictures of the model's size and channels."""
    for name in MaskedAutoencoderModule.data_links():
        if getattr(data, name) != getattr(config, name):
            raise UserError(
                f"data.{name} is {getattr(data, name)} and model.{name} {getattr(config, name)}: they have to be equal"
            )
