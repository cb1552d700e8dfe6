"""The MoE layer: what it computes, beside a loop over single tokens and beside closed forms."""

import math

import pytest
import torch
from torch import Tensor

import moa
from lm.dispatch import grouped_linear, scatter_to_experts, sort_by_expert
from lm.moe import MoE, MoEConfig, balance_loss, balanced_bias, compute_dtype, z_loss
from moa import FFNConfig

D_MODEL = 12
SMALL = {"n_experts": 6, "top_k": 3, "expert_hidden_features": 7, "shared_hidden_features": 9}


def build(ffn: FFNConfig, seed: int = 0, **settings) -> MoE:
    """A layer in float64 whose every parameter is random, biases and coefficients too."""
    torch.manual_seed(seed)
    layer = MoE(MoEConfig(**(SMALL | settings)), ffn, D_MODEL).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def expert_alone(layer: MoE, ffn: FFNConfig, index: int) -> tuple[moa.FeedForward, dict[str, Tensor]]:
    """Expert number `index` as a `moa.FeedForward`, and its slice of the stacked parameters in that layer's names."""
    expert = layer.config.expert(ffn, D_MODEL).build(D_MODEL).double()
    stacked = dict(layer.experts.named_parameters())
    if layer.config.shared_gates:
        shared = dict(layer.shared.named_parameters())
        stacked |= {name: value.expand(6, *value.shape) for name, value in shared.items() if name[0] in "uvab"}

    def of_stack(name: str) -> str:
        return name if name in stacked else name.removesuffix(".weight").replace(".bias", "_bias")

    return expert, {name: stacked[of_stack(name)][index] for name, _ in expert.named_parameters()}


def token_by_token(layer: MoE, ffn: FFNConfig, x: Tensor) -> Tensor:
    """The layer's definition, one token and one expert at a time."""
    outputs = []
    for token in x:
        logits = layer.router.weight @ token
        scores = logits.softmax(0) if layer.config.scores == "softmax" else 1 / (1 + (-logits).exp())
        ranking = sorted(range(len(scores)), key=lambda i: -(scores[i] + layer.balance_bias[i]).item())
        chosen = ranking[: layer.config.top_k]
        total = sum(scores[i] for i in chosen) if layer.config.renormalise else 1.0
        out = torch.zeros_like(token)
        for i in chosen:
            expert, weights = expert_alone(layer, ffn, i)
            out = out + scores[i] / total * torch.func.functional_call(expert, weights, (token,))
        if layer.shared is not None:
            out = out + layer.shared(token)
        outputs.append(out)
    return torch.stack(outputs)


def gradients(layer: MoE, x: Tensor, out: Tensor) -> dict[str, Tensor]:
    upstream = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
    named = {"x": x, **dict(layer.named_parameters())}
    found = torch.autograd.grad((out * upstream).sum(), list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(named[name]) if g is None else g for name, g in zip(named, found, strict=True)}


EXPERTS = {
    "swiglu": FFNConfig("swiglu"),
    "one-moa": FFNConfig("one-moa"),
    "bi-moa": FFNConfig("bi-moa", gate="softmax"),
    "qd-moa": FFNConfig("qd-moa", gate="tanh", gate_bias=True),
    "two-layer ReLU with biases": FFNConfig("relu", bias=True),
    "moa with biases": FFNConfig("moa", bias=True, gate_bias=True),
    "one-la": FFNConfig("one-la"),
    "bi-la": FFNConfig("bi-la"),
    "qd-la with biases": FFNConfig("qd-la", bias=True),
}
SETTINGS = {
    "renormalised": {"renormalise": True},
    "sigmoid": {"scores": "sigmoid"},
    "sigmoid renormalised": {"scores": "sigmoid", "renormalise": True},
    "no shared expert": {"n_shared": 0, "shared_hidden_features": None},
    "two shared experts": {"n_shared": 2},
    "one expert a token": {"top_k": 1},
    "all experts": {"top_k": 6},
}


def check_against_definition(layer: MoE, ffn: FFNConfig, x: Tensor) -> None:
    out, _ = layer(x)
    expected = token_by_token(layer, ffn, x)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    found, wanted = gradients(layer, x, out), gradients(layer, x, expected)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("ffn", EXPERTS.values(), ids=EXPERTS)
