"""Every kind inside a real timm vision transformer."""

import copy
import pickle

import pytest
import torch
from timm.layers import LayerNorm, Mlp
from timm.models.vision_transformer import VisionTransformer

import moa
from tests.moa.brute_force import KINDS, MOA

DIM, DEPTH = 48, 2


def vit(mlp_layer, **options):
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": DIM, "depth": DEPTH, "num_heads": 2, "num_classes": 3}
    return VisionTransformer(**sizes, mlp_layer=mlp_layer, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vit_of_every_kind_trains_and_has_the_expected_size(kind):
    model = vit(moa.timm_mlp(kind))
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    mlp = model.blocks[0].mlp
    assert (mlp.kind, mlp.hidden_features) == (kind, moa.hidden_features(kind, DIM))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    numel = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in vit(Mlp).parameters())
    ours = moa.num_parameters(kind, DIM, moa.hidden_features(kind, DIM), bias=True)
    assert numel == DEPTH * (ours - moa.num_parameters("gelu", DIM, 4 * DIM, bias=True))


def test_gelu_is_timms_own_mlp():
    ours, theirs = moa.timm_mlp("gelu")(in_features=8, hidden_features=32), Mlp(8, 32)
    theirs.load_state_dict(
        {name.replace("w1", "fc1").replace("w2", "fc2"): value for name, value in ours.state_dict().items()}
    )
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("dim", [48, 512, 768])
def test_type_two_takes_two_thirds_of_the_width_that_timm_passes(dim):
    qd_moa, relu2 = moa.timm_mlp("qd-moa"), moa.timm_mlp("relu2")
    assert qd_moa(in_features=dim, hidden_features=4 * dim, device="meta").hidden_features == int(8 * dim / 3)
    assert qd_moa(in_features=dim, device="meta").hidden_features == int(8 * dim / 3)
    assert relu2(in_features=dim, hidden_features=4 * dim, device="meta").hidden_features == 4 * dim
    assert qd_moa(in_features=dim, hidden_features=3 * dim, device="meta").hidden_features == 2 * dim


def test_timm_passes_bias_drop_device_and_dtype_and_options_replace_the_first_two():
    model = vit(moa.timm_mlp("qd-moa"), proj_bias=False, proj_drop_rate=0.25)
    assert model.blocks[0].mlp.w1.bias is None
    assert model.blocks[0].mlp.drop.p == 0.25
    model = vit(moa.timm_mlp("qd-moa", bias=False, drop=0.5, activations="gs", gate="tanh", gate_bias=True))
    mlp = model.blocks[0].mlp
    assert model.blocks[0].attn.proj.bias is not None
    assert mlp.w3.bias is None
    assert mlp.drop.p == 0.5
    assert (mlp.activations, mlp.gate) == (("id", "gelu", "silu"), "tanh")
    assert mlp.u.bias.shape == (6,)
    layer = moa.timm_mlp("moa")(in_features=4, hidden_features=8, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}


@pytest.mark.parametrize("kind", ["gelu", "bi-la", "qd-moa", "bi-moa"])
def test_timms_own_initialisation_applies(kind):
    mlp = vit(moa.timm_mlp(kind, gate_bias=kind in MOA)).blocks[0].mlp
    for name, value in mlp.named_parameters():
        if name.endswith("bias"):
            assert (value == 0).all()
        elif name.endswith("weight"):
            assert value.std().item() == pytest.approx(0.02, rel=0.2)
    # In "jax" mode timm draws projections of an mlp uniformly within the Xavier bound, and their biases near zero.
    mlp = vit(moa.timm_mlp(kind), weight_init="jax").blocks[0].mlp
    for name, value in mlp.named_parameters():
        if name.endswith("weight"):
            bound = (6 / sum(value.shape)) ** 0.5
            assert 0.9 * bound < value.abs().max().item() <= bound
    assert all((value == 0.5).all() for value in mlp.coefficients().values())


def test_a_vit_made_on_the_meta_device_is_initialised_as_usual():
    model = vit(moa.timm_mlp("bi-la"), device="meta")
    model.to_empty(device="cpu")
    model.init_weights(needs_reset=True)
    mlp = model.blocks[0].mlp
    assert (mlp.alpha == 0.5).all()
    assert mlp.w1.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_an_inner_norm_and_a_wrong_option_are_errors_before_the_model_is_built():
    with pytest.raises(ValueError, match="norm_layer does not apply to 'qd-moa'"):
        moa.timm_mlp("qd-moa")(in_features=8, hidden_features=32, norm_layer=LayerNorm)
    with pytest.raises(ValueError, match="unknown kind 'mlp'"):
        moa.timm_mlp("mlp")
    with pytest.raises(ValueError, match=r"activations=.* does not apply to 'swiglu'"):
        moa.timm_mlp("swiglu", activations="gt")
    with pytest.raises(ValueError, match="gate='tanh' does not apply to 'la'"):
        moa.timm_mlp("la", gate="tanh")


def test_a_model_can_be_pickled_and_copied():
    assert isinstance(moa.timm_mlp("qd-moa"), type)
    model = vit(moa.timm_mlp("qd-moa", activations=["id", "tanh"])).eval()
    x = torch.randn(1, 3, 32, 32)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        torch.testing.assert_close(twin(x), model(x), rtol=0, atol=0)
        assert type(twin.blocks[0].mlp) is type(model.blocks[0].mlp)
        twin.blocks[0].mlp.w1.weight.data.zero_()
    assert model.blocks[0].mlp.w1.weight.abs().sum() > 0
