"""A training step from a configuration, as `lm.fit` and `vision_mae.fit` would take it, with nothing else around it.

The domain's own LightningModule builds and compiles the model, makes its optimizer and computes its loss, under the
precision plugin of a Trainer that never runs. What a run does besides (reading data, logs, the schedule, checkpoints)
is left out: the batches are random and lie in memory.
"""

import dataclasses
import inspect
import logging
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from torch import nn

import moa
from benchmarks.arguments import layer_implementation
from benchmarks.harness import BASELINE
from benchmarks.memory import peak_growth
from lm.model import flops_per_token
from lm.module import LanguageModule
from pretrain.errors import UserError
from pretrain.module import PretrainModule
from pretrain.plan import Plan
from vision_mae.model import flops_per_image
from vision_mae.module import MaskedAutoencoderModule

DOMAINS: tuple[type[PretrainModule], ...] = (LanguageModule, MaskedAutoencoderModule)
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}
N_BATCHES = 4  # different ones, so that a router does not see the same tokens at every step
FIRST_STEP = 1e-3  # of the peak learning rate: the first step of a warm-up, at which every loss stays near its start

Batch = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all sides of a run share: plain data, for the process that measures memory."""

    config: Path
    batch: int
    length: int
    dtype: str
    compile: bool
    device: str
    implementation: str = "auto"


class Side:
    """A model in training.

    Args:
        model: for its parameters.
        mean_loss: the loss of a batch, to differentiate.
        optimizer: has the model's parameters.
        before_step: called with the gradients there and not yet clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        mean_loss: Callable[[Batch], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        task: "Task",
        before_step: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        self.model, self.mean_loss, self.optimizer, self.before_step = model, mean_loss, optimizer, before_step
        self.task = task
        self.loss = torch.tensor(float("nan"))  # of the latest step
        self._steps = 0
        for group in optimizer.param_groups:
            group["lr"] *= FIRST_STEP

    def step(self) -> None:
        """Forward, backward, clip, optimizer: the next batch."""
        batch = self.task.batches[self._steps % len(self.task.batches)]
        with self.task.precision():
            loss = self.mean_loss(batch)
        loss.backward()
        if self.before_step is not None:
            self.before_step(self.optimizer)
        if self.task.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss, self._steps = loss.detach(), self._steps + 1

    def n_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def memory(self) -> dict[str, int | None]:
        """Return the bytes in use at the peak of a step: `state`, weights and optimizer state, and `step`, all else."""

        def two_steps() -> None:
            self.step()
            self.step()

        self.step()  # compilation, optimizer state, and what libraries allocate once
        step = peak_growth(two_steps, torch.device(self.task.setting.device))
        held = [*self.model.parameters(), *self.model.buffers()]
        held += [value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        state = sum(tensor.numel() * tensor.element_size() for tensor in held)
        return {"state": state, "step": step, "total": None if step is None else state + step}


class Task:
    """A configuration, the batches, and the conditions of training that all sides share.

    Raises:
        UserError: a file that is no configuration of a language model or a masked autoencoder.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.content = _read(setting.config)
        self.domain = _find_domain(self.content["model"], setting.config)
        device = torch.device(setting.device)
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        self.trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=[device.index or 0] if device.type == "cuda" else 1,
            precision=PRECISIONS[setting.dtype],  # type: ignore[arg-type]
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        self.clip: float | None = (self.content.get("trainer") or {}).get("gradient_clip_val")
        self.precision: Callable[[], AbstractContextManager] = self.trainer.strategy.precision_plugin.train_step_context
        self.config: Any = self.module(self.configured_kind).config
        self.batches = [self._random_batch(seed) for seed in range(N_BATCHES)]

    @property
    def configured_kind(self) -> str:
        return (self.content["model"].get("ffn") or {}).get("kind", BASELINE)

    @property
    def unit(self) -> str:
        return self.domain.unit

    @property
    def units_per_step(self) -> int:
        return self.setting.batch * (self.setting.length if self.domain is LanguageModule else 1)

    def flops_per_unit(self, kind: str) -> float:
        """Return the floating-point operations of one token or image, forward and backward."""
        config: Any = self.module(kind).config
        if self.domain is LanguageModule:
            return flops_per_token(config, self.setting.length)
        return flops_per_image(config)

    def build(self, kind: str) -> Side:
        """Return the model with a kind of feed-forward layer, as `fit` would build and train it."""
        torch.manual_seed(0)
        module = self.module(kind)
        batch = self.setting.batch
        module.trainer = self.trainer
        module.plan = Plan(
            total_steps=1,
            limit="benchmark",
            global_batch_size=batch,
            micro_batch_size=batch,
            accumulation=1,
            world_size=1,
            n_samples=batch,
            units_per_sample=self.units_per_step // batch,
        )
        with torch.device(self.setting.device):
            module.configure_model()
        assert module.model is not None
        optimizer, _ = module.build_optimizer(module.model)
        return Side(
            module.model.train(),
            lambda batch: module.training_step(batch, 0)["loss"],
            optimizer,
            self,
            module.on_before_optimizer_step,
        )

    def module(self, kind: str) -> PretrainModule:
        """Return the configured module with a kind of feed-forward layer; its model is not built yet."""
        values = dict(self.content["model"])
        ffn = dict(values.get("ffn") or {})
        if kind != self.configured_kind:  # dictionary and gate are the configured kind's own
            ffn = {name: ffn[name] for name in ("hidden_features", "bias") if name in ffn} | {"kind": kind}
        if kind in moa.kinds():  # vision's `mlp` is not
            ffn["implementation"] = layer_implementation(kind, self.setting.implementation)
        values |= {"ffn": ffn, "compile_blocks": self.setting.compile}
        try:
            return _construct(self.domain, values)
        except (TypeError, ValueError) as error:
            raise UserError(f"{self.setting.config}: {error}") from error

    def _random_batch(self, seed: int) -> Batch:
        config: Any = self.config
        size, device = self.setting.batch, self.setting.device
        generator = torch.Generator().manual_seed(seed)
        if self.domain is LanguageModule:
            tokens = torch.randint(config.vocab_size, (size, self.setting.length + 1), generator=generator).to(device)
            inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            return {"inputs": inputs, "targets": targets, "step_targets": targets.numel()}
        shape = (size, config.in_channels, config.image_size, config.image_size)
        return {
            "images": torch.randn(shape, generator=generator).to(device),
            "noise": torch.rand(size, config.n_patches, generator=generator).to(device),
            "present": torch.ones(size, dtype=torch.bool, device=device),
            "step_targets": size,
        }


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {file} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise UserError(f"--config {file} has no section `model`: give one of configs/*.yaml")
    return content


def _find_domain(model: dict[str, Any], file: Path) -> type[PretrainModule]:
    for domain in DOMAINS:
        if model.keys() <= inspect.signature(domain.__init__).parameters.keys():
            return domain
    raise UserError(f"--config {file}: its `model` is neither a language model nor a masked autoencoder")


def _construct(target: Any, values: dict[str, Any]) -> Any:
    """Return `target(**values)`, whose arguments that are dataclasses are made of nested plain values likewise."""
    hints = typing.get_type_hints(target if dataclasses.is_dataclass(target) else target.__init__)
    made = {}
    for name, value in values.items():
        hint = hints.get(name)
        nested = [kind for kind in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(kind)]
        made[name] = _construct(nested[0], value) if nested and isinstance(value, dict) else value
    return target(**made)
