"""The language model as a LightningModule: loss, metrics and rules; everything else is `pretrain`'s."""

import math
from typing import Any

import lightning as L
import torch
from torch import nn

from lm.callbacks import TextSamples
from lm.data.packing import IGNORED
from lm.expert_load import ExpertLoad
from lm.foreign import PREFIX, read_foreign
from lm.head import Head
from lm.model import Block, Llama, LlamaConfig, flops_per_token, num_parameters
from lm.moe import MoE, MoEConfig, Routing
from lm.rules import optimizer_rules
from moa import FFNConfig
from pretrain.errors import UserError
from pretrain.module import PretrainModule
from pretrain.optim import OptimizerConfig, Rule
from pretrain.parallelize import ActivationCheckpointing
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
        activation_checkpointing: what of a block is computed anew in the backward, to hold less memory: none, full
            (everything), or selective (all but the results of matrix products and attention).
        tokens_per_parameter: training tokens per activated parameter, a limit on the run.
        moe: the mixture of experts in place of every feed-forward layer; null: none.
    """

    unit = "tokens"
    block_class = Block
    sharded_classes = (Head,)
    foreign_help = " hf:DIR: a Llama in the format of Hugging Face transformers."
    may_change_on_resume = (*PretrainModule.may_change_on_resume, "tokens_per_parameter", "ffn.implementation")
    settings_of_training = (
        *PretrainModule.settings_of_training,
        "tokens_per_parameter",
        "init_std",
        "ffn.gate_init_std",
        "ffn.coefficient_init",
        "ffn.implementation",
        "moe.balance_loss",
        "moe.z_loss",
        "moe.bias_update_rate",
        "moe.dispatch",
    )

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
        activation_checkpointing: ActivationCheckpointing = "none",
        tokens_per_parameter: float | None = None,
        moe: MoEConfig | None = None,
    ) -> None:
        super().__init__(optimizer, schedule, compile_blocks, activation_checkpointing)
        self.config = LlamaConfig(vocab_size, d_model, n_layers, n_heads, ffn, rope_base, norm_eps, init_std, moe)
        self.tokens_per_parameter = tokens_per_parameter
        self._tokens_per_byte: float | None = None
        self._step_load: torch.Tensor | None = None  # of the experts, in the micro-batches of the step at hand

    @classmethod
    def cli_links(cls) -> dict[str, str]:
        return {"tokens_per_parameter": "Training tokens per activated parameter: sets the number of steps."}

    def build_model(self) -> nn.Module:
        return Llama(self.config)

    def read_foreign(self, source: str) -> dict[str, torch.Tensor] | None:
        if not source.startswith(PREFIX):
            return None
        return read_foreign(source.removeprefix(PREFIX), self.config, self.settings_of_training)

    def loss(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        loss_sum, _ = self.loss_and_routing(batch)
        return loss_sum, (batch["targets"] != IGNORED).sum()

    def loss_and_routing(self, batch: dict[str, Any]) -> tuple[torch.Tensor, Routing | None]:
        """Return the sum of the cross-entropy, and what the routers did; None without experts."""
        assert self.model is not None
        return self.model(
            batch["inputs"],
            batch.get("segments"),
            targets_BL=batch["targets"],
            ignore_index=IGNORED,
            with_routing=True,
        )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        loss_sum, routing = self.loss_and_routing(batch)
        output = self.training_output(loss_sum, batch)
        if routing is not None:
            output["loss"] = output["loss"] + self.router_loss(routing)
            output["routing"] = routing = routing.detached()
            self._step_load = routing.load if self._step_load is None else self._step_load + routing.load
        return output

    def router_loss(self, routing: Routing) -> torch.Tensor:
        """Return what is added to the mean cross-entropy in training: balance and z-loss, summed over the layers.

        A step takes the mean of it over micro-batches and ranks, which are equally large. For the z-loss, a mean over
        tokens, this is the value of the whole step. The balance loss multiplies two means, so it is that of each
        micro-batch by itself: the one part of a gradient that depends on how a step is cut.
        """
        moe = self.config.moe
        assert moe is not None
        return moe.router_loss(routing)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the biases of loss-free balancing, once a step, by the load of all its micro-batches and ranks."""
        load, self._step_load = self._step_load, None
        if self.config.moe is None or not self.config.moe.bias_update_rate:
            return
        assert self.model is not None
        load = self.trainer.strategy.reduce(load, reduce_op="sum")
        layers = [module for module in self.model.modules() if isinstance(module, MoE)]
        for layer, load_E in zip(layers, load, strict=True):
            layer.update_balance_bias(load_E, self.skip_step)

    def rules(self) -> list[Rule]:
        return optimizer_rules(self.optimizer_config)

    def callbacks(self) -> list[L.Callback]:
        return [TextSamples(), *([ExpertLoad()] if self.config.moe is not None else [])]

    def parameter_counts(self) -> dict[str, Any]:
        roles, activated = num_parameters(self.config), num_parameters(self.config, activated=True)
        return {
            "total": sum(roles.values()),
            "activated": sum(activated.values()),
            "roles": roles,
            "activated_roles": activated,
        }

    def least_sizes(self, data: Any) -> tuple[int, int]:
        enters_blocks = self.config.n_layers * data.sequence_length * self.config.d_model
        return self.parameter_counts()["total"], enters_blocks

    def flops_per_unit(self) -> float:
        assert self.plan is not None
        return flops_per_token(self.config, self.plan.units_per_sample)

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
        self._tokens_per_byte = data.val_tokens_per_byte
        super().setup(stage)

    def validation_metrics(self, loss: float) -> dict[str, float]:
        """Perplexity, and bits per byte: the code length of the text over its UTF-8 bytes."""
        metrics = {"val/perplexity": math.exp(min(loss, 700.0))}
        if self._tokens_per_byte is not None:
            metrics["val/bpb"] = loss / math.log(2) * self._tokens_per_byte
        return metrics
