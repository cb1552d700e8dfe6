"""How a dictionary of activations is written, and what is in it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moa
from tests.moa import brute_force

LETTERS = {"g": "gelu", "s": "silu", "r2": "relu2", "l": "leaky_relu", "t": "tanh", "r": "relu"}


def test_every_activation_equals_its_formula():
    assert list(moa.ACTIVATIONS) == list(brute_force.SIGMA)
    t = torch.linspace(-6, 6, 201, dtype=torch.float64)
    for name, sigma in moa.ACTIVATIONS.items():
        expected = torch.tensor([brute_force.SIGMA[name](value) for value in t.tolist()], dtype=torch.float64)
        torch.testing.assert_close(sigma(t), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", brute_force.KINDS)
def test_default_dictionaries_are_those_of_table_1(kind):
    fixed = [brute_force.TYPE_TWO.get(kind, kind)]
    expected = brute_force.DEFAULTS.get(kind, fixed)
    assert moa.default_activations(kind) == expected
    assert moa.build_ffn(kind, 4, 4).activations == tuple(expected)


@pytest.mark.parametrize(
    ("letters", "names"),
    [
        ("gsr2l", ["gelu", "silu", "relu2", "leaky_relu"]),
        ("gsr2lr", ["gelu", "silu", "relu2", "leaky_relu", "relu"]),
        ("rr2", ["relu", "relu2"]),
        ("r2r", ["relu2", "relu"]),
        ("t", ["tanh"]),
    ],
)
def test_letters_are_the_papers_and_imply_the_identity_for_type_two_mixtures(letters, names):
    for kind in brute_force.MIXTURES:
        expected = names if kind in ("la", "moa") else ["id", *names]
        assert list(moa.build_ffn(kind, 4, 4, activations=letters).activations) == expected


def test_the_papers_best_strings_are_the_defaults():
    assert moa.build_ffn("moa", 4, 4, activations="gsr2lr").activations == tuple(moa.default_activations("moa"))
    assert moa.build_ffn("qd-moa", 4, 4, activations="gsr2").activations == tuple(moa.default_activations("qd-moa"))
    assert moa.build_ffn("bi-la", 4, 4, activations="gsr2ltr").activations == tuple(moa.default_activations("bi-la"))


def test_a_list_of_names_is_taken_as_it_stands():
    assert moa.build_ffn("qd-moa", 4, 4, activations=["tanh", "relu"]).activations == ("tanh", "relu")


@given(st.permutations(sorted(LETTERS)), st.integers(1, len(LETTERS)), st.booleans())
def test_any_order_of_letters_parses_to_their_names(letters, length, with_identity):
    chosen = letters[:length]
    names = [LETTERS[letter] for letter in chosen]
    assert list(moa.parse_activations("".join(chosen), with_identity=with_identity)) == ["id"] * with_identity + names


wild = st.text("gsr2lt", max_size=6) | st.text(max_size=6) | st.binary(max_size=3) | st.integers() | st.none()
wild_lists = st.lists(st.sampled_from(sorted(moa.ACTIVATIONS)) | wild | st.lists(wild, max_size=2), max_size=9)


@given(wild | wild_lists | st.dictionaries(st.text(), st.text(), max_size=2))
def test_whatever_is_given_parses_to_distinct_known_names_or_one_line_that_lists_the_valid_ones(spec):
    try:
        names = moa.parse_activations(spec)
    except ValueError as error:
        message = str(error)
        assert all(name in message for name in moa.ACTIVATIONS)
        assert len(message.splitlines()) == 1
    else:
        assert names
        assert len(set(names)) == len(names)
        assert set(names) <= set(moa.ACTIVATIONS)


def test_softmax_gates_sum_to_one_and_all_gates_are_bounded():
    logits = 5 * torch.randn(50, 7)
    torch.testing.assert_close(moa.GATES["softmax"](logits).sum(-1), torch.ones(50))
    for gate in moa.GATES.values():
        assert gate(logits).abs().max() <= 1.0
