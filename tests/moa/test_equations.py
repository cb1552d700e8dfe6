"""The layers against independent answers: the equations by loops, finite differences, and each other."""

import itertools

import pytest
import torch
from torch.func import functional_call

import moa
from tests.moa import brute_force
from tests.moa.brute_force import KINDS, MIXTURES, MOA

DICTIONARIES = (None, ["tanh", "id"], "gr2t")
KINDS_AND_GATES = [(k, g) for k in KINDS for g in (("sigmoid", "tanh", "softmax") if k in MOA else ("sigmoid",))]
NAMES_OF_LETTERS = ["gelu", "relu2", "tanh"]


def randomized(kind, *sizes, seed=0, **options):
    """A float64 layer whose every parameter, biases and coefficients too, is drawn from N(0, 1)."""
    layer = moa.build_ffn(kind, *sizes, dtype=torch.float64, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


def expected_names(kind, activations):
    if kind not in MIXTURES:
        return None
    if activations is None:
        return brute_force.DEFAULTS[kind]
    if isinstance(activations, str):
        return NAMES_OF_LETTERS if kind in ("la", "moa") else ["id", *NAMES_OF_LETTERS]
    return activations


@pytest.mark.parametrize(("kind", "gate"), KINDS_AND_GATES)
def test_every_kind_equals_its_equation_evaluated_by_loops(kind, gate):
    dictionaries = DICTIONARIES if kind in MIXTURES else (None,)
    gate_biases = (False, True) if kind in MOA else (False,)
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for activations, bias, gate_bias in itertools.product(dictionaries, (False, True), gate_biases):
        layer = randomized(
            kind, 5, 4, out_features=3, activations=activations, gate=gate, bias=bias, gate_bias=gate_bias
        )
        state, names = layer.state_dict(), expected_names(kind, activations)
        by_loops = [[brute_force.feed_forward(kind, state, t, names, gate) for t in row] for row in x.tolist()]
        torch.testing.assert_close(layer(x), torch.tensor(by_loops, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_the_loops_know_every_kind():
    assert moa.kinds()[: len(KINDS)] == list(KINDS)


def layer_and_input_away_from_kinks(kind, **options):
    """ReLU and its relatives have no derivative at 0, so finite differences need |y| and |z| well above their step."""
    for seed in range(100):
        layer = randomized(kind, 3, 2, seed=seed, **options)
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed + 1000), dtype=torch.float64)
        branches = [layer.w1(x)] if layer.w3 is None else [layer.w1(x), layer.w2(x)]
        if min(branch.abs().min().item() for branch in branches) > 0.05:
            return layer, x.requires_grad_()
    raise AssertionError("no such input found")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "gate"), KINDS_AND_GATES)
def test_gradients_equal_finite_differences(kind, gate, bias):
    layer, x = layer_and_input_away_from_kinks(kind, gate=gate, bias=bias, gate_bias=bias and kind in MOA)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def forward(x, *values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(forward, (x, *parameters))


def copy_projections(source, target):
    target.load_state_dict({**target.state_dict(), **{k: v for k, v in source.state_dict().items() if k[0] == "w"}})


@pytest.mark.parametrize(
    ("kind", "fixed", "ones"),
    [
        *[("la", name, {"alpha": [name]}) for name in brute_force.DEFAULTS["la"]],
        ("one-la", "swiglu", {"alpha": ["id"]}),
        *[("bi-la", name, {"beta": [s], "alpha": ["id"]}) for name, s in brute_force.TYPE_TWO.items()],
    ],
)
def test_la_with_one_unit_coefficient_equals_the_fixed_kind(kind, fixed, ones):
    learned, plain = randomized(kind, 5, 4), randomized(fixed, 5, 4, seed=3)
    copy_projections(plain, learned)
    with torch.no_grad():
        for name, values in learned.coefficients().items():
            values.copy_(torch.tensor([float(sigma in ones[name]) for sigma in learned.activations]))
    x = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(learned(x), plain(x), rtol=0, atol=1e-12)


def test_qd_la_with_one_unit_coefficient_equals_bilinear_and_swiglu_with_swapped_branches():
    learned, x = randomized("qd-la", 5, 4), torch.randn(7, 5, dtype=torch.float64)
    alpha = learned.coefficients()["alpha"]
    with torch.no_grad():
        alpha.zero_()[0] = 1.0  # id*id
    y, z = learned.w1(x), learned.w2(x)
    torch.testing.assert_close(learned(x), learned.w3(y * z))
    with torch.no_grad():
        alpha.zero_()[2] = 1.0  # id*silu: with k <= l the identity, which comes first, stays on the left
    torch.testing.assert_close(learned(x), learned.w3(y * torch.nn.functional.silu(z)))


INVERSE_GATE = {"sigmoid": torch.logit, "tanh": torch.atanh, "softmax": torch.log}


@pytest.mark.parametrize("gate", INVERSE_GATE)
@pytest.mark.parametrize("kind", MOA)
def test_moa_with_zero_rows_and_a_gate_bias_equals_la(kind, gate):
    gated = randomized(kind, 5, 4, gate=gate, gate_bias=True)
    learned = randomized(kind.replace("moa", "la"), 5, 4)
    copy_projections(gated, learned)
    with torch.no_grad():
        for gate_name, coefficients in zip("uv", learned.coefficients().values(), strict=False):
            coefficients.copy_(torch.softmax(coefficients, 0))  # in (0, 1), summing to one: every gate can give it
            row = gated.get_submodule(gate_name)
            row.weight.zero_()
            row.bias.copy_(INVERSE_GATE[gate](coefficients))
    x = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(gated(x), learned(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", MOA)
def test_sigmoid_moa_without_its_gate_rows_equals_a_fresh_la(kind):
    gated, learned = moa.build_ffn(kind, 5, 4), moa.build_ffn(kind.replace("moa", "la"), 5, 4)
    gated.reset_parameters(gate_std=0.0)
    copy_projections(gated, learned)
    x = torch.randn(7, 5)
    torch.testing.assert_close(gated(x), learned(x))


@pytest.mark.parametrize("letters", ["g", "gs", "gsr2", "gsr2l", "gsr2lt", "gsr2ltr"])
@pytest.mark.parametrize("kind", [kind for kind in MIXTURES if kind not in MOA])
def test_an_additional_activation_with_zero_weight_changes_nothing(kind, letters):
    """Dictionaries grow from left to right (section 5.1); a grown LA contains the smaller one."""
    small = randomized(kind, 5, 4, activations=letters)
    grown = randomized(kind, 5, 4, activations="gsr2ltr")
    copy_projections(small, grown)
    with torch.no_grad():
        for name, values in grown.coefficients().items():
            old = dict(zip(labels(small), small.coefficients()[name], strict=True))
            values.copy_(torch.stack([torch.as_tensor(old.get(label, 0.0)).double() for label in labels(grown)]))
    x = torch.randn(7, 5, dtype=torch.float64)
    torch.testing.assert_close(grown(x), small(x))


def labels(layer):
    names = layer.activations
    return [(a, b) for i, a in enumerate(names) for b in names[i:]] if layer.kind.startswith("qd") else list(names)
