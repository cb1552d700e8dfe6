"""A kind is added in one place, and everything knows it."""

import inspect
import textwrap

import pytest
import torch

import moa
from moa import registry


@pytest.fixture(autouse=True)
def _table_as_before(monkeypatch):
    monkeypatch.setattr(registry, "_KINDS", dict(registry._KINDS))


def run_docstring_examples():
    """Runs the indented code of `moa.register`'s docstring, so that it cannot go stale."""
    body = inspect.getdoc(moa.register).split("Args:")[0]
    code = [line for line in body.splitlines() if line.startswith("    ") or not line]
    exec(textwrap.dedent("\n".join(code)), {})


def test_the_examples_in_the_docstring_work_everywhere():
    run_docstring_examples()
    assert moa.kinds()[-2:] == ["diagonal-moa", "prelu"]
    assert moa.hidden_features("diagonal-moa", 768) == 2048
    assert moa.hidden_features("prelu", 768) == 3072
    assert moa.default_activations("diagonal-moa") == ["id", "gelu", "silu"]
    layer = moa.build_ffn("diagonal-moa", 8, 12, activations=["relu", "tanh"], gate="softmax")
    x = torch.randn(3, 8)
    assert layer.gates(x)["pi"].shape == (3, 2)
    assert layer.gate_labels() == {"pi": ["relu", "tanh"]}
    y, z, pi = layer.w1(x), layer.w2(x), layer.gates(x)["pi"]
    expected = pi[:, :1] * y.relu() * z.relu() + pi[:, 1:] * y.tanh() * z.tanh()
    torch.testing.assert_close(layer(x), layer.w3(expected))


def test_a_registered_class_keeps_its_own_parameters():
    run_docstring_examples()
    layer = moa.build_ffn("prelu", 8, 32, bias=True)
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), layer.w2(torch.nn.functional.prelu(layer.w1(x), torch.tensor([0.25]))))
    assert moa.num_parameters("prelu", 8, 32, bias=True) == sum(p.numel() for p in layer.parameters())
    assert moa.flops_per_token("prelu", 8, 32) == moa.flops_per_token("relu", 8, 32)
    layer.slope.data.zero_()
    layer.reset_parameters()
    assert layer.slope.item() == 0.25
    assert moa.timm_mlp("prelu")(in_features=8).state_dict().keys() == layer.state_dict().keys()


def test_a_registered_kind_appears_in_the_lists_of_valid_names():
    run_docstring_examples()
    with pytest.raises(ValueError, match="diagonal-moa"):
        moa.build_ffn("nothing", 4, 4)
    with pytest.raises(ValueError, match=r"kinds that take it: .*diagonal-moa"):
        moa.build_ffn("swiglu", 4, 4, gate="tanh")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "swiglu"}, "already registered"),
        ({"family": "moe"}, "unknown family 'moe'; valid families: fixed, la, moa"),
        ({"projections": 3}, "projections must be 1"),
        ({"slots": ("rho",)}, "slots must be"),
        ({"activations": ()}, "activations is empty"),
        ({"activations": ["gelo"]}, "unknown activation 'gelo'"),
    ],
)
def test_a_wrong_field_is_an_error(fields, message):
    valid = {"name": "new", "family": "moa", "projections": 1, "activations": ["relu"]}
    with pytest.raises(ValueError, match=message):
        moa.register(**{**valid, **fields})


def test_a_registered_class_must_be_a_layer():
    with pytest.raises(ValueError, match=r"must derive from moa\.FeedForward"):
        moa.register("new", family="fixed", projections=1)(torch.nn.Linear)
    assert "new" not in moa.kinds()


def test_a_class_without_a_mix_of_its_own_says_so():
    @moa.register("unmixed", family="fixed", projections=1)
    class Unmixed(moa.FeedForward):
        pass

    with pytest.raises(NotImplementedError, match=r"'unmixed', must define mix\(\)"):
        moa.build_ffn("unmixed", 4, 4)(torch.randn(1, 4))
