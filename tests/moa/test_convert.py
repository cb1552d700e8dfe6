"""`moa.convert` on real models of timm and transformers, whose outputs before are the independent answer."""

import copy
import warnings

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import GluMlp, Mlp, SwiGLU, SwiGLUPacked
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.activations import QuickGELUActivation

import moa

GATES = ("sigmoid", "tanh", "softmax")
GATED_LA, GATED_MOA = ("one-la", "bi-la", "qd-la"), ("one-moa", "bi-moa", "qd-moa")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.arange(18).view(2, 9) + 3


def language_model(config_class=LlamaConfig, model_class=LlamaForCausalLM, **options):
    torch.manual_seed(0)
    # Ten times the usual scale, so that the activations bend and the layers matter to the logits.
    return model_class(config_class(**SIZES, initializer_range=0.2, **options)).eval()


def in_a_block(ffn):
    """A model of one residual block."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ffn = ffn

        def forward(self, x):
            return x + self.ffn(x)

    return nn.Sequential(Block()).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_small_patch16_224", img_size=32).eval()


@pytest.fixture(scope="module")
def llama():
    return language_model()


def test_a_timm_vit_keeps_its_outputs(vit):
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = vit(images)
        for kind, gate in [("la", "sigmoid"), ("gelu", "sigmoid"), *(("moa", gate) for gate in GATES)]:
            model = copy.deepcopy(vit)
            report = moa.convert(model, kind, gate=gate)
            torch.testing.assert_close(model(images), before, rtol=0, atol=1e-4 if kind == "moa" else 0)
            assert [row.name for row in report.replaced] == [f"blocks.{n}.mlp" for n in range(12)]
            assert report.left == {}
            per_layer = {"gelu": 0, "la": 5, "moa": 5 * (384 + 1)}[kind]
            assert [row.added for row in report.replaced] == 12 * [per_layer]
            grown = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in vit.parameters())
            assert report.added == grown == 12 * per_layer


@pytest.mark.parametrize("kind", [*GATED_LA, "swiglu"])
def test_a_llama_keeps_every_bit_of_its_logits_in_la_kinds(llama, kind):
    model = copy.deepcopy(llama)
    report = moa.convert(model, kind)
    assert torch.equal(logits(model), logits(llama))
    assert report.error == 0
    assert {type(layer.mlp) for layer in model.model.layers} == {moa.FeedForward}
    assert [layer.mlp.kind for layer in model.model.layers] == [kind, kind]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", GATED_MOA)
def test_a_llama_keeps_its_logits_in_moa_kinds(llama, kind, gate):
    model = copy.deepcopy(llama)
    report = moa.convert(model, kind, gate=gate)
    tolerance = 1e-6 if gate == "tanh" else 1e-4
    torch.testing.assert_close(logits(model), logits(llama), rtol=0, atol=tolerance * logits(llama).abs().max().item())
    assert report.error <= (0 if gate == "tanh" else 1e-4)
    gates = model.model.layers[0].mlp.gates(torch.randn(5, 32))
    for weights in gates.values():
        assert ((weights > 0.4).sum(dim=-1) == 1).all(), "one gate is open"
        assert ((weights.abs() < 1e-6).sum(dim=-1) == weights.shape[-1] - 1).all(), "and the others are shut"


@pytest.mark.parametrize(
    ("config", "model_class", "options", "kind"),
    [
        (Qwen2Config, Qwen2ForCausalLM, {"num_key_value_heads": 2}, "bi-moa"),
        (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8, "num_key_value_heads": 2}, "qd-moa"),
        (MistralConfig, MistralForCausalLM, {"num_key_value_heads": 2}, "one-moa"),
        (Phi3Config, Phi3ForCausalLM, {}, "qd-moa"),  # fused gate and up weights, which are split
        (LlamaConfig, LlamaForCausalLM, {"mlp_bias": True}, "qd-moa"),
        (LlamaConfig, LlamaForCausalLM, {"hidden_act": "gelu"}, "bi-moa"),
        (GPTNeoXConfig, GPTNeoXForCausalLM, {}, "moa"),
    ],
)
def test_models_of_other_families_keep_their_logits(config, model_class, options, kind):
    model = language_model(config, model_class, **options)
    before = logits(model)
    for family, tolerance in (("la", 1e-6), ("moa", 1e-4)):
        converted = copy.deepcopy(model)
        assert len(moa.convert(converted, kind.replace("moa", family)).replaced) == 2
        torch.testing.assert_close(logits(converted), before, rtol=0, atol=tolerance * before.abs().max().item())


@pytest.mark.parametrize("activations", [["id", "silu"], ["silu", "id"], ["gelu", "silu", "relu", "id"]])
@pytest.mark.parametrize("kind", ["qd-la", "qd-moa"])
def test_a_quadratic_kind_holds_swiglu_whichever_comes_first_in_its_dictionary(llama, kind, activations):
    model = copy.deepcopy(llama)
    moa.convert(model, kind, activations=activations, **({"gate": "tanh"} if kind == "qd-moa" else {}))
    torch.testing.assert_close(logits(model), logits(llama), rtol=0, atol=1e-6)
    old, new = llama.model.layers[0].mlp, model.model.layers[0].mlp
    swapped = activations.index("id") < activations.index("silu")
    assert torch.equal(new.w1.weight, (old.up_proj if swapped else old.gate_proj).weight)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", GATED_MOA)
def test_one_training_step_reaches_and_moves_every_gate(llama, kind, gate):
    model = copy.deepcopy(llama)
    moa.convert(model, kind, gate=gate)
    gates = {name: p for name, p in model.named_parameters() if ".u." in name or ".v." in name}
    before = {name: p.detach().clone() for name, p in gates.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    for p in gates.values():
        rows = p.grad if p.ndim == 2 else p.grad[:, None]
        assert (rows.abs().amax(dim=1) > 0).all()
    optimizer.step()
    for name, p in gates.items():
        moved = (p - before[name]).abs()
        assert (moved > 1e-4).all() if p.ndim == 1 else (moved.amax(dim=1) > 1e-4).all()
    assert model(IDS, labels=IDS).loss < loss


def test_la_coefficients_learn(llama):
    model = copy.deepcopy(llama)
    moa.convert(model, "bi-la")
    model(IDS, labels=IDS).loss.backward()
    mlp = model.model.layers[1].mlp
    assert sorted(mlp.alpha.tolist()) == sorted(mlp.beta.tolist()) == [0] * 6 + [1]
    assert (mlp.alpha.grad != 0).all()
    assert (mlp.beta.grad != 0).all()


def test_a_converted_llama_generates_and_its_state_dict_loads_into_another(llama, tmp_path):
    model, twin = copy.deepcopy(llama), language_model(tie_word_embeddings=False)
    moa.convert(model, "qd-moa")
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(model.generate(IDS, **options), llama.generate(IDS, **options))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    moa.convert(twin, "qd-moa")
    twin.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(logits(twin), logits(model))


def test_the_weights_are_the_same_parameters_in_their_own_type_mode_and_freezing():
    model = language_model().to(torch.bfloat16).train()
    old = model.model.layers[0].mlp
    old.gate_proj.weight.requires_grad_(False)
    kept = (old.gate_proj.weight, old.up_proj.weight, old.down_proj.weight)
    down = old.down_proj.weight.detach().clone()
    moa.convert(model, "one-moa")
    new = model.model.layers[0].mlp
    assert (new.w1.weight, new.w2.weight, new.w3.weight) == kept
    assert all(p.dtype == torch.bfloat16 for p in new.parameters())
    assert [p.requires_grad for p in kept] == [False, True, True]
    assert new.u.weight.requires_grad
    assert new.training
    # An open sigmoid gate weighs 1/2, which no rounding spoils.
    assert torch.equal(new.w3.weight, 2 * down)


@pytest.mark.parametrize("kind", ["qd-moa", "bi-la", "reglu"])
def test_a_fresh_start_keeps_the_projections_and_nothing_else(llama, kind):
    model = copy.deepcopy(llama)
    report = moa.convert(model, kind, init="fresh")
    old, new = llama.model.layers[0].mlp, model.model.layers[0].mlp
    for ours, theirs in ((new.w1, old.gate_proj), (new.w2, old.up_proj), (new.w3, old.down_proj)):
        assert torch.equal(ours.weight, theirs.weight)
    assert all((value == 0.5).all() for value in new.coefficients().values())
    if kind == "qd-moa":
        assert new.u.bias is None
        assert new.u.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert "fresh mixing weights" in str(report)


def test_a_fresh_start_takes_gates_with_bias_and_layers_whose_activation_is_not_ours():
    model = in_a_block(Mlp(8, 32, act_layer=nn.Mish))
    moa.convert(model, "moa", init="fresh", gate="softmax", gate_bias=True)
    assert (model[0].ffn.u.bias == 0).all()
    model(torch.randn(2, 8)).sum().backward()


@pytest.mark.parametrize(
    ("ffn", "kind"),
    [
        (Mlp(8, 32, act_layer=nn.ReLU), "moa"),
        (Mlp(8, 32, bias=(True, False), act_layer=nn.SiLU), "moa"),
        (Mlp(16, 8), "moa"),  # narrower inside
        (Mlp(8, 8), "moa"),  # every order of its layers fits
        (nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 8)), "moa"),
        (nn.Sequential(nn.Linear(8, 32), nn.SiLU(inplace=True), nn.Dropout(0.1), nn.Linear(32, 8)), "moa"),
        (SwiGLU(8, 20), "qd-moa"),
        (SwiGLUPacked(8, 40), "qd-moa"),
        (GluMlp(8, 40, act_layer=nn.SiLU, gate_last=True), "qd-moa"),
        (GluMlp(8, 40, act_layer=nn.ReLU, bias=False), "bi-moa"),
        (GluMlp(8, 40, act_layer=nn.Identity), "qd-moa"),
        (moa.build_ffn("swiglu", 8, 20, bias=True, drop=0.1), "qd-moa"),
        (moa.timm_mlp("gelu")(in_features=8, hidden_features=32), "moa"),
    ],
)
def test_layers_are_found_by_what_they_compute(ffn, kind):
    x = torch.randn(3, 5, 8 if kind != "moa" else next(ffn.parameters()).shape[1])
    model = in_a_block(copy.deepcopy(ffn))
    before = model(x)
    report = moa.convert(model, kind)
    assert isinstance(model[0].ffn, moa.FeedForward)
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-4)
    dropout = [m.p for m in ffn.modules() if isinstance(m, nn.Dropout)]
    assert model[0].ffn.drop.p == max(dropout, default=0)
    assert f"0.ffn  {type(ffn).__name__} (" in str(report)


class Functional(nn.Module):
    """Reversed names and order, activation and dropout as functions."""

    def __init__(self, drop=0.0, tail=lambda x: x):
        super().__init__()
        self.out, self.inner = nn.Linear(32, 8), nn.Linear(8, 32)
        self.drop, self.tail = drop, tail

    def forward(self, x):
        return self.tail(self.out(F.dropout(F.gelu(self.inner(x)), self.drop, self.training)))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.reduce, self.expand = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        return x * torch.sigmoid(self.expand(F.relu(self.reduce(x))))


def test_neither_names_nor_order_nor_an_activation_module_are_needed():
    model = in_a_block(Functional())
    x = torch.randn(3, 8)
    before = model(x)
    moa.convert(model, "la")
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-6)


def test_what_merely_looks_like_a_layer_is_left_with_a_reason():
    adapter = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8))
    model = nn.ModuleDict(
        {"block": in_a_block(Mlp(8, 32)), "se": SqueezeExcite(), "adapter": adapter, "drops": Functional(0.1)}
    )
    report = moa.convert(model, "moa")
    assert [row.name for row in report.replaced] == ["block.0.ffn"]
    assert "output of its last Linear layer" in report.left["se"]
    assert "more than apply an activation" in report.left["adapter"]
    assert "more than apply an activation" in report.left["drops"]
    assert "left: se: is not a feed-forward layer" in str(report)


def test_where_chooses_the_layers(llama):
    model = copy.deepcopy(llama)
    report = moa.convert(model, "one-moa", where=lambda name, module: ".1." in name)
    assert [row.name for row in report.replaced] == ["model.layers.1.mlp"]
    assert report.left == {"model.layers.0.mlp": "left out by where="}
    moa.convert(model, "bi-moa", where=lambda name, module: ".0." in name)
    assert [layer.mlp.kind for layer in model.model.layers] == ["bi-moa", "one-moa"]


def test_a_layer_shared_by_several_blocks_is_converted_once_and_stays_shared():
    shared = Mlp(8, 32)
    model = nn.Sequential(in_a_block(shared), in_a_block(shared))
    x = torch.randn(3, 8)
    before = model(x)
    (row,) = moa.convert(model, "moa").replaced
    assert row.places == 2
    assert model[0][0].ffn is model[1][0].ffn
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-4)


def test_an_activation_added_to_moa_can_be_preserved():
    model = in_a_block(Mlp(8, 32, act_layer=lambda: nn.GELU(approximate="tanh")))
    x = torch.randn(3, 8)
    before = model(x)
    moa.ACTIVATIONS["gelu_tanh"] = lambda t: F.gelu(t, approximate="tanh")
    try:
        moa.convert(model, "la", activations=["gelu_tanh", "relu"])
        torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    finally:
        del moa.ACTIVATIONS["gelu_tanh"]


def quantised():
    with warnings.catch_warnings():  # it is on its way out of torch
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(in_a_block(Mlp(8, 32)), {nn.Linear})


class Linear4bit(nn.Linear):
    """As bitsandbytes' class of this name: integers in a subclass of Linear."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.weight = nn.Parameter(self.weight.data.to(torch.uint8), requires_grad=False)


