"""How long a run is: the conversion of steps, epochs, tokens and micro-batches."""

import lightning as L
import pytest

from pretrain.errors import UserError
from pretrain.plan import accumulation_steps, apply_plan, make_plan


def trainer(**settings) -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **settings)


def plan(settings: dict | None = None, **changes):
    arguments = {"n_samples": 100, "global_batch_size": 8, "micro_batch_size": 2, "units_per_sample": 10} | changes
    return make_plan(trainer(**(settings or {})), **arguments)


def test_steps_epochs_and_units_each_give_the_length_of_a_run():
    assert plan({"max_steps": 30}).total_steps == 30
    assert plan({"max_epochs": 3}).total_steps == 38  # 300 samples in steps of 8
    assert plan(units_budget={"tokens_per_parameter": 2_001}).total_steps == 26  # steps of 80 tokens


def test_the_first_limit_ends_the_run():
    made = plan({"max_steps": 30, "max_epochs": 3}, units_budget={"tokens_per_parameter": 1600.0})
    assert (made.total_steps, made.limit) == (20, "tokens_per_parameter")


def test_a_run_without_an_end_is_refused():
    with pytest.raises(UserError, match="no end"):
        plan()


def test_derived_sizes():
    made = plan({"max_steps": 25})
    assert (made.accumulation, made.epochs, made.units_per_step, made.steps_per_epoch) == (4, 2.0, 80, 12.5)


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "nearest"), [(10, 4, 1, "8 or 12"), (3, 4, 1, "size is 4"), (100, 8, 3, "96 or 120")]
)
def test_a_batch_that_cannot_be_cut_names_the_nearest_sizes(batch, micro, ranks, nearest):
    with pytest.raises(UserError, match=nearest):
        accumulation_steps(batch, micro, ranks)


@pytest.mark.parametrize(
    "settings",
    [{"accumulate_grad_batches": 2}, {"limit_train_batches": 5}, {"limit_train_batches": 0.5}, {"overfit_batches": 2}],
)
def test_settings_in_micro_batches_are_refused(settings):
    with pytest.raises(UserError, match="instead"):
        plan({"max_steps": 1, **settings})


@pytest.mark.parametrize(
    ("settings", "micro_batches"),
    [
        ({"val_check_interval": 10}, 40),  # steps
        ({}, 48),  # an epoch of 12.5 steps, rounded to 12
        ({"val_check_interval": 0.5}, 24),
        ({"check_val_every_n_epoch": 2}, 100),
    ],
)
def test_validation_intervals_become_micro_batches(settings, micro_batches):
    made_for = trainer(max_steps=30, **settings)
    made = make_plan(made_for, n_samples=100, global_batch_size=8, micro_batch_size=2)
    apply_plan(made_for, made)
    assert made_for.val_check_interval == micro_batches
    assert (made_for.accumulate_grad_batches, made_for.max_steps) == (4, 30)


def test_two_intervals_that_contradict_are_refused():
    both = trainer(max_steps=30, val_check_interval=10, check_val_every_n_epoch=2)
    with pytest.raises(UserError, match="check_val_every_n_epoch"):
        apply_plan(both, make_plan(both, n_samples=100, global_batch_size=8, micro_batch_size=2))
