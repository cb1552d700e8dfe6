"""The LightningModule both domains derive from."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn

from pretrain.checkpoint import check_same_architecture, load_weights
from pretrain.metrics import check_finite, log_metrics
from pretrain.optim import OptimizerConfig, Rule, build_optimizer, format_table
from pretrain.order import global_seed, noise_seed
from pretrain.parallelize import ActivationCheckpointing, check_activation_checkpointing, parallelize
from pretrain.plan import Plan, apply_plan, make_plan, recount
from pretrain.schedules import ScheduleConfig, build_schedule
from pretrain.strategy import ShardedStrategy


class PretrainModule(L.LightningModule):
    """Turns a model and its loss into a run: optimizer, schedule, loss accounting, weights in and out.

    A domain provides `build_model`, `loss`, `rules`, `flops_per_unit` and, if it has more to say about a validation
    loss, `validation_metrics`.

    The loss of an optimizer step is the mean over all its targets, on all ranks and in all micro-batches. `loss`
    returns a sum, divided by the number of targets in the whole step, which every batch carries as `step_targets`.
    """

    #: what throughput counts: "tokens" or "images"
    unit = "samples"
    #: the submodules that are compiled, and recomputed, one by one
    block_class: type[nn.Module] | None = None
    #: further submodules whose parameters travel as one where the model is sharded
    sharded_classes: tuple[type[nn.Module], ...] = ()
    #: what of the model is called besides its forward
    called_methods: tuple[str, ...] = ()
    #: settings (their beginnings) that say how weights are found, not what they compute
    settings_of_training: tuple[str, ...] = (
        "optimizer",
        "schedule",
        "compile_blocks",
        "activation_checkpointing",
    )
    #: settings that a resumed run may change: its length and what it shows, not how it learns
    may_change_on_resume: tuple[str, ...] = ("schedule", "compile_blocks", "activation_checkpointing")
    #: what `--init_from` takes besides a run or a checkpoint; see `read_foreign`
    foreign_help: str = ""

    def __init__(
        self,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        compile_blocks: bool | None = None,
        activation_checkpointing: ActivationCheckpointing = "none",
    ) -> None:
        super().__init__()
        check_activation_checkpointing(activation_checkpointing)
        self.optimizer_config = optimizer
        self.schedule_config = schedule
        self.compile_blocks = compile_blocks
        self.activation_checkpointing = activation_checkpointing
        self.model: nn.Module | None = None
        self.plan: Plan | None = None
        self.init_from: str | None = None
        # The complete configuration as plain data, saved in every checkpoint; set by the command line.
        self.run_config: dict[str, Any] | None = None
        self.optimizer_table: list[dict[str, Any]] = []
        # Set before each optimizer step by pretrain.faults, scalars on the device, the same on all ranks: the norm of
        # the gradient, taken once for the guard, the clipping and the log; and 1 where the step is left out, else 0.
        self.grad_norm: torch.Tensor | None = None
        self.skip_step: torch.Tensor | None = None

    # What a domain provides.

    @classmethod
    def cli_links(cls) -> dict[str, str]:
        """Return the arguments that the command line offers at its top, {name: help}."""
        return {}

    @classmethod
    def data_links(cls) -> dict[str, str]:
        """Return the settings of the data that follow from the model's, {name in the model: name in the data}."""
        return {}

    def callbacks(self) -> list[L.Callback]:
        """Return the domain's own callbacks."""
        return []

    def check_data(self, data: Any) -> None:
        """Raise a UserError if the data does not fit the model."""

    def parameter_counts(self) -> dict[str, Any]:
        """Return the numbers of parameters: `total`, `activated` and `roles` ({role: number})."""
        raise NotImplementedError

    def least_sizes(self, data: Any) -> tuple[int, int]:
        """Return the parameters, and the numbers held of one sample in training, at least; see `pretrain.size`."""
        raise NotImplementedError

    def build_model(self) -> nn.Module:
        """Return the model with fresh weights."""
        raise NotImplementedError

    def loss(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum of the loss over the batch's targets, number of targets), both scalars."""
        raise NotImplementedError

    def rules(self) -> list[Rule]:
        """Return the ordered rules that send each parameter to an optimizer group."""
        raise NotImplementedError

    def flops_per_unit(self) -> float:
        """Return the floating-point operations of one token (or image), forward and backward."""
        raise NotImplementedError

    def units_budget(self) -> dict[str, float]:
        """Return limits on the run, in tokens (or images), by the name of the setting."""
        return {}

    def read_foreign(self, source: str) -> dict[str, torch.Tensor] | None:
        """Return the weights of the model that `--init_from` names in a form which only the domain knows.

        None: it names a run or a checkpoint. A UserError: the weights do not fit, or would compute something else.
        """
        return None

    def validation_metrics(self, loss: float) -> dict[str, float]:
        """Return what to report of a mean validation loss, besides `val/loss`."""
        return {}

    # The run.

    def make_plan(self, trainer: L.Trainer, data: Any) -> Plan:
        """Work out the size of the run; see `pretrain.plan`."""
        return make_plan(
            trainer,
            n_samples=len(data.train_dataset),
            global_batch_size=data.global_batch_size,
            micro_batch_size=data.micro_batch_size,
            units_per_sample=data.units_per_sample,
            units_budget=self.units_budget(),
        )

    def build_meta_model(self) -> nn.Module:
        """Return the model without memory for its weights, to look at names and shapes."""
        with torch.device("meta"):
            return self.build_model()

    def description(self, data: Any) -> str:
        """Return what a person wants to know before the first step."""
        assert self.plan is not None
        plan, counts = self.plan, self.parameter_counts()
        lines = [f"parameters {counts['total']:>15,}   activated {counts['activated']:,}"]
        width = max(12, *map(len, counts["roles"]))
        lines += [f"  {role:<{width}} {count:>11,}" for role, count in counts["roles"].items()]
        lines.append(
            f"steps {plan.total_steps:,} (from {plan.limit}) of {plan.units_per_step:,} {self.unit}: "
            f"{plan.total_steps * plan.units_per_step:,} {self.unit}, {plan.epochs:.2f} epochs; each step "
            f"{plan.accumulation} x {plan.micro_batch_size} samples on {plan.world_size} device(s)"
        )
        lines.append(format_table(self.optimizer_table))
        return "\n".join(lines)

    def setup(self, stage: str) -> None:
        if stage == "fit" and self.plan is None:
            self.plan = self.make_plan(self.trainer, self.trainer.datamodule)  # type: ignore[attr-defined]
            apply_plan(self.trainer, self.plan)
        if self.trainer.datamodule.val_dataset is None:  # type: ignore[attr-defined]
            self.trainer.limit_val_batches = 0

    def initial_model(self) -> nn.Module:
        """Return the model with the weights that training starts from."""
        model = self.build_model()
        if self.init_from is not None:
            foreign = self.read_foreign(self.init_from)
            if foreign is None:
                load_weights(model, self.init_from)
            else:
                model.load_state_dict(foreign)
        return model

    def configure_model(self) -> None:
        if self.model is not None:  # the hook runs in every stage
            return
        strategy = self.trainer.strategy
        sharded = strategy if isinstance(strategy, ShardedStrategy) else None
        self.model = self.initial_model() if sharded is None else self.build_meta_model()
        if sharded is not None:  # before anything is compiled
            sharded.prepare(self.model, self._sharded_classes())
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        compiles = on_gpu if self.compile_blocks is None else self.compile_blocks
        parallelize(
            self.model,
            self.block_class,
            compiled=compiles,
            activation_checkpointing=self.activation_checkpointing,
        )
        if sharded is not None:
            sharded.shard(self.model, self._sharded_classes(), self.called_methods, self.initial_model)

    def _sharded_classes(self) -> tuple[type[nn.Module], ...]:
        return (*([] if self.block_class is None else [self.block_class]), *self.sharded_classes)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        assert self.model is not None
        optimizer, self.optimizer_table = self.build_optimizer(self.model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def build_optimizer(self, model: nn.Module) -> tuple[torch.optim.Optimizer, list[dict[str, Any]]]:
        """Return the optimizer of a model, and the table of its groups."""
        assert self.plan is not None
        return build_optimizer(
            self.optimizer_config,
            model.named_parameters(),
            self.rules(),
            global_batch_size=self.plan.global_batch_size,
        )

    def schedule(self) -> Callable[[int], float]:
        """Return the learning rate's multiple of its peak as a function of the step."""
        assert self.plan is not None
        return build_schedule(self.schedule_config, self.plan.total_steps, self.plan.steps_per_epoch)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        loss_sum, _ = self.loss(batch)
        return self.training_output(loss_sum, batch)

    def training_output(self, loss_sum: torch.Tensor, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what a training step has to: the loss to differentiate, and the numbers that callbacks read."""
        assert self.plan is not None
        # Lightning divides by the accumulation, the gradient reduction by the ranks: neither is a mean over targets.
        share = self.plan.accumulation * self.plan.world_size / batch["step_targets"]
        return {"loss": loss_sum * share, "loss_sum": loss_sum.detach(), "step_targets": batch["step_targets"]}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.grad_norm is None or not gradient_clip_val or gradient_clip_algorithm == "value":
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, self.grad_norm)

    def on_train_start(self) -> None:
        # A resumed optimizer brings the rate of the end of its old schedule, which may now be a longer one.
        schedule, peaks = self.schedule(), self.trainer.lr_scheduler_configs[0].scheduler.base_lrs
        for group, peak in zip(self.trainer.optimizers[0].param_groups, peaks, strict=True):
            group["lr"] = peak * schedule(self.trainer.global_step)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Dropout and masks are a function of (seed, micro-batch, rank), so that a resumed run draws the same.
        torch.manual_seed(noise_seed(global_seed(), batch_idx, self.global_rank))
        assert self.plan is not None
        if batch_idx + 1 == self.plan.total_steps * self.plan.accumulation:
            self.trainer.val_check_batch = batch_idx + 1  # the last step is validated, whatever the interval

    def on_validation_epoch_start(self) -> None:
        exact = torch.float32 if self.device.type == "mps" else torch.float64
        self._val_sums = torch.zeros(2, dtype=exact, device=self.device)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._val_sums += torch.stack(self.validation_loss(batch)).to(self._val_sums.dtype)

    def validation_loss(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `loss` of a batch that counts; a domain with metrics of its own updates them here."""
        return self.loss(batch)

    def on_validation_epoch_end(self) -> None:
        sums = self.trainer.strategy.reduce(self._val_sums, reduce_op="sum")
        loss = float(sums[0] / sums[1])
        if not self.trainer.sanity_checking:
            check_finite("the validation loss", loss, self.trainer)
        metrics = {"val/loss": loss, **self.validation_metrics(loss)}
        # Through `self.log` for callbacks that monitor, past the loggers: Lightning's step axis lags by one there.
        self.log_dict(metrics, logger=False, sync_dist=True)
        if not self.trainer.sanity_checking:
            log_metrics(self.trainer, metrics)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.run_config is not None:
            checkpoint["config"] = self.run_config

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.model is not None
        check_same_architecture(self.model, checkpoint, "the checkpoint")
        if self.plan is not None and "loops" in checkpoint:
            recount(checkpoint, self.plan)