def mlp_of(change):
    ffn = Mlp(8, 32)
    change(ffn)
    return in_a_block(ffn)


def hooked():
    return mlp_of(lambda ffn: ffn.register_forward_hook(lambda *_: None))


def tied():
    first, second = Mlp(8, 32), Mlp(8, 32)
    second.fc1.weight = first.fc1.weight
    return nn.Sequential(in_a_block(first), in_a_block(second))


def sharing_a_linear():
    first, second = Mlp(8, 32), Mlp(8, 32)
    second.fc1 = first.fc1
    return nn.Sequential(in_a_block(first), in_a_block(second))


def wrapped_forward():
    return mlp_of(lambda ffn: setattr(ffn, "forward", lambda x: x))


def compiled():
    model = in_a_block(Mlp(8, 32))
    model.compile()
    return model


def listed_experts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(8, 3), nn.ModuleList(SwiGLU(8, 20) for _ in range(3))

    return in_a_block(Experts())


REFUSALS = {
    "no feed-forward layer": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "moa", "no feed-forward layer.*Sequ"),
    "the model itself": (lambda: Mlp(8, 32), "moa", "the model is itself one"),
    "a Type-II kind for Type-I": (lambda: in_a_block(Mlp(8, 32)), "qd-moa", "is Type-I.*kinds that are: relu, .*, moa"),
    "a Type-I kind for Type-II": (lambda: in_a_block(SwiGLU(8, 20)), "la", "is Type-II.*kinds that are: swiglu, "),
    "quantised by torch": (quantised, "moa", "0.ffn .Mlp. cannot be converted: it holds a torch.ao.*quantised"),
    "quantised like bitsandbytes": (
        lambda: mlp_of(lambda ffn: setattr(ffn, "fc1", Linear4bit(8, 32))),
        "moa",
        "cannot be converted: it holds a .*Linear4bit, quantised",
    ),
    "integers in a plain Linear": (
        lambda: mlp_of(lambda f: setattr(f.fc1, "weight", nn.Parameter(torch.ones(32, 8).int(), requires_grad=False))),
        "moa",
        "its weights are a Parameter of torch.int32",
    ),
    "mixed types": (lambda: mlp_of(lambda ffn: ffn.fc1.half()), "moa", "differ in type"),
    "hooks": (hooked, "moa", "its Mlp has hooks"),
    "a forward set from outside": (wrapped_forward, "moa", "the forward of its Mlp has been replaced"),
    "tied weights": (tied, "moa", "weights are tied to those of another"),
    "a shared Linear": (sharing_a_linear, "moa", "it shares a Linear layer"),
    "a norm inside": (
        lambda: in_a_block(Mlp(8, 32, norm_layer=nn.LayerNorm)),
        "moa",
        "no feed-forward layer to convert.*holds more than Linear layers and an activation: norm",
    ),
    "a block that is no module": (
        lambda: language_model(OPTConfig, OPTForCausalLM, ffn_dim=48, word_embed_proj_dim=32),
        "moa",
        "no feed-forward layer to convert in OPT.*more than Linear layers and an activation: self_attn",
    ),
    "dropout at the end": (lambda: in_a_block(Mlp(8, 32, drop=0.1)), "moa", "drops with p=0.1 elsewhere"),
    "the meta device": (lambda: in_a_block(Mlp(8, 32, device="meta")), "moa", "on the meta device"),
    "stacked experts": (
        lambda: language_model(MixtralConfig, MixtralForCausalLM, num_local_experts=4, num_key_value_heads=2),
        "qd-moa",
        "is a mixture of experts with stacked weights",
    ),
    "listed experts": (listed_experts, "qd-moa", "it routes to the 3 layers of experts"),
    "compiled": (lambda: torch.compile(in_a_block(Mlp(8, 32))), "moa", "is compiled: convert the model before"),
    "compiled in place": (compiled, "moa", "is compiled"),
    "data parallel": (lambda: nn.DataParallel(in_a_block(Mlp(8, 32))), "moa", "is wrapped in DataParallel"),
    "converted before": (lambda: in_a_block(moa.build_ffn("la", 8, 32)), "moa", "is already a layer of kind 'la'"),
    "the tanh approximation": (
        lambda: in_a_block(Mlp(8, 32, act_layer=lambda: nn.GELU(approximate="tanh"))),
        "moa",
        "computes gelu_tanh.W1 x., and gelu_tanh is none of moa's activations",
    ),
    "gelu_new": (lambda: language_model(GPTNeoXConfig, GPTNeoXForCausalLM, hidden_act="gelu_new"), "moa", "gelu_tanh"),
    "QuickGELU": (lambda: in_a_block(Mlp(8, 32, act_layer=QuickGELUActivation)), "moa", "computes quick_gelu"),
    "a clipped activation": (
        lambda: in_a_block(Mlp(8, 32, act_layer=nn.ReLU6)),
        "moa",
        "computes ReLU6.*none of moa's activations",
    ),
    "another activation than the dictionary's": (
        lambda: in_a_block(Mlp(8, 32, act_layer=nn.Tanh)),
        "moa",
        "computes tanh.W1 x., which 'moa' over gelu, silu, relu2, leaky_relu, relu does not contain",
    ),
    "a gated layer that one-sided kinds cannot hold": (
        lambda: in_a_block(SwiGLU(8, 20, act_layer=nn.GELU)),
        "one-moa",
        r"computes gelu.W1 x. \* W2 x, which 'one-moa' over .* does not contain",
    ),
    "another fixed kind": (lambda: in_a_block(SwiGLU(8, 20)), "geglu", "'geglu' over gelu does not contain"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_says_why_in_one_line_and_changes_nothing(case):
    make, kind, reason = REFUSALS[case]
    model = make()
    modules = [id(module) for module in model.modules()]
    values = {id(p): p.detach().clone() for p in model.parameters()}
    with pytest.raises(ValueError, match=reason) as refusal:
        moa.convert(model, kind)
    assert "\n" not in str(refusal.value)
    assert [id(module) for module in model.modules()] == modules
    assert all(p.is_meta or torch.equal(p, values[id(p)]) for p in model.parameters())


def test_one_layer_that_cannot_be_converted_leaves_the_others_as_they_were():
    good, bad = Mlp(8, 32), Mlp(8, 32, act_layer=nn.Tanh)
    model = nn.Sequential(in_a_block(good), in_a_block(bad))
    weight = good.fc2.weight.detach().clone()
    with pytest.raises(ValueError, match=r"1.0.ffn \(Mlp\) computes tanh"):
        moa.convert(model, "moa")
    assert model[0][0].ffn is good
    assert torch.equal(good.fc2.weight, weight)


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("moe", {}, "unknown kind 'moe'"),
        ("moa", {"init": "zero"}, "unknown init 'zero'; valid: preserve, fresh"),
        ("moa", {"gate": "relu"}, "unknown gate 'relu'"),
        ("la", {"gate": "tanh"}, "gate='tanh' does not apply to 'la'"),
        ("la", {"gate_bias": True}, "gate_bias=True does not apply to 'la'"),
        ("moa", {"gate_bias": False}, "needs gate_bias"),
        ("moa", {"gate": "tanh", "shut": -5.0}, "shut= applies to sigmoid and softmax"),
        ("la", {"shut": -5.0}, "shut= applies to"),
        ("moa", {"shut": -5.0}, r"would change its outputs by \d.*lower shut="),
        ("moa", {"activations": ["gelu", "swish"]}, "unknown activation 'swish'"),
        ("gelu", {"activations": ["relu"]}, "does not apply to 'gelu'"),
    ],
)
def test_options_that_do_not_fit_are_errors(kind, options, reason):
    with pytest.raises(ValueError, match=reason):
        moa.convert(in_a_block(Mlp(8, 32)), kind, **options)


