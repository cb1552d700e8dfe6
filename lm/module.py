"""The language model as a LightningModule: loss, metrics and rules; everything else is `pretrain`'s."""

import math
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from lm.callbacks import TextSamples
from lm.data.packing import IGNORED
from lm.model import Block, Llama, LlamaConfig, flops_per_token, num_parameters
from lm.rules import optimizer_rules
from moa import FFNConfig
from pretrain.errors import UserError
from pretrain.module import PretrainModule
from pretrain.optim import OptimizerConfig, Rule
from pretrain.schedules import ScheduleConfig


class LanguageModule(PretrainModule):
    """Pre-train a Llama on next-token prediction.

    Args:
        ffn: the feed-forward layer of every block.
        optimizer: the optimizer and its peak learning rate.
        schedule: the learning rate over the run.
        vocab_size: rows of embedding and head; at least the tokenizer's, often padded to a multiple of 64 or more.
        d_model: width of the residual stream.
        n_layers: number of blocks.
        n_heads: attention heads; d_model / n_heads is the head size.
        rope_base: base of the rotary angles.
        norm_eps: epsilon of every RMSNorm.
        init_std: standard deviation of the initial weights.
        compile_blocks: compile every block with torch.compile; null: on a GPU.
        tokens_per_parameter: training tokens per parameter, a limit on the run.
    """

    unit = "tokens"
    block_class = Block

    def __init__(
        self,
        ffn: FFNConfig,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        vocab_size: int = 50_304,
        d_model: int = 768,
        n_layers: int = 6,
        n_heads: int = 12,
        rope_base: float = 10_000.0,
        norm_eps: float = 1e-6,
        init_std: float = 0.02,
        compile_blocks: bool | None = None,
        tokens_per_parameter: float | None = None,
    ) -> None:
        super().__init__(optimizer, schedule, compile_blocks)
        self.config = LlamaConfig(vocab_size, d_model, n_layers, n_heads, ffn, rope_base, norm_eps, init_std)
        self.tokens_per_parameter = tokens_per_parameter
        self._sequence_length = 0
        self._tokens_per_byte: float | None = None

    @classmethod
    def cli_links(cls) -> dict[str, str]:
        return {"tokens_per_parameter": "Training tokens per activated parameter: sets the number of steps."}

    def build_model(self) -> nn.Module:
        return Llama(self.config)

    def loss(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.model is not None
        logits = self.model(batch["inputs"], batch.get("segments"))
        targets = batch["targets"]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, (targets != IGNORED).sum()

    def rules(self) -> list[Rule]:
        return optimizer_rules(self.optimizer_config)

    def callbacks(self) -> list[L.Callback]:
        return [TextSamples()]

    def parameter_counts(self) -> dict[str, Any]:
        roles = num_parameters(self.config)
        total = sum(roles.values())
        return {"total": total, "activated": total, "roles": roles}

    def flops_per_unit(self) -> float:
        return flops_per_token(self.config, self._sequence_length)

    def units_budget(self) -> dict[str, float]:
        if self.tokens_per_parameter is None:
            return {}
        return {"tokens_per_parameter": self.tokens_per_parameter * self.parameter_counts()["activated"]}

    def check_data(self, data: Any) -> None:
        n_vocab = data.tokenizer.n_vocab
        if n_vocab > self.config.vocab_size:
            raise UserError(
                f"model.vocab_size {self.config.vocab_size} is smaller than the tokenizer's {n_vocab} "
                f"({data.tokenizer.name}): set model.vocab_size to {n_vocab} or more"
            )

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        self.check_data(data)
        self._sequence_length = data.sequence_length
        self._tokens_per_byte = data.val_tokens_per_byte
        super().setup(stage)

    def validation_metrics(self, loss: float) -> dict[str, float]:
        """Perplexity, and bits per byte: the code length of the text over its UTF-8 bytes."""
        metrics = {"val/perplexity": math.exp(min(loss, 700.0))}
        if self._tokens_per_byte is not None:
            metrics["val/bpb"] = loss / math.log(2) * self._tokens_per_byte
        return metrics
