"""The module that users build: names, shapes, options, initialisation and errors."""

import pytest
import torch

import moa
from tests.moa.brute_force import DEFAULTS, KINDS, MIXTURES, MOA, TYPE_ONE

D_MODEL, HIDDEN, OUT = 6, 10, 3


def is_type_one(kind):
    return kind in TYPE_ONE or kind in ("la", "moa")


def rows(kind):
    m = len(DEFAULTS[kind])
    return m * (m + 1) // 2 if kind.startswith("qd") else m


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_has_the_papers_letters(kind):
    shapes = {"w1.weight": (HIDDEN, D_MODEL), "w1.bias": (HIDDEN,)}
    if is_type_one(kind):
        shapes |= {"w2.weight": (OUT, HIDDEN), "w2.bias": (OUT,)}
    else:
        shapes |= {"w2.weight": (HIDDEN, D_MODEL), "w2.bias": (HIDDEN,)}
        shapes |= {"w3.weight": (OUT, HIDDEN), "w3.bias": (OUT,)}
    for gate, constant in (("u", "alpha"), ("v", "beta")) if kind.startswith("bi-") else (("u", "alpha"),):
        if kind in MOA:
            shapes |= {f"{gate}.weight": (rows(kind), D_MODEL), f"{gate}.bias": (rows(kind),)}
        elif kind in MIXTURES:
            shapes[constant] = (rows(kind),)
    full = moa.build_ffn(kind, D_MODEL, HIDDEN, OUT, bias=True, gate_bias=kind in MOA)
    assert {name: tuple(value.shape) for name, value in full.state_dict().items()} == shapes
    bare = moa.build_ffn(kind, D_MODEL, HIDDEN, OUT)
    assert set(bare.state_dict()) == {name for name in shapes if not name.endswith(".bias")}


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_width_gives_every_kind_the_same_budget(kind):
    assert moa.hidden_features(kind, 768) == (3072 if is_type_one(kind) else 2048)
    assert moa.hidden_features(kind, 512) == (2048 if is_type_one(kind) else 1365)
    assert [int(8 * d / 3) for d in range(1, 5000)] == [moa.hidden_features("swiglu", d) for d in range(1, 5000)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_describes_itself(kind):
    layer = moa.build_ffn(kind, D_MODEL, HIDDEN, OUT)
    assert (layer.kind, layer.in_features, layer.hidden_features, layer.out_features) == (kind, D_MODEL, HIDDEN, OUT)
    assert isinstance(layer.activations, tuple)
    assert kind in repr(layer)
    assert moa.build_ffn(kind, D_MODEL, HIDDEN).out_features == D_MODEL


@pytest.mark.parametrize("shape", [(), (1,), (0,), (4,), (2, 3), (2, 0, 3), (2, 3, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_leading_shape_is_kept(kind, shape):
    layer = moa.build_ffn(kind, D_MODEL, HIDDEN, OUT)
    x = torch.randn(*shape, D_MODEL, requires_grad=True)
    output = layer(x)
    assert output.shape == (*shape, OUT)
    output.sum().backward()
    assert x.grad.shape == x.shape
    for name, gates in layer.gates(x).items():
        assert gates.shape == (*shape, len(layer.gate_labels()[name]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_see_its_neighbours(kind):
    layer = moa.build_ffn(kind, D_MODEL, HIDDEN, dtype=torch.float64)
    x = torch.randn(2, 5, D_MODEL, dtype=torch.float64)
    alone = torch.stack([torch.stack([layer(token) for token in sequence]) for sequence in x])
    torch.testing.assert_close(layer(x), alone)
    torch.testing.assert_close(layer(x.transpose(0, 1)), alone.transpose(0, 1))  # not contiguous


def test_gates_are_named_in_the_order_of_their_rows():
    assert moa.build_ffn("moa", 4, 4, activations="gt").gate_labels() == {"pi": ["gelu", "tanh"]}
    assert moa.build_ffn("bi-moa", 4, 4, activations="gt").gate_labels() == {
        "pi": ["id", "gelu", "tanh"],
        "rho": ["id", "gelu", "tanh"],
    }
    assert moa.build_ffn("qd-moa", 4, 4, activations="gt").gate_labels() == {
        "pi": ["id*id", "id*gelu", "id*tanh", "gelu*gelu", "gelu*tanh", "tanh*tanh"]
    }


def test_a_label_of_a_pair_names_the_activation_of_y_first():
    layer = moa.build_ffn("qd-moa", 4, 4, dtype=torch.float64, gate="softmax", gate_bias=True)
    x = torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        layer.u.weight.zero_()
        layer.u.bias.fill_(-1e3)[layer.gate_labels()["pi"].index("id*relu2")] = 0.0
    y, z = layer.w1(x), layer.w2(x)
    torch.testing.assert_close(layer(x), layer.w3(y * z.relu() ** 2))


@pytest.mark.parametrize("gate_bias", [False, True])
def test_gate_rows_that_somebody_wraps_or_hangs_on_are_called(gate_bias):
    layer = moa.build_ffn("bi-moa", 6, 10, gate_bias=gate_bias)
    x = torch.randn(3, 6)
    plain = layer.gates(x)
    layer.u = torch.nn.Sequential(layer.u)
    torch.testing.assert_close(layer.gates(x), plain)
    layer.v.register_forward_hook(lambda module, inputs, output: output + 1)
    changed = layer.gates(x)
    torch.testing.assert_close(changed["pi"], plain["pi"])
    torch.testing.assert_close(changed["rho"].logit(), plain["rho"].logit() + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_gates_belong_to_moa_and_coefficients_to_la(kind):
    layer, x = moa.build_ffn(kind, D_MODEL, HIDDEN), torch.randn(5, D_MODEL)
    gate_names = {"pi", "rho"} if kind == "bi-moa" else {"pi"} if kind in MOA else set()
    assert set(layer.gates(x)) == set(layer.gate_labels()) == gate_names
    is_la = kind in MIXTURES and kind not in MOA
    assert set(layer.coefficients()) == ({"alpha", "beta"} if kind == "bi-la" else {"alpha"} if is_la else set())
    assert layer.gate == ("sigmoid" if kind in MOA else None)


@pytest.mark.parametrize("kind", MOA)
def test_softmax_gates_sum_to_one_in_each_branch(kind):
    layer = moa.build_ffn(kind, D_MODEL, HIDDEN, gate="softmax")
    layer.reset_parameters(gate_std=1.0)
    for gates in layer.gates(torch.randn(2, 3, D_MODEL)).values():
        torch.testing.assert_close(gates.sum(-1), torch.ones(2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_initialisation_follows_its_arguments(kind):
    layer = moa.build_ffn(kind, 64, 96, bias=True, gate_bias=kind in MOA)

    def check(std, gate_std, coefficient):
        for name, value in layer.named_parameters():
            if name in ("alpha", "beta"):
                assert (value == coefficient).all()
            elif name.endswith("bias"):
                assert (value == 0).all()
            else:
                assert value.std().item() == pytest.approx(gate_std if name[0] in "uv" else std, rel=0.2)
                assert abs(value.mean().item()) < 0.01

    check(0.02, 0.02, 0.5)
    layer.reset_parameters(std=0.05)
    check(0.05, 0.05, 0.5)
    layer.reset_parameters(std=0.03, gate_std=0.01, coefficient=0.25)
    check(0.03, 0.01, 0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_made_on_the_meta_device_is_filled_by_reset_parameters(kind):
    options = {"bias": True, "gate_bias": kind in MOA}
    layer = moa.build_ffn(kind, D_MODEL, HIDDEN, device="meta", **options)
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    usual = moa.build_ffn(kind, D_MODEL, HIDDEN, **options)
    torch.manual_seed(1)
    usual.reset_parameters()
    for ours, expected in zip(layer.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_and_device_reach_every_parameter(kind):
    layer = moa.build_ffn(kind, D_MODEL, HIDDEN, dtype=torch.bfloat16, device="cpu", bias=True)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer(torch.randn(4, D_MODEL, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_autocast_keeps_the_hidden_activation_in_low_precision(kind, gate):
    """Float32 coefficients or softmax gates must not promote (..., D), the largest tensor of the layer."""
    layer = moa.build_ffn(kind, D_MODEL, HIDDEN, gate=gate if kind in MOA else "sigmoid")
    seen = []
    layer.drop.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.randn(4, D_MODEL)).sum().backward()
    assert seen == [torch.bfloat16]
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["gelu", "swiglu", "bi-la", "qd-moa"])
def test_dropout_acts_on_the_hidden_activation_and_only_in_training(kind):
    layer = moa.build_ffn(kind, D_MODEL, HIDDEN, drop=0.5)
    hidden = []
    layer.drop.register_forward_hook(lambda module, inputs, output: hidden.append((inputs[0], output)))
    x = torch.randn(64, D_MODEL)
    layer(x)
    layer.eval()
    torch.testing.assert_close(layer(x), layer(x), rtol=0, atol=0)
    before, after = hidden[0]
    assert before.shape == (64, HIDDEN)
    assert 0.3 < (after == 0).float().mean() < 0.7
    assert all(torch.equal(*pair) for pair in hidden[1:])


@pytest.mark.parametrize("kind", ["relu2", "swiglu", *MIXTURES])
def test_a_layer_is_one_graph_for_the_compiler(kind):
    torch.compiler.reset()  # each kind is another graph of the same code, and the compiler keeps only eight
    layer = moa.build_ffn(kind, D_MODEL, HIDDEN)
    x = torch.randn(4, D_MODEL)
    torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


def test_an_unknown_name_is_an_error_that_lists_the_valid_ones():
    for call in (moa.build_ffn, moa.hidden_features):
        with pytest.raises(ValueError, match="unknown kind 'qdmoa'") as error:
            call("qdmoa", *([4, 4] if call is moa.build_ffn else [4]))
        assert all(kind in str(error.value) for kind in KINDS)
    with pytest.raises(ValueError, match="unknown kind"):
        moa.default_activations("qdmoa")
    with pytest.raises(ValueError, match="unknown gate 'relu'; valid gates: sigmoid, tanh, softmax"):
        moa.build_ffn("moa", 4, 4, gate="relu")
    with pytest.raises(ValueError, match="unknown gate 'relu'"):
        moa.build_ffn("swiglu", 4, 4, gate="relu")
    with pytest.raises(ValueError, match=r"unknown activation 'gelo'.*id, gelu, silu, relu2, leaky_relu, tanh, relu"):
        moa.build_ffn("moa", 4, 4, activations=["gelo"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_that_does_not_apply_is_an_error_that_names_the_kinds_that_take_it(kind):
    if kind not in MIXTURES:
        with pytest.raises(ValueError, match=rf"activations=.* does not apply to '{kind}'.*la, one-la") as error:
            moa.build_ffn(kind, 4, 4, activations=["tanh", "id"])
        assert "\n" not in str(error.value)
        moa.build_ffn(kind, 4, 4, activations=moa.default_activations(kind))
    if kind not in MOA:
        for options in ({"gate": "tanh"}, {"gate_bias": True}):
            with pytest.raises(ValueError, match=rf"does not apply to '{kind}'.*: moa, one-moa, bi-moa, qd-moa"):
                moa.build_ffn(kind, 4, 4, **options)
        moa.build_ffn(kind, 4, 4, gate="sigmoid", gate_bias=False)


@pytest.mark.parametrize("sizes", [(0, 4, 4), (4, -1, 4), (4, 4, 0), (4, 2.5, 4)])
def test_an_impossible_size_is_an_error(sizes):
    with pytest.raises(ValueError, match="must be a positive integer"):
        moa.build_ffn("swiglu", *sizes)