def test_layer_and_every_gradient_equal_a_loop_over_tokens(ffn):
    layer = build(ffn)
    check_against_definition(layer, ffn, torch.randn(10, D_MODEL, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_of_the_router_equals_the_definition(settings):
    ffn = FFNConfig("one-moa")
    layer = build(ffn, **settings)
    check_against_definition(layer, ffn, torch.randn(9, D_MODEL, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("kind", ["one-moa", "bi-moa", "qd-la"])
def test_shared_gates_are_the_shared_experts(kind):
    ffn = FFNConfig(kind)
    layer = build(ffn, shared_gates=True)
    own = [name for name, _ in layer.experts.named_parameters()]
    assert own == ["w1", "w2", "w3"]
    check_against_definition(layer, ffn, torch.randn(9, D_MODEL, dtype=torch.float64, requires_grad=True))


def test_a_balance_bias_decides_who_is_chosen_and_not_how_much_it_counts():
    ffn = FFNConfig("swiglu")
    layer = build(ffn)
    layer.balance_bias.copy_(torch.linspace(-1, 1, 6))
    check_against_definition(layer, ffn, torch.randn(9, D_MODEL, dtype=torch.float64, requires_grad=True))


def test_every_kind_can_be_an_expert():
    for kind in moa.kinds():
        if moa.find_kind(kind).mixing is None:
            continue
        layer = MoE(MoEConfig(n_experts=4, top_k=2), FFNConfig(kind), D_MODEL)
        out, _ = layer(torch.randn(2, 5, D_MODEL))
        out.sum().backward()
        assert out.shape == (2, 5, D_MODEL)
        assert all(parameter.grad is not None for parameter in layer.parameters())


def test_a_registered_mixing_function_can_be_an_expert_and_a_class_cannot(monkeypatch):
    monkeypatch.setattr("moa.registry._KINDS", dict(moa.registry._KINDS))

    @moa.register("halved", family="fixed", projections=1)
    def halved(y, z, weights, activations):
        return y / 2

    @moa.register("of-a-class", family="fixed", projections=1)
    class OfAClass(moa.FeedForward):
        def mix(self, y, z, weights):
            return y

    ffn = FFNConfig("halved")
    check_against_definition(build(ffn), ffn, torch.randn(5, D_MODEL, dtype=torch.float64, requires_grad=True))
    with pytest.raises(ValueError, match=r"'of-a-class' cannot be an expert: it was registered as a class"):
        MoE(MoEConfig(), FFNConfig("of-a-class"), D_MODEL)


# Load that is not balanced.


def test_one_token_and_experts_without_tokens():
    ffn = FFNConfig("bi-moa", bias=True)
    layer = build(ffn)
    x = torch.randn(1, D_MODEL, dtype=torch.float64, requires_grad=True)
    check_against_definition(layer, ffn, x)
    out, routing = layer(x)
    out.sum().backward()
    assert routing.load.sum() == 3
    for name, parameter in layer.experts.named_parameters():
        for i in range(6):
            assert bool(parameter.grad[i].any()) == bool(routing.load[i]), f"{name} of expert {i}"


def test_all_tokens_to_the_same_experts():
    ffn = FFNConfig("one-moa")
    layer = build(ffn)
    layer.balance_bias.copy_(torch.tensor([5.0, 5, 5, 0, 0, 0]))
    check_against_definition(layer, ffn, torch.randn(20, D_MODEL, dtype=torch.float64, requires_grad=True))
    _, routing = layer(torch.randn(20, D_MODEL, dtype=torch.float64))
    assert routing.load.tolist() == [20, 20, 20, 0, 0, 0]


def test_no_token_is_dropped_whatever_the_load():
    layer = build(FFNConfig("swiglu"))
    for n_tokens in (1, 2, 17, 100):
        _, routing = layer(torch.randn(n_tokens, D_MODEL, dtype=torch.float64))
        assert int(routing.load.sum()) == 3 * n_tokens


# The two ways of multiplying.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [682, 853, 597, 8, 1])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_grouped_product_equals_the_loop(dtype, width, bias):
    """Widths that F.grouped_mm refuses, an expert without tokens, and an upstream gradient of stride 0."""
    generator = torch.Generator().manual_seed(0)
    n_experts, features = 5, 10
    groups = sort_by_expert(torch.tensor([[0, 3], [4, 3], [0, 1], [3, 0]]), n_experts)
    tensors = [torch.randn(shape, generator=generator) for shape in ((8, width), (n_experts, features, width))]
    tensors += [torch.randn(n_experts, features, generator=generator)] * bias
    results = []
    for dispatch in ("loop", "grouped"):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        out = grouped_linear(leaves[0], leaves[1], leaves[2] if bias else None, groups, dispatch)
        out.sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for looped, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, looped, rtol=tolerance, atol=tolerance * math.sqrt(width) / 10)
    assert not results[1][2][2].any()  # the gradient of the expert without tokens


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("kind", ["swiglu", "qd-moa", "moa"])
def test_grouped_layer_equals_looped_layer(kind, precision):
    results = []
    for dispatch in ("loop", "grouped"):
        torch.manual_seed(0)
        config = MoEConfig(n_experts=6, top_k=2, expert_hidden_features=13, dispatch=dispatch)
        layer = MoE(config, FFNConfig(kind, bias=True), 20)
        x = torch.randn(30, 20, requires_grad=True)
        if precision == "bfloat16":
            layer, x = layer.bfloat16(), x.detach().bfloat16().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            out, _ = layer(x)
        out.sum().backward()
        results.append([out, x.grad, *(parameter.grad for parameter in layer.parameters())])
    tolerance = 1e-5 if precision == "float32" else 2e-2
    for looped, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, looped, rtol=tolerance, atol=tolerance)


def test_autocast_computes_experts_in_bfloat16_and_the_router_in_float32():
    layer = MoE(MoEConfig(n_experts=4, top_k=2), FFNConfig("one-la"), 16)
    x = torch.randn(8, 16)
    seen = []
    layer.experts.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    exact = layer.route(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert compute_dtype(x) == torch.bfloat16
        assert torch.equal(layer.route(x)[0], exact)
        layer(x)
    assert seen == [torch.bfloat16]


def test_sorting_by_expert_keeps_tokens_in_order():
    experts = torch.tensor([[2, 0], [0, 2], [2, 3]])
    groups = sort_by_expert(experts, 5)
    assert groups.expert_N.tolist() == [0, 0, 2, 2, 2, 3]
    assert groups.order_N.tolist() == [1, 2, 0, 3, 4, 5]
    assert groups.ends_E.tolist() == [2, 2, 5, 6, 6]
    assert groups.load().tolist() == [2, 0, 3, 1, 0]
    x = torch.arange(3.0)[:, None]
    assert scatter_to_experts(x, groups, 2).flatten().tolist() == [0, 1, 0, 1, 2, 2]


# What keeps routers in balance.


def test_losses_and_entropy_equal_their_closed_forms():
    layer = build(FFNConfig("swiglu"), scores="sigmoid")
    x = torch.randn(40, D_MODEL, dtype=torch.float64)
    with torch.no_grad():
        _, routing = layer(x)
        logits = x @ layer.router.weight.T
    scores = 1 / (1 + (-logits).exp())
    probabilities = scores / scores.sum(1, keepdim=True)
    chosen = scores.argsort(1, descending=True)[:, :3]
    share = [(chosen == i).sum().item() / (40 * 3) for i in range(6)]
    expected = 6 * sum(f * probabilities[:, i].mean().item() for i, f in enumerate(share))
    assert float(routing.balance_loss) == pytest.approx(expected, rel=1e-12)
    assert float(routing.z_loss) == pytest.approx(logits.exp().sum(1).log().pow(2).mean().item(), rel=1e-12)
    entropy = -(probabilities * probabilities.log()).sum(1).mean().item() / math.log(6)
    assert float(routing.entropy) == pytest.approx(entropy, rel=1e-12)


def test_balance_loss_is_one_at_balance_and_the_number_of_experts_at_collapse():
    even = torch.full((8, 4), 0.25)
    assert float(balance_loss(even, torch.tensor([4, 4, 4, 4]))) == pytest.approx(1)
    collapsed = torch.tensor([1.0, 0, 0, 0]).expand(8, 4)
    assert float(balance_loss(collapsed, torch.tensor([8, 0, 0, 0]))) == pytest.approx(4)


def test_gradient_of_the_losses_lowers_them():
    layer = build(FFNConfig("swiglu"), n_experts=8)
    x = torch.randn(400, D_MODEL, dtype=torch.float64) + 1.0
    for loss in ("balance_loss", "z_loss"):
        before = getattr(layer(x)[1], loss)
        (gradient,) = torch.autograd.grad(before, layer.router.weight)
        with torch.no_grad():
            layer.router.weight -= 0.1 * gradient
        assert getattr(layer(x)[1], loss).item() < before.item()


def test_z_loss_of_equal_logits():
    assert float(z_loss(torch.zeros(5, 7))) == pytest.approx(math.log(7) ** 2)


def test_the_loss_free_bias_moves_load_toward_balance():
    layer = build(FFNConfig("swiglu"), n_experts=8, bias_update_rate=0.002)
    x = torch.randn(500, D_MODEL, dtype=torch.float64) + 1.0  # a mean that the router can favour experts by
    imbalance = []
    with torch.no_grad():
        layer.router.weight *= 0.2  # near the beginning of training, when scores are nearly equal
        for _ in range(200):
            _, routing = layer(x)
            imbalance.append(float(routing.load.max() / routing.load.double().mean()))
            layer.update_balance_bias(routing.load)
    assert imbalance[0] > 1.8
    assert imbalance[-1] < 1.15


def test_the_loss_free_bias_moves_by_the_sign_of_the_excess():
    bias = balanced_bias(torch.tensor([0.0, 1.0, 0.5, 0.0]), torch.tensor([10, 0, 4, 2]), 0.125)
    assert bias.tolist() == [-0.125, 1.125, 0.5, 0.125]


def test_the_bias_is_saved_and_has_no_gradient():
    layer = build(FFNConfig("swiglu"), bias_update_rate=0.1)
    layer.update_balance_bias(torch.tensor([9, 0, 0, 0, 0, 0]))
    assert "balance_bias" in layer.state_dict()
    assert "balance_bias" not in dict(layer.named_parameters())
    assert not layer.balance_bias.requires_grad
    other = build(FFNConfig("swiglu"), seed=1)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.balance_bias, layer.balance_bias)
    assert float(other.balance_bias[0]) == pytest.approx(-0.1)


# Inspection and initialisation.


def test_gates_are_those_of_the_chosen_experts():
    layer = build(FFNConfig("bi-moa"))
    x = torch.randn(4, D_MODEL, dtype=torch.float64)
    gates = layer.gates(x)
    assert gates.keys() == layer.gate_labels().keys() == {"pi", "rho"}
    *_, experts = layer.route(x)
    rows = sorted((int(expert), token) for token, row in enumerate(experts) for expert in row)
    for name, letter in (("pi", "u"), ("rho", "v")):
        expected = [(getattr(layer.experts, letter)[expert] @ x[token]).sigmoid() for expert, token in rows]
        torch.testing.assert_close(gates[name], torch.stack(expected))


def test_coefficients_are_means_over_the_experts():
    layer = build(FFNConfig("bi-la"))
    assert layer.gates(torch.randn(2, D_MODEL)) == {}
    assert layer.coefficients().keys() == layer.coefficient_labels().keys() == {"alpha", "beta"}
    torch.testing.assert_close(layer.coefficients()["beta"], layer.experts.beta.mean(0))


def test_initial_values():
    torch.manual_seed(0)
    layer = MoE(MoEConfig(n_experts=16), FFNConfig("one-moa", bias=True, gate_bias=True), 64)
    layer.reset_parameters(std=0.02, gate_std=0.5)
    for name, parameter in layer.named_parameters():
        expected = 0.0 if name.endswith("bias") else 0.5 if name.endswith((".u", "u.weight")) else 0.02
        assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.15), name
    la = MoE(MoEConfig(n_experts=4), FFNConfig("bi-la"), 16)
    la.reset_parameters(coefficient=0.25)
    assert (la.experts.alpha == 0.25).all()
    assert (la.experts.beta == 0.25).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_experts": 0}, "model.moe.n_experts is 0: it has to be at least 1"),
        ({"top_k": 33}, "model.moe.top_k is 33: there are only model.moe.n_experts 32"),
        ({"n_shared": -1}, "model.moe.n_shared is -1: it has to be 0 or more"),
        ({"balance_loss": -0.1}, "model.moe.balance_loss is -0.1"),
        ({"scores": "relu"}, "model.moe.scores is 'relu': choose one of softmax, sigmoid"),
        ({"dispatch": "fast"}, "choose one of auto, grouped, loop"),
        ({"n_shared": 0, "shared_gates": True}, "set model.moe.n_shared to at least 1"),
        ({"n_shared": 0, "shared_hidden_features": 8}, "leave one out"),
    ],
)
def test_bad_settings_are_named_in_one_line(settings, message):
    with pytest.raises(ValueError, match=r"model\.moe") as error:
        MoEConfig(**settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_that_do_not_go_together():
    with pytest.raises(ValueError, match=r"shared_gates does not apply to 'swiglu'"):
        MoE(MoEConfig(shared_gates=True), FFNConfig("swiglu"), D_MODEL)
    with pytest.raises(ValueError, match=r"set model\.moe\.expert_hidden_features"):
        MoE(MoEConfig(), FFNConfig("swiglu", hidden_features=8), D_MODEL)


def test_compiled_layer_equals_the_eager_one():
    torch.manual_seed(0)
    layer = MoE(MoEConfig(n_experts=4, top_k=2), FFNConfig("swiglu"), 16)
    x = torch.randn(12, 16)
    eager, routing = layer(x)
    layer.compile(backend="aot_eager")
    for n_tokens in (12, 7):
        compiled, compiled_routing = layer(x[:n_tokens])
        torch.testing.assert_close(compiled, eager[:n_tokens])
    assert int(compiled_routing.load.sum()) == 14
    compiled.sum().backward()
    assert layer.experts.w1.grad.isfinite().all()
    assert int(routing.load.sum()) == 24
