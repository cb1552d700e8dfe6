"""Learning-rate schedules as pure functions of the optimizer step.

Conventions, the same for every schedule:

* `step` is the number of optimizer steps already done, so it is also the index of the step about to be taken:
  0 .. total_steps - 1. `torch.optim.lr_scheduler.LambdaLR` passes exactly this number.
* Warm-up over W steps is linear and never zero: step s < W uses (s + 1) / W of the peak, so the first step uses
  1 / W and step W - 1 the peak itself.
* The decay ends on the last step, total_steps - 1, not one step after it.
* A run that is no longer than its warm-up stays in it: its steps are the first ones of a longer run.
* Steps past the end keep the last value (LambdaLR asks for one of them after the last optimizer step).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

ScheduleName = Literal["cosine", "wsd", "constant"]

COSINE_MIN_LR_RATIO = 1 / 20  # the dense models of the paper decay to peak / 20
WSD_STABLE_FRACTION = 0.8  # the mixture-of-experts models hold the peak up to 80% of all steps, then decay to zero


@dataclass
class ScheduleConfig:
    """The learning rate over a run, as a fraction of its peak.

    Raises:
        ValueError: an unknown name, a value out of range, or a setting that the named schedule does not use.
    """

    name: ScheduleName = "cosine"
    """After the warm-up: `cosine` half a cosine, `wsd` the peak and then a linear decay, `constant` the peak."""

    warmup_steps: int | None = None
    """Optimizer steps of linear warm-up. Neither this nor `warmup_epochs`: no warm-up."""

    warmup_epochs: float | None = None
    """The same in epochs. Give one of the two."""

    min_lr_ratio: float | None = None
    """Value at the last step, as a fraction of the peak: 1/20 for `cosine` and 0 for `wsd` unless set."""

    stable_fraction: float | None = None
    """`wsd` only: fraction of all steps, warm-up included, before the decay begins. Default: 0.8."""

    def __post_init__(self) -> None:
        if self.name not in get_args(ScheduleName):
            raise ValueError(
                f"schedule.name {self.name!r} is unknown: choose one of {', '.join(get_args(ScheduleName))}"
            )
        if self.warmup_steps is not None and self.warmup_epochs is not None:
            raise ValueError("schedule.warmup_steps and schedule.warmup_epochs are both set: set one of them to null")
        for key in ("warmup_steps", "warmup_epochs"):
            value = getattr(self, key)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"schedule.{key} is {value}: it must be zero or more")
        if self.min_lr_ratio is not None:
            if self.name == "constant":
                raise ValueError(
                    "schedule.min_lr_ratio has no meaning for 'constant': remove it or choose cosine or wsd"
                )
            if not 0 <= self.min_lr_ratio <= 1:
                raise ValueError(f"schedule.min_lr_ratio is {self.min_lr_ratio}: it must lie in [0, 1]")
        if self.stable_fraction is not None:
            if self.name != "wsd":
                raise ValueError(f"schedule.stable_fraction has no meaning for {self.name!r}: remove it or choose wsd")
            if not 0 <= self.stable_fraction < 1:
                raise ValueError(f"schedule.stable_fraction is {self.stable_fraction}: it must lie in [0, 1)")


def lr_multiplier(step: int, total_steps: int, config: ScheduleConfig, steps_per_epoch: float | None = None) -> float:
    """Learning rate of one optimizer step, as a fraction of the peak.

    Args:
        step: optimizer steps already done (0 for the first step).
        total_steps: optimizer steps of the whole run.
        config: the schedule.
        steps_per_epoch: optimizer steps in one epoch; only `warmup_epochs` needs it.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: a warm-up that does not fit before the decay, or `warmup_epochs` without `steps_per_epoch`.
    """
    return build_schedule(config, total_steps, steps_per_epoch)(step)


def build_schedule(
    config: ScheduleConfig, total_steps: int, steps_per_epoch: float | None = None
) -> Callable[[int], float]:
    """`lr_multiplier` of one run as a function of the step alone, ready for `LambdaLR`; all checks are made here, once.

    It is a plain function, which LambdaLR leaves out of the checkpoint: after a resume the configured schedule applies.
    """
    if total_steps < 1:
        raise ValueError(f"a schedule needs at least one optimizer step, not {total_steps}")
    warmup = warmup_steps(config, steps_per_epoch)
    decay_start = _last_peak_step(config, total_steps)
    _check_warmup_fits(config, warmup, decay_start, total_steps)

    # The peak is reached on step `warmup - 1`. A cosine leaves it at once, the others hold it until `decay_start`.
    decay_start = max(warmup - 1, 0) if config.name == "cosine" else decay_start
    min_ratio = _min_lr_ratio(config)

    def schedule(step: int) -> float:
        step = min(step, total_steps - 1)
        if step < warmup:
            return (step + 1) / warmup
        if step <= decay_start:
            return 1.0
        progress = (step - decay_start) / (total_steps - 1 - decay_start)  # (0, 1], 1 on the last step
        weight = 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1 - progress
        return weight + min_ratio * (1 - weight)  # exact at both ends: 1 for weight 1, min_ratio for weight 0

    return schedule


def warmup_steps(config: ScheduleConfig, steps_per_epoch: float | None = None) -> int:
    """Warm-up of `config` in optimizer steps.

    Raises:
        ValueError: the warm-up is given in epochs and `steps_per_epoch` is not known.
    """
    if config.warmup_epochs is None:
        return config.warmup_steps or 0
    if steps_per_epoch is None:
        raise ValueError("schedule.warmup_epochs needs the length of an epoch, unknown here: set schedule.warmup_steps")
    return steps_from_epochs(config.warmup_epochs, steps_per_epoch)


def steps_from_epochs(epochs: float, steps_per_epoch: float) -> int:
    """Epochs to optimizer steps, rounded to the nearest step: the one place where this conversion is made."""
    return round(epochs * steps_per_epoch)


def _last_peak_step(config: ScheduleConfig, total_steps: int) -> int:
    """The last step that may use the peak. A decay keeps at least one step, unless the run has only one."""
    if config.name == "constant" or total_steps == 1:
        return total_steps - 1
    if config.name == "cosine":
        return total_steps - 2
    fraction = WSD_STABLE_FRACTION if config.stable_fraction is None else config.stable_fraction
    return min(max(round(fraction * total_steps), 1), total_steps - 1) - 1


def _min_lr_ratio(config: ScheduleConfig) -> float:
    if config.min_lr_ratio is not None:
        return config.min_lr_ratio
    return COSINE_MIN_LR_RATIO if config.name == "cosine" else 0.0


def _check_warmup_fits(config: ScheduleConfig, warmup: int, last_peak_step: int, total_steps: int) -> None:
    room = last_peak_step + 1
    if room < warmup < total_steps:
        raise ValueError(
            f"schedule: a warm-up of {warmup} steps does not fit: {config.name} over {total_steps} steps leaves {room} "
            "before the decay; shorten the warm-up or lengthen the run"
        )
