"""Schedules against their closed forms, and through torch's own scheduler."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR

from pretrain.schedules import ScheduleConfig, build_schedule, lr_multiplier, steps_from_epochs, warmup_steps


def curve(total: int, steps_per_epoch: float | None = None, **settings) -> list[float]:
    schedule = build_schedule(ScheduleConfig(**settings), total, steps_per_epoch)
    return [schedule(step) for step in range(total)]


def test_warmup_is_linear_starts_above_zero_and_hits_the_peak():
    values = curve(100, name="cosine", warmup_steps=10)
    assert values[:10] == [(step + 1) / 10 for step in range(10)]
    assert values[9] == 1.0
    assert values[10] < 1.0


def test_cosine_ends_at_a_twentieth_of_the_peak_on_the_last_step():
    values = curve(101, name="cosine")
    assert values[0] == 1.0
    assert values[50] == pytest.approx((1 + 1 / 20) / 2)
    assert values[25] == pytest.approx(1 / 20 + 0.95 * (1 + math.cos(math.pi / 4)) / 2)
    assert values[-1] == 1 / 20


def test_cosine_to_zero_as_in_the_vision_recipe():
    values = curve(800, steps_per_epoch=1.0, name="cosine", warmup_epochs=40, min_lr_ratio=0.0)
    assert values[0] == 1 / 40
    assert values[39] == 1.0
    assert values[-1] == 0.0
    assert values[-2] > 0.0


def test_wsd_holds_the_peak_to_80_percent_of_all_steps_then_falls_linearly_to_zero_at_the_last_step():
    values = curve(1000, name="wsd", warmup_steps=100)
    assert values[99:800] == [1.0] * 701
    assert values[800] == pytest.approx(1 - 1 / 200)
    assert values[900] == pytest.approx(1 - 101 / 200)
    assert values[998] == pytest.approx(1 / 200)
    assert values[999] == 0.0


def test_wsd_stable_fraction_and_floor_can_be_set():
    values = curve(10, name="wsd", stable_fraction=0.5, min_lr_ratio=0.5)
    assert values == pytest.approx([1, 1, 1, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5])


def test_constant_stays_at_the_peak():
    assert curve(5, name="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_a_run_of_one_step_uses_the_peak(name):
    assert curve(1, name=name) == [1.0]


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_steps_past_the_end_keep_the_last_value(name):
    config = ScheduleConfig(name=name, warmup_steps=3)
    assert lr_multiplier(20, 20, config) == lr_multiplier(19, 20, config) == lr_multiplier(99, 20, config)


@st.composite
def runs(draw):
    """A schedule whose warm-up fits, and its number of steps."""
    name = draw(st.sampled_from(["cosine", "wsd", "constant"]))
    total = draw(st.integers(2, 400))
    room = {"cosine": total - 1, "wsd": max(1, min(round(0.8 * total), total - 1)), "constant": total}[name]
    return ScheduleConfig(name=name, warmup_steps=draw(st.integers(0, room))), total


@given(runs())
def test_any_schedule_is_bounded_rises_in_warmup_and_never_after(run):
    config, total = run
    warmup = config.warmup_steps
    values = [lr_multiplier(step, total, config) for step in range(total)]
    assert all(0.0 <= value <= 1.0 for value in values)
    assert all(value > 0.0 for value in values[:-1])
    assert max(values) == 1.0
    assert values[:warmup] == sorted(values[:warmup])
    after = values[max(warmup - 1, 0) :]
    assert after == sorted(after, reverse=True)


@given(runs())
def test_any_schedule_is_continuous(run):
    """No jump larger than the slope of its steepest part: linear warm-up, half cosine or linear decay."""
    config, total = run
    values = [lr_multiplier(step, total, config) for step in range(total)]
    decay_steps = {
        "cosine": total - max(config.warmup_steps, 1),
        "wsd": total - max(1, min(round(0.8 * total), total - 1)),
    }
    slope = max(1 / max(config.warmup_steps, 1), math.pi / 2 / decay_steps.get(config.name, total))
    assert all(abs(a - b) <= slope + 1e-12 for a, b in pairwise(values))


@given(epochs=st.integers(0, 1000), steps_per_epoch=st.integers(1, 10_000))
def test_whole_epochs_convert_to_whole_steps(epochs, steps_per_epoch):
    assert steps_from_epochs(epochs, steps_per_epoch) == epochs * steps_per_epoch


def test_warmup_in_epochs_equals_the_same_warmup_in_steps():
    assert warmup_steps(ScheduleConfig(warmup_epochs=1.5), steps_per_epoch=10) == 15
    assert curve(100, 10, warmup_epochs=1.5) == curve(100, warmup_steps=15)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "linear"}, "cosine, wsd, constant"),
        ({"warmup_steps": 1, "warmup_epochs": 1.0}, "both set"),
        ({"warmup_steps": -1}, "zero or more"),
        ({"warmup_epochs": float("nan")}, "zero or more"),
        ({"min_lr_ratio": 1.5}, r"\[0, 1\]"),
        ({"name": "constant", "min_lr_ratio": 0.1}, "no meaning"),
        ({"name": "wsd", "stable_fraction": 1.0}, r"\[0, 1\)"),
        ({"name": "cosine", "stable_fraction": 0.5}, "no meaning"),
    ],
)
def test_a_bad_setting_is_told_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        ScheduleConfig(**settings)
    assert "\n" not in str(error.value)


def test_a_warmup_that_reaches_into_the_decay_is_refused():
    curve(100, name="wsd", warmup_steps=80)
    with pytest.raises(ValueError, match="warm-up of 81 steps does not fit"):
        curve(100, name="wsd", warmup_steps=81)


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_a_run_no_longer_than_its_warmup_takes_the_first_steps_of_a_longer_run(name):
    assert curve(2, name=name, warmup_steps=1000) == curve(5000, name=name, warmup_steps=1000)[:2]
    assert curve(1000, name=name, warmup_steps=1000)[-1] == 1.0


def test_a_warmup_in_epochs_needs_the_length_of_an_epoch():
    with pytest.raises(ValueError, match=r"set schedule\.warmup_steps"):
        lr_multiplier(0, 100, ScheduleConfig(warmup_epochs=1))


def test_a_run_without_steps_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        lr_multiplier(0, 0, ScheduleConfig())


def optimizer_and_scheduler(config: ScheduleConfig, total: int):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    return optimizer, LambdaLR(optimizer, build_schedule(config, total))


def learning_rates(optimizer, scheduler, steps: int) -> list[float]:
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_lambda_lr_uses_step_0_first_and_a_resume_goes_on_where_it_stopped(name):
    config = ScheduleConfig(name=name, warmup_steps=4)
    expected = [2.0 * lr_multiplier(step, 20, config) for step in range(20)]
    optimizer, scheduler = optimizer_and_scheduler(config, 20)
    assert learning_rates(optimizer, scheduler, 7) == expected[:7]

    resumed_optimizer, resumed_scheduler = optimizer_and_scheduler(config, 20)
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed_scheduler.load_state_dict(scheduler.state_dict())
    assert learning_rates(resumed_optimizer, resumed_scheduler, 13) == expected[7:]
