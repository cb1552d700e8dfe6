"""What a person sees of a mixture of experts in training: who gets the tokens, and how sure the routers are."""

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from lm.moe import Routing
from pretrain.callbacks import log_figure
from pretrain.metrics import log_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ExpertLoad(L.Callback):
    """Log `moe/..` every `trainer.log_every_n_steps` steps, over all tokens that were trained on since the last time.

    For each layer, under `moe/blocks.{i}/`:

    - `imbalance`, the load of the busiest expert over the mean load (1 is perfect balance);
    - `dead_experts`, those without a single token;
    - `min_load` and `max_load`, fractions of the tokens (balance is top_k / n_experts);
    - `router_entropy`, in units of log n_experts (1: the router has no preference);
    - `balance_loss` and `z_loss`, before their weights.

    Under `moe/` itself the same over all layers: means, the sum of dead experts, the extreme loads. At every validation
    and at the end, a picture `moe/load`: the fraction of tokens of every expert in every layer since the last picture.

    It counts what `training_step` returns, so neither evaluation nor recomputation can add to it.
    """

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self._sums: Routing | None = None  # since the last log
        self._micro_batches = 0
        self._pictured_load: torch.Tensor | None = None  # since the last picture, over all ranks
        self._pictured_tokens = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        routing: Routing = outputs["routing"]
        sums = routing if self._sums is None else [a + b for a, b in zip(self._sums, routing, strict=True)]
        self._sums = Routing(*sums)
        self._micro_batches += 1
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector of Lightning's
        if trainer.global_step % every == 0 or trainer.global_step == trainer.max_steps:
            self._log(trainer, pl_module.config.moe.top_k)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._draw(trainer)

    def _log(self, trainer: L.Trainer, top_k: int) -> None:
        assert self._sums is not None
        reduce = trainer.strategy.reduce
        load = reduce(self._sums.load, reduce_op="sum")
        means = [reduce(value / self._micro_batches, reduce_op="mean") for value in self._sums[1:]]
        self._sums, self._micro_batches = None, 0
        tokens = float(load[0].sum()) / top_k
        self._pictured_load = load if self._pictured_load is None else self._pictured_load + load
        self._pictured_tokens += tokens
        self.latest = load_metrics(Routing(load, *means), tokens)
        log_metrics(trainer, self.latest)

    def _draw(self, trainer: L.Trainer) -> None:
        if self._pictured_load is None:
            return
        if trainer.is_global_zero:
            log_figure(trainer, "moe/load", load_figure(self._pictured_load / self._pictured_tokens))
        self._pictured_load, self._pictured_tokens = None, 0.0


def load_metrics(routing: Routing, tokens: float) -> dict[str, float]:
    """Return the numbers of `ExpertLoad` by name.

    Args:
        routing: of all layers: load (L, E) over `tokens` tokens, and means of the rest (L,).
    """
    load = routing.load.double()
    columns = {
        "imbalance": load.amax(1) / load.mean(1),
        "dead_experts": (load == 0).sum(1),
        "min_load": load.amin(1) / tokens,
        "max_load": load.amax(1) / tokens,
        "router_entropy": routing.entropy,
        "balance_loss": routing.balance_loss,
        "z_loss": routing.z_loss,
    }
    together: dict[str, Callable[[list[float]], float]] = {"dead_experts": sum, "min_load": min, "max_load": max}
    metrics: dict[str, float] = {}
    for name, column in columns.items():
        values = column.tolist()
        metrics[f"moe/{name}"] = together.get(name, statistics.fmean)(values)
        metrics |= {f"moe/blocks.{layer}/{name}": value for layer, value in enumerate(values)}
    return metrics


def load_figure(share: torch.Tensor) -> "Figure":
    """Draw the fraction of tokens (L, E) that each expert (column) of each layer (row) was given."""
    from matplotlib.figure import Figure

    n_layers, n_experts = share.shape
    figure = Figure(figsize=(2.5 + 0.25 * n_experts, 1.5 + 0.35 * n_layers), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(share.cpu(), cmap="viridis", aspect="auto", vmin=0)
    axes.set_yticks(range(n_layers), [f"blocks.{layer}" for layer in range(n_layers)])
    axes.set_xlabel("expert")
    axes.set_title("fraction of tokens of each expert")
    figure.colorbar(image, ax=axes)
    return figure