def test_shut_trades_exactness_for_trainability():
    torch.manual_seed(0)
    x, mlp = torch.randn(4, 8), Mlp(8, 32)
    errors, gradients = [], []
    for shut in (-12.0, -20.0):
        model = in_a_block(copy.deepcopy(mlp))
        before = model(x)
        moa.convert(model, "moa", shut=shut)
        errors.append((model(x) - before).abs().max().item())
        model(x).square().sum().backward()
        gradients.append(model[0].ffn.u.weight.grad[-1].abs().max().item())
    assert errors[0] > errors[1]
    assert gradients[0] == pytest.approx(gradients[1] * torch.tensor(8.0).exp().item(), rel=1e-2)


def test_a_registered_kind_is_tried_like_any_other():
    @moa.register("backward", family="la", projections=1, activations=("relu", "gelu"))
    def backward(y, z, weights, activations):
        return sum(weights["pi"][-1 - k] * moa.ACTIVATIONS[name](y) for k, name in enumerate(activations))

    @moa.register("halved", family="la", projections=1, activations=("relu", "gelu"))
    def halved(y, z, weights, activations):
        return backward(y, z, weights, activations) / 2

    try:
        model = in_a_block(Mlp(8, 32))
        x = torch.randn(3, 8)
        before = model(x)
        with pytest.raises(ValueError, match="'halved' over relu, gelu does not contain"):
            moa.convert(model, "halved")
        moa.convert(model, "backward")
        assert model[0].ffn.alpha.tolist() == [1, 0]
        torch.testing.assert_close(model(x), before)
    finally:
        for name in ("backward", "halved"):
            moa.registry._KINDS.pop(name)
