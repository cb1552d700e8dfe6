"""What torch's kernels compute of an activation and its slope is that of `moa.activations`, wherever t lies."""

import math

import numpy as np
import pytest
import torch

import moa
from moa.kernels.torch_activations import (
    POWER_OF_TWO,
    SLOPES,
    TANH_ABOVE,
    TANH_BELOW,
    TANH_LIMIT,
    Point,
    polynomial,
    power_of_two,
)
from tests.moa.minimax import least_error

SMALL_AND_LARGE = torch.logspace(-30, 3, 2000)
T = torch.cat([torch.linspace(-12, 12, 200_001), SMALL_AND_LARGE, -SMALL_AND_LARGE])


def exact(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    t = T.double().requires_grad_()
    value = moa.ACTIVATIONS[name](t)
    (slope,) = torch.autograd.grad(value.sum(), t)
    return value.detach(), slope


@pytest.mark.parametrize("in_one_loop", [False, True])
@pytest.mark.parametrize("name", SLOPES)
def test_values_and_slopes_are_exact_to_a_few_roundings(name, in_one_loop):
    value, slope = exact(name)
    at = Point(T, with_slopes=True, in_one_loop=in_one_loop)
    (ours,), (our_slope,) = at.values([name]), at.slopes([name])
    scale, tolerance = value.abs().clamp(min=1), 3e-7 if in_one_loop else 2e-6  # torch's erf, which is one of them
    assert ((ours - value).abs() / scale).max() < tolerance
    assert ((our_slope - slope).abs() / slope.abs().clamp(min=1)).max() < 1e-6
    (without,) = Point(T, with_slopes=False, in_one_loop=in_one_loop).values([name])
    assert ((without - value).abs() / scale).max() < tolerance


def test_small_values_of_tanh_keep_their_digits():
    (ours,) = Point(T, with_slopes=True, in_one_loop=True).values(["tanh"])
    expected = torch.tanh(T.double())
    assert ((ours - expected).abs() / expected.abs().clamp(min=1e-300)).max() < 5e-7


@pytest.mark.parametrize("name", SLOPES)
def test_at_the_ends_of_the_numbers(name):
    t = torch.tensor([math.nan, 1e30, -1e30, 0.0])
    (ours,) = Point(t, with_slopes=True, in_one_loop=True).values([name])
    torch.testing.assert_close(ours, moa.ACTIVATIONS[name](t), equal_nan=True)


def test_tails_keep_their_digits():
    """They are not differences of numbers close to 1: relative errors, as far as float32 has digits for them."""
    t = torch.linspace(-80, -1e-3, 100_001)
    at = Point(t, with_slopes=True, in_one_loop=True)
    expected = torch.nn.functional.silu(t.double())
    assert (at["silu"] / expected - 1).abs().max() < 1e-5
    assert at["gelu"][t < -14].abs().max() < 1e-37  # and so nothing is left over that would grow with t


def test_powers_of_two():
    t = torch.linspace(-126, 126, 100_001)
    assert (power_of_two(t) / torch.exp2(t.double()) - 1).abs().max() < 3e-7
    whole = torch.arange(-126.0, 127.0)
    torch.testing.assert_close(power_of_two(whole), torch.exp2(whole), rtol=2e-7, atol=0)


def test_no_coefficients_of_their_degrees_are_better():
    t = 0.5 * np.cos(np.linspace(0, np.pi, 1001))
    powers = t[:, None] ** np.arange(len(POWER_OF_TWO))
    found = polynomial(t, POWER_OF_TWO)
    assert np.abs(found / 2**t - 1).max() < 1.2 * least_error(2**t, 2**t, powers, np.empty((len(t), 0)))

    t = TANH_LIMIT * np.sin(np.linspace(1e-3, np.pi / 2, 1001))
    square = (t[:, None] / t.max()) ** 2  # scaled, for the linear problems to be well posed
    above, below = (t[:, None] * square ** np.arange(len(TANH_ABOVE)), square ** np.arange(1, len(TANH_BELOW)))
    found = t * polynomial(t * t, TANH_ABOVE) / polynomial(t * t, TANH_BELOW)
    assert np.abs(found - np.tanh(t)).max() < 1.2 * least_error(np.tanh(t), np.ones_like(t), above, below)
