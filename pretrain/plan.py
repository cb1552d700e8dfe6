"""How long a run is and how a step is cut: the one place where steps, epochs, tokens and micro-batches are converted.

Users speak of optimizer steps, epochs or tokens per parameter, and of the global batch. Lightning counts micro-batches
in several places (`val_check_interval`, the length of an epoch). `make_plan` works everything out before anything is
written; `apply_plan` tells the trainer.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L

from pretrain.errors import UserError

MAX_MICRO_BATCHES = 2**53  # the length of a loader, and exact as a floating-point number


@dataclass(frozen=True)
class Plan:
    """The size of a run. All numbers are over all ranks."""

    total_steps: int  # optimizer steps
    limit: str  # the setting that decided total_steps
    global_batch_size: int  # samples per optimizer step
    micro_batch_size: int  # samples per forward pass of one rank
    accumulation: int  # forward passes per optimizer step and rank
    world_size: int
    n_samples: int  # in the training data
    units_per_sample: int  # tokens per sequence; 1 for images

    @property
    def epochs(self) -> float:
        """How often the run reads its data."""
        return self.total_steps * self.global_batch_size / self.n_samples

    @property
    def units_per_step(self) -> int:
        """Tokens (or images) per optimizer step."""
        return self.global_batch_size * self.units_per_sample

    @property
    def steps_per_epoch(self) -> float:
        return self.n_samples / self.global_batch_size

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "epochs": self.epochs}


def accumulation_steps(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Return the micro-batches per optimizer step.

    Raises:
        UserError: if the global batch is no multiple of micro batch x world size; names the nearest valid sizes.
    """
    for name, value in (("global_batch_size", global_batch_size), ("micro_batch_size", micro_batch_size)):
        if value < 1:
            raise UserError(f"data.{name} is {value}: it has to be at least 1")
    together = micro_batch_size * world_size
    accumulation, remainder = divmod(global_batch_size, together)
    if remainder:
        below, above = accumulation * together, (accumulation + 1) * together
        nearest = f"sizes are {below} or {above}" if below else f"size is {above}"
        raise UserError(
            f"data.global_batch_size {global_batch_size} is no multiple of data.micro_batch_size {micro_batch_size} "
            f"x {world_size} devices = {together}: the nearest valid {nearest}"
        )
    return accumulation


def make_plan(
    trainer: L.Trainer,
    *,
    n_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    units_per_sample: int = 1,
    units_budget: dict[str, float] | None = None,
) -> Plan:
    """Work out the run from the trainer's limits and the data.

    Args:
        units_budget: further limits by name, in tokens (or images), such as tokens per parameter x parameters.

    The run ends at whichever limit comes first: `trainer.max_steps`, `trainer.max_epochs` or one of `units_budget`.

    Raises:
        UserError: if no limit is set, or the batch sizes do not fit.
    """
    _refuse_settings_in_micro_batches(trainer)
    _refuse_values_out_of_range(trainer)
    accumulation = accumulation_steps(global_batch_size, micro_batch_size, trainer.world_size)
    limits: dict[str, int] = {}
    if trainer.max_steps >= 0:
        limits["trainer.max_steps"] = trainer.max_steps
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        limits["trainer.max_epochs"] = -(-trainer.max_epochs * n_samples // global_batch_size)
    for name, units in (units_budget or {}).items():
        if not 0 < units < math.inf:
            raise UserError(f"{name} has to be a number above 0")
        limits[name] = math.ceil(units / (global_batch_size * units_per_sample))
    if not limits:
        raise UserError("the run has no end: set trainer.max_steps, trainer.max_epochs or tokens_per_parameter")
    limit = min(limits, key=lambda name: limits[name])
    if limits[limit] * accumulation > MAX_MICRO_BATCHES:
        raise UserError(f"{limit} makes more steps than can be counted, 2^53: set a smaller limit")
    return Plan(
        total_steps=limits[limit],
        limit=limit,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        world_size=trainer.world_size,
        n_samples=n_samples,
        units_per_sample=units_per_sample,
    )


def _refuse_settings_in_micro_batches(trainer: L.Trainer) -> None:
    if trainer.accumulate_grad_batches != 1:
        raise UserError(
            "trainer.accumulate_grad_batches is derived: set data.global_batch_size and data.micro_batch_size instead"
        )
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector of Lightning's
        return
    if trainer.limit_train_batches not in (1, 1.0) or trainer.overfit_batches:  # type: ignore[attr-defined]
        raise UserError(
            "trainer.limit_train_batches and trainer.overfit_batches count micro-batches: set trainer.max_steps instead"
        )


def _refuse_values_out_of_range(trainer: L.Trainer) -> None:
    intervals = {
        "val_check_interval": getattr(trainer, "val_check_interval", None),
        "log_every_n_steps": trainer.log_every_n_steps,  # type: ignore[attr-defined]
    }
    clip = trainer.gradient_clip_val
    if clip is not None and not 0 <= clip < math.inf:
        raise UserError(f"trainer.gradient_clip_val is {clip}: give the largest norm (or value), or 0 for no clipping")
    if trainer.check_val_every_n_epoch is not None and trainer.check_val_every_n_epoch < 1:
        raise UserError(f"trainer.check_val_every_n_epoch is {trainer.check_val_every_n_epoch}: give 1 or more")
    for name, value in intervals.items():
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise UserError(f"trainer.{name} is {value}: it has to be above 0 (no validation: limit_val_batches 0)")


def recount(checkpoint: dict[str, Any], plan: Plan) -> None:
    """Make Lightning's counters in a checkpoint, in micro-batches, those of a run that was always cut as `plan` says.

    So a run can be resumed with another micro batch, number of devices or global batch. A checkpoint belongs between
    two optimizer steps: micro-batches of an unfinished one are taken again.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done = checkpoint["global_step"] * plan.accumulation
    for counts in (progress["total"], progress["current"]):
        shift = done - counts["processed"]
        counts.update({name: count + shift for name, count in counts.items()})
    progress["is_last_batch"] = checkpoint["global_step"] >= plan.total_steps


def apply_plan(trainer: L.Trainer, plan: Plan) -> None:
    """Set the trainer's own counters: one Lightning epoch is the whole run, intervals become micro-batches."""
    trainer.accumulate_grad_batches = plan.accumulation
    trainer.fit_loop.epoch_loop.max_steps = plan.total_steps
    trainer.fit_loop.max_epochs = -1
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        trainer.limit_train_batches = plan.total_steps * plan.accumulation
    # Lightning leaves the attribute out for an interval of time.
    interval = getattr(trainer, "val_check_interval", None)
    every_n_epochs = trainer.check_val_every_n_epoch or 1
    # None makes Lightning count the interval over the whole run instead of within an epoch.
    trainer.check_val_every_n_epoch = None
    if isinstance(interval, float):  # a fraction of an epoch of the data
        interval = max(1, round(interval * every_n_epochs * plan.steps_per_epoch))
    elif interval is not None and every_n_epochs != 1:
        raise UserError(
            "trainer.check_val_every_n_epoch goes with a fractional trainer.val_check_interval: "
            f"here the interval is {interval}, so leave check_val_every_n_epoch out"
        )
    if isinstance(interval, int):  # else a time, which Lightning keeps itself
        trainer.val_check_interval = interval * plan.accumulation
