"""Closed forms against real modules, torch's own FLOP counter, and the sizes of the paper's models."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import moa
from tests.moa.brute_force import KINDS, MIXTURES, MOA

VOCABULARY = 50_304


def options_of(kind):
    """Every combination of the options that the counts depend on."""
    for bias, out_features in itertools.product((False, True), (None, 3)):
        for activations in (None, "gr2", ["tanh"]) if kind in MIXTURES else (None,):
            for gate_bias in (False, True) if kind in MOA else (False,):
                yield {
                    "bias": bias,
                    "out_features": out_features,
                    "activations": activations,
                    "gate_bias": gate_bias,
                }


@pytest.mark.parametrize("kind", KINDS)
def test_the_counts_equal_those_of_the_module(kind):
    x = torch.randn(7, 6)
    for options in options_of(kind):
        layer = moa.build_ffn(kind, 6, 10, **options)
        assert moa.num_parameters(kind, 6, 10, **options) == sum(p.numel() for p in layer.parameters()), options
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert 7 * moa.flops_per_token(kind, 6, 10, **options) == counter.get_total_flops(), options


def llama_parameters(kind, d, n_layers, hidden=None, activations=None):
    ffn = moa.num_parameters(kind, d, hidden or moa.hidden_features(kind, d), activations=activations)
    return 2 * VOCABULARY * d + n_layers * (4 * d * d + 2 * d + ffn) + d


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("swiglu", {}, 119_744_256),
        ("relu2", {}, 119_744_256),
        ("swiglu", {"hidden": 2053}, 119_813_376),  # Llama-large, the control with d_FF + 5
        ("moa", {}, 119_767_296),
        ("one-moa", {}, 119_776_512),
        ("bi-moa", {}, 119_808_768),
        ("bi-moa", {"activations": ["gelu", "silu", "relu2", "leaky_relu", "tanh", "relu"]}, 119_799_552),
        ("qd-moa", {}, 119_790_336),
    ],
)
def test_the_012b_models_have_the_papers_sizes(kind, options, expected):
    assert llama_parameters(kind, 768, 6, **options) == expected


def test_the_larger_baselines_have_the_papers_sizes():
    assert llama_parameters("swiglu", 1024, 12) == 254_018_560
    assert llama_parameters("swiglu", 1280, 19) == 502_359_040


def test_learned_coefficients_cost_a_handful_of_scalars():
    swiglu = moa.num_parameters("swiglu", 768, 2048)
    assert moa.num_parameters("one-la", 768, 2048) - swiglu == 7
    assert moa.num_parameters("bi-la", 768, 2048) - swiglu == 14
    assert moa.num_parameters("qd-la", 768, 2048) - swiglu == 10
    assert moa.num_parameters("la", 768, 3072) - moa.num_parameters("relu2", 768, 3072) == 5


def test_an_expert_may_be_the_standard_two_layer_network_with_biases():
    d, D = 640, 426
    assert moa.num_parameters("gelu", d, D, bias=True) == 2 * d * D + D + d
    assert moa.num_parameters("swiglu", d, D) == 3 * d * D


def test_the_counts_refuse_what_build_ffn_refuses():
    for count in (moa.num_parameters, moa.flops_per_token):
        with pytest.raises(ValueError, match="unknown kind 'moe'"):
            count("moe", 6, 10)
        with pytest.raises(ValueError, match="does not apply to 'swiglu'"):
            count("swiglu", 6, 10, activations=["relu"])
        with pytest.raises(ValueError, match="gate_bias=True does not apply to 'bi-la'"):
            count("bi-la", 6, 10, gate_bias=True)
        with pytest.raises(ValueError, match="hidden_features must be a positive integer, not 0"):
            count("gelu", 6, 0)
