"""A trained encoder as a classifier: the linear probe and fine-tuning, as runs of the suite's own machinery."""

import math
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from pretrain.errors import UserError
from pretrain.module import PretrainModule
from pretrain.optim import Rule
from pretrain.parallelize import ActivationCheckpointing
from pretrain.reload import load_module
from pretrain.schedules import ScheduleConfig
from vision_mae.encoder import build_encoder, encoder_weights, load_pretrained
from vision_mae.model import Pool, encoder_flops
from vision_mae.module import MaskedAutoencoderModule, ViTOptimizerConfig, check_same_pictures

NO_LABEL = -100  # the target of a picture that only fills up a batch
HEAD_STD = {"linear": 0.01, "finetune": 2e-5}


class LinearProbe(nn.Module):
    """A frozen encoder, always in evaluation mode, batch normalisation without scale and shift, and a linear layer."""

    def __init__(self, encoder: VisionTransformer, n_classes: int) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(False)
        self.norm = nn.BatchNorm1d(encoder.num_features, affine=False, eps=1e-6)
        self.head = nn.Linear(encoder.num_features, n_classes)

    def train(self, mode: bool = True) -> "LinearProbe":
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> logits (B, classes)."""
        with torch.no_grad():
            features = self.encoder(images_BCHW)
        return self.head(self.norm(features))


class ClassifierModule(PretrainModule):
    """Train a classifier on a pre-trained encoder.

    Args:
        checkpoint: folder of a pre-training run, or one of its checkpoints.
        optimizer: see `pretrain.optim`.
        schedule: see `pretrain.schedules`.
        task: linear (the encoder is frozen) or finetune.
        pool: what is classified: the class token, or avg, the mean over the patches.
        layer_decay: learning rate of a layer as a multiple of that of the layer above it; finetune only.
        drop_path: probability that a sample skips the last block, less in lower ones; finetune only.
        mixup: parameter of the beta distribution of mixup; 0: none.
        cutmix: the same of cutmix.
        label_smoothing: share of the target that is spread over all classes.
        compile_blocks: compile every block with torch.compile; null: on a GPU.
        activation_checkpointing: what of a block is computed anew in the backward, to hold less memory: none, full
            (everything), or selective (all but the results of matrix products and attention).
    """

    unit = "images"
    block_class = Block

    def __init__(
        self,
        checkpoint: str,
        optimizer: ViTOptimizerConfig,
        schedule: ScheduleConfig,
        task: Literal["linear", "finetune"] = "linear",
        pool: Pool = "avg",
        layer_decay: float = 1.0,
        drop_path: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        label_smoothing: float = 0.0,
        compile_blocks: bool | None = None,
        activation_checkpointing: ActivationCheckpointing = "none",
    ) -> None:
        super().__init__(optimizer, schedule, compile_blocks, activation_checkpointing)
        if task == "linear" and (layer_decay != 1 or drop_path):
            raise UserError(
                "model.layer_decay and model.drop_path have no meaning for a frozen encoder: leave them out"
            )
        for name, value, limit in (("drop_path", drop_path, 1), ("label_smoothing", label_smoothing, 1)):
            if not 0 <= value < limit:
                raise UserError(f"model.{name} is {value}: it has to lie in [0, {limit})")
        if not (0 <= mixup < math.inf and 0 <= cutmix < math.inf):
            raise UserError("model.mixup and model.cutmix have to be 0 or more")
        if not 0 < layer_decay <= 1:
            raise UserError(f"model.layer_decay is {layer_decay}: it has to lie in (0, 1]")
        self.checkpoint, self.task, self.pool = checkpoint, task, pool
        self.layer_decay, self.drop_path, self.label_smoothing = layer_decay, drop_path, label_smoothing
        self.mix_alphas = (mixup, cutmix)
        self.config = load_module(MaskedAutoencoderModule, checkpoint, weights=False)[0].config
        self.n_classes = 0
        self.mixup: Mixup | None = None

    def check_data(self, data: Any) -> None:
        if not data.classes:
            raise UserError(f"{data.source} has no labels: {self.task} needs class folders or a label column")
        if data.val_rows is not None and data.val_rows.labels is None:
            raise UserError(f"{data.val_rows.source} has no labels: {self.task} needs class folders or a label column")
        if any(self.mix_alphas) and data.micro_batch_size % 2:
            raise UserError(f"data.micro_batch_size is {data.micro_batch_size}: mixup and cutmix need an even one")
        check_same_pictures(self.config, data)
        if self.task == "linear" and data.micro_batch_size < 2:
            raise UserError("data.micro_batch_size is 1: the batch norm of a linear probe needs at least 2")
        self.n_classes = len(data.classes)

    def setup(self, stage: str) -> None:
        self.check_data(self.trainer.datamodule)  # type: ignore[attr-defined]
        super().setup(stage)
        if any(self.mix_alphas):
            mixup, cutmix = self.mix_alphas
            self.mixup = Mixup(mixup, cutmix, label_smoothing=self.label_smoothing, num_classes=self.n_classes)
        top = {"accuracy": 1, "accuracy_top5": 5} if self.n_classes > 5 else {"accuracy": 1}
        self.accuracies = nn.ModuleDict(
            {name: MulticlassAccuracy(self.n_classes, top_k=k, average="micro") for name, k in top.items()}
        )

    def build_model(self) -> nn.Module:
        if self.task == "linear":
            # The last norm stays where pre-training had it, before the pooling.
            encoder = build_encoder(self.config, global_pool=self.pool, fc_norm=False)
            model: Any = LinearProbe(encoder, self.n_classes)
        else:
            model = build_encoder(
                self.config, num_classes=self.n_classes, global_pool=self.pool, drop_path_rate=self.drop_path
            )
        nn.init.trunc_normal_(model.head.weight, std=HEAD_STD[self.task])
        nn.init.zeros_(model.head.bias)
        return model

    def initial_model(self) -> nn.Module:
        model: Any = super().initial_model()
        if self.init_from is None:
            pretrained, _ = load_module(MaskedAutoencoderModule, self.checkpoint)
            load_pretrained(
                model.encoder if self.task == "linear" else model,
                encoder_weights(pretrained.model),  # type: ignore[arg-type]
            )
        return model

    def loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Cross-entropy summed over the pictures, and their number."""
        assert self.model is not None
        images, labels, present = batch["images"], batch["label"], batch["present"]
        if self.training and self.mixup is not None:
            # It draws from NumPy: from a seed of torch's, so that a resumed run draws the same.
            np.random.seed(int(torch.randint(2**31, ())))
            images, targets = self.mixup(images.clone(), labels)
            return F.cross_entropy(self.model(images).float(), targets, reduction="sum"), present.sum()
        return self._cross_entropy(self.model(images).float(), batch)

    def validation_loss(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert self.model is not None
        logits, present = self.model(batch["images"]).float(), batch["present"]
        if not self.trainer.sanity_checking and present.any():  # torchmetrics takes no empty batch, of padding alone
            for metric in self._metrics().values():
                metric.update(logits[present], batch["label"][present])
        return self._cross_entropy(logits, batch)

    def _cross_entropy(self, logits: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        present = batch["present"]
        smoothing = self.label_smoothing if self.training else 0.0
        # Not `logits[present]`: the host would wait for the device to know how many there are.
        targets = batch["label"].masked_fill(~present, NO_LABEL)
        loss = F.cross_entropy(logits, targets, ignore_index=NO_LABEL, reduction="sum", label_smoothing=smoothing)
        return loss, present.sum()

    def validation_metrics(self, loss: float) -> dict[str, float]:
        found = {f"val/{name}": float(metric.compute()) for name, metric in self._metrics().items()}
        for metric in self._metrics().values():
            metric.reset()
        return found

    def _metrics(self) -> dict[str, Any]:
        return dict(self.accuracies.items())

    def rules(self) -> list[Rule]:
        if self.task == "linear":
            return [Rule("head", r"^head\.", decay=False), Rule("frozen", r"^encoder\.")]
        return layer_rules(self.config.depth or 0, self.layer_decay)

    def parameter_counts(self) -> dict[str, Any]:
        sizes = {name: parameter.numel() for name, parameter in self.build_meta_model().named_parameters()}
        head = sum(size for name, size in sizes.items() if name.startswith("head."))
        total = sum(sizes.values())
        return {"total": total, "activated": total, "roles": {"encoder": total - head, "head": head}}

    def least_sizes(self, data: Any) -> tuple[int, int]:
        return 0, self.config.n_patches * self.config.patch_values  # the weights are there already, in the checkpoint

    def flops_per_unit(self) -> float:
        return encoder_flops(self.config) * (1 if self.task == "linear" else 3)


def layer_rules(depth: int, layer_decay: float) -> list[Rule]:
    """Groups of a VisionTransformer by layer, from the head down: layer l has the rate layer_decay^(depth + 1 - l).

    Layer 0 is the embedding with its tokens and table, layer l is block l - 1, the last one is norm and head (Clark et
    al. 2020; BEiT and MAE). Biases, norms, tokens and the position table do not decay.
    """

    def is_exempt(name: str, parameter: Tensor) -> bool:
        return parameter.ndim < 2 or name in ("cls_token", "pos_embed")

    rules = []
    for layer in range(depth + 1, -1, -1):
        pattern = rf"^blocks\.{layer - 1}\."
        if layer == 0:
            pattern = r"^(cls_token$|pos_embed$|patch_embed\.)"
        elif layer == depth + 1:
            pattern = r"^(norm|fc_norm|head)\."
        multiplier = layer_decay ** (depth + 1 - layer)
        rules.append(Rule(f"layer {layer}", pattern, lambda *named: not is_exempt(*named), lr_multiplier=multiplier))
        rules.append(Rule(f"layer {layer} no decay", pattern, is_exempt, decay=False, lr_multiplier=multiplier))
    return rules
