"""What a person sees of a running job: the progress bar, the gates of its layers, a clean stop."""

import signal
import sys
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from tqdm.auto import tqdm

from pretrain.inspection import layer_inputs, layer_mixes, mixing_layers
from pretrain.metrics import StepMetrics, log_metrics
from pretrain.mix_figures import mix_figure
from pretrain.saving import Checkpoints, is_validated_next
from pretrain.sharding import gathered

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def find_callback(trainer: L.Trainer, kind: type) -> Any:
    """Return the trainer's callback of a class, or None."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector of Lightning's
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def log_figure(trainer: L.Trainer, tag: str, figure: "Figure") -> None:
    """Send a matplotlib figure to TensorBoard, at the number of optimizer steps done."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
            logger.experiment.add_figure(tag, figure, global_step=trainer.global_step)


class StepProgress(ProgressBar):
    """One bar over the whole run, in optimizer steps: time left, loss, speed, and the last validation loss."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: tqdm | None = None
        self._enabled = True
        self._validation: dict[str, str] = {}

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        visible = self._enabled and trainer.is_global_zero
        self._bar = tqdm(
            total=trainer.max_steps,
            initial=trainer.global_step,
            desc="training",
            unit="step",
            disable=not visible,
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,  # a log file wants few lines
        )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._bar is None or trainer.global_step == self._bar.n:
            return
        self._bar.set_postfix({**self._speed(trainer, pl_module), **self._validation}, refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is not None:
            self._bar.set_description("validating")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is None:
            return
        for name in ("val/bpb", "val/loss"):
            if name in trainer.callback_metrics:
                self._validation = {name: f"{float(trainer.callback_metrics[name]):.3f}"}
                break
        self._bar.set_description("training")

    def on_train_end(self, *_: Any) -> None:
        self._close()

    def on_exception(self, *_: Any) -> None:
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)))

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _speed(self, trainer: L.Trainer, pl_module: Any) -> dict[str, str]:
        latest = find_callback(trainer, StepMetrics).latest
        if not latest:
            return {}
        rate = latest[f"perf/{pl_module.unit}_per_second"]
        return {"loss": f"{latest['train/loss']:.3f}", f"{pl_module.unit}/s": f"{rate:,.0f}"}


class StopSignal(L.Callback):
    """Ctrl-C, SIGTERM or SIGUSR1 ends the run after the step at hand, with a checkpoint; a second one ends it at once.

    SIGUSR1 is what SLURM sends ahead of a time limit; it counts as SIGTERM.
    """

    def __init__(self) -> None:
        self.requested = False
        self._signal = signal.SIGINT
        self._previous: dict[int, Any] = {}
        self._hosts: Any = None  # the ranks, for a question to all of them

    @property
    def exit_code(self) -> int:
        """What a shell reports of a program that the signal ended: 130 for Ctrl-C, 143 for the others."""
        return 128 + (signal.SIGTERM if self._signal == signal.SIGUSR1 else self._signal)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._on_signal)
        except ValueError:  # not in the main thread: a program around us handles its signals
            self._previous = {}
        if trainer.world_size > 1:
            # Asked over gloo, from host to host: a question to the devices would wait for all that they have queued.
            timeout = getattr(trainer.strategy, "_timeout", None)
            self._hosts = torch.distributed.new_group(backend="gloo", timeout=timeout)
            # Lightning's own such question, before every micro-batch, is whether it has caught the signal: it has not.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def _on_signal(self, number: int, _: Any) -> None:
        self._signal = signal.Signals(number)
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        tqdm.write("stopping after this step (once more stops at once)")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        checkpoints = find_callback(trainer, Checkpoints)
        requested, save = self.requested, trainer.is_global_zero and checkpoints.clock_says_save()
        if trainer.world_size > 1:  # the ranks hear of a signal at different steps, and only one looks at the clock
            answers = torch.tensor([requested, save], dtype=torch.int32)
            torch.distributed.all_reduce(answers, torch.distributed.ReduceOp.MAX, group=self._hosts)
            requested, save = map(bool, answers.tolist())
        checkpoints.time_is_up |= save
        if requested:
            self.requested = True
            trainer.should_stop = True
            if not is_validated_next(trainer, batch_idx):  # else the step is saved after its validation, as always
                checkpoints.save_last(trainer)
                trainer.limit_val_batches = 0  # no other validation on the way out

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


class GateStatistics(L.Callback):
    """Show, at every validation, how the layers with token-dependent gates mix their activations.

    For each layer and gate, over the tokens of the first validation batch: `gates/LAYER/GATE/ACTIVATION/mean` and
    `/spread` (standard deviation over tokens: 0 means that the gate ignores its input), `gates/LAYER/GATE/entropy`
    (of the mix |pi_k| / sum |pi|, in units of log m: 1 is an even mix), and one picture of all means. For learnable
    activations the coefficients are shown in the same way.
    """

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx > 0 or trainer.sanity_checking:
            return
        assert pl_module.model is not None
        layers = mixing_layers(pl_module.model)
        gated = {name: module for name, module in layers.items() if module.gate_labels()}
        with trainer.precision_plugin.forward_context():
            inputs = layer_inputs(gated, lambda: pl_module.loss(batch)) if gated else {}
        metrics: dict[str, float] = {}
        pictures: dict[str, dict[str, dict[str, float]]] = {}
        for name, module in layers.items():
            with trainer.precision_plugin.forward_context(), gathered(pl_module.model, module):
                for mix in layer_mixes(name, module, inputs.get(name)):
                    metrics |= {f"gates/{name}/{mix.gate}/{key}": value for key, value in mix.metrics().items()}
                    pictures.setdefault(mix.gate, {})[name] = mix.means()
        if metrics:
            log_metrics(trainer, metrics)
        if trainer.is_global_zero:
            for gate, rows in pictures.items():
                log_figure(trainer, f"gates/{gate}", mix_figure(gate, rows))
