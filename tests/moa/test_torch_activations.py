"""What torch's kernels compute of an activation and its slope is that of `moa.activations`, wherever t lies."""

import math

import pytest
import torch

import moa
from moa.kernels.torch_activations import SLOPES, Point

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
