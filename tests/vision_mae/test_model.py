"""The model against closed forms and an independent computation."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import moa
from pretrain.optim import assign_parameters
from tests.vision_mae import plain_mae
from vision_mae.callbacks import reconstruct
from vision_mae.model import MAEConfig, MaskedAutoencoder, ViTFFNConfig, encoder_flops, flops_per_image, num_parameters
from vision_mae.module import MaskedAutoencoderModule, ViTOptimizerConfig
from vision_mae.patches import patch_targets, patchify, random_masking, sincos_table, unpatchify

TINY = {
    "size": None,
    "width": 16,
    "depth": 2,
    "heads": 2,
    "patch_size": 4,
    "image_size": 16,
    "decoder_width": 8,
    "decoder_depth": 2,
    "decoder_heads": 2,
}


def tiny_model(kind: str = "mlp", **changes) -> MaskedAutoencoder:
    """A small model whose weights are all far from zero, biases and norms included."""
    torch.manual_seed(0)
    model = MaskedAutoencoder(MAEConfig(**TINY | changes, ffn=ViTFFNConfig(kind)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def tiny_module(norm_pixel_loss: bool = True, kind: str = "mlp", **changes) -> MaskedAutoencoderModule:
    module = MaskedAutoencoderModule(
        ViTFFNConfig(kind), ViTOptimizerConfig(lr=1e-3), None, **TINY | changes, norm_pixel_loss=norm_pixel_loss
    )
    module.model = tiny_model(kind, **changes)
    return module


def batch_of(images: torch.Tensor, n_patches: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(len(images), n_patches, generator=generator)
    return {"images": images, "noise": noise, "present": torch.ones(len(images), dtype=torch.bool)}


def built_counts(config: MAEConfig) -> tuple[int, int, int]:
    """Parameters of the encoder, of the decoder, and both with the fixed tables."""
    with torch.device("meta"):
        model = MaskedAutoencoder(config)
    encoder, decoder = (sum(p.numel() for p in half.parameters()) for half in (model.encoder, model.decoder))
    return encoder, decoder, encoder + decoder + sum(table.numel() for table in model.buffers())


def test_the_standard_mlp_gives_the_public_mae():
    config = MAEConfig(ffn=ViTFFNConfig("mlp"))
    assert built_counts(config) == (85_647_360, 26_008_320, 111_907_840)
    assert sum(num_parameters(config).values()) == 111_655_680


@pytest.mark.parametrize(("kind", "gates_per_width"), [("swiglu", 0), ("qd-moa", 10)])
def test_the_paper_s_kinds_change_only_the_feed_forward_layers(kind, gates_per_width):
    config = MAEConfig(ffn=ViTFFNConfig(kind))
    by_side = []
    for width, depth, public, mlp_width in ((768, 12, 85_647_360, 3072), (512, 8, 26_008_320, 2048)):
        mlp = 2 * width * mlp_width + mlp_width + width
        ours = 3 * width * (8 * width // 3) + gates_per_width * width
        by_side.append(public + depth * (ours - mlp))
    assert list(built_counts(config)[:2]) == by_side
    assert sum(num_parameters(config).values()) == sum(by_side)


@pytest.mark.parametrize("kind", ["mlp", *moa.kinds()])
@pytest.mark.parametrize("changes", [{}, {"size": "vit_tiny", "patch_size": 8, "image_size": 56, "in_channels": 1}])
def test_counts_of_every_kind_in_closed_form(kind, changes):
    config = MAEConfig(**{"size": "vit_small", **changes}, ffn=ViTFFNConfig(kind))
    with torch.device("meta"):
        model = MaskedAutoencoder(config)
    assert sum(num_parameters(config).values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["gelu", "swiglu", "qd-moa"])
@pytest.mark.parametrize("hidden", [40, 41, 1000, 2047, 2048])
def test_an_explicit_hidden_width_is_met_exactly(kind, hidden):
    config = MAEConfig(ffn=ViTFFNConfig(kind, hidden_features=hidden))
    with torch.device("meta"):
        model = MaskedAutoencoder(config)
    assert model.encoder.blocks[0].mlp.hidden_features == hidden
    assert model.decoder.blocks[0].mlp.hidden_features == config.decoder_hidden == round(hidden * 512 / 768)


@pytest.mark.parametrize("patch_size", [8, 14, 16])
@pytest.mark.parametrize("size", ["vit_tiny", "vit_large", "vit_huge"])
def test_other_sizes_have_timms_shapes(size, patch_size):
    config = MAEConfig(size=size, patch_size=patch_size, image_size=224)
    with torch.device("meta"):
        model = MaskedAutoencoder(config)
    assert (config.width, config.depth, config.heads) == {
        "vit_tiny": (192, 12, 3),
        "vit_large": (1024, 24, 16),
        "vit_huge": (1280, 32, 16),
    }[size]
    assert model.positions.shape[1] == (224 // patch_size) ** 2 + 1


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("kind", ["mlp", "swiglu", "qd-moa"])
@pytest.mark.parametrize("channels", [1, 3])
def test_loss_and_predictions_equal_an_independent_computation(kind, normalise, channels):
    module = tiny_module(normalise, kind, in_channels=channels)
    images = torch.randn(3, channels, 16, 16, generator=torch.Generator().manual_seed(2))
    batch = batch_of(images)
    with torch.no_grad():
        loss_sum, n_images = module.loss(batch)
        predictions, mask = module.model(images, batch["noise"])
        losses = []
        for sample, image in enumerate(images):
            # The definition: the quarter of the patches with the least noise is seen.
            order = sorted(range(16), key=lambda n, sample=sample: float(batch["noise"][sample, n]))
            expected, loss = plain_mae.reconstruct(
                module.model.state_dict(),
                image,
                sorted(order[4:]),
                patch=4,
                depth=2,
                heads=2,
                decoder_depth=2,
                decoder_heads=2,
                kind=kind,
                normalise=normalise,
            )
            torch.testing.assert_close(predictions[sample], expected, atol=1e-5, rtol=1e-5)
            assert mask[sample].nonzero().flatten().tolist() == sorted(order[4:])
            losses.append(loss)
    assert n_images == 3
    torch.testing.assert_close(loss_sum / n_images, torch.stack(losses).mean(), atol=1e-5, rtol=1e-5)


def test_the_encoder_sees_exactly_a_quarter_of_the_patches():
    model = tiny_model()
    seen = []
    model.encoder.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    _, mask = model(torch.randn(5, 3, 16, 16), torch.rand(5, 16))
    assert seen == [1 + 4]  # the class token comes first
    assert mask.sum(dim=1).tolist() == [12.0] * 5


def test_masked_pixels_do_not_reach_the_predictions():
    model, images, noise = tiny_model(), torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    with torch.no_grad():
        before, mask = model(images, noise)
        hidden = unpatchify(mask[:, :, None].expand(-1, -1, 16), 4, 1) > 0
        after, _ = model(torch.where(hidden, 99.0, images), noise)
    assert torch.equal(before, after)


def test_the_loss_ignores_visible_patches_of_the_target():
    module = tiny_module()
    images = torch.randn(2, 3, 16, 16)
    batch = batch_of(images)
    predictions, mask = module.model(images, batch["noise"])
    visible = unpatchify((1 - mask)[:, :, None].expand(-1, -1, 16), 4, 1) > 0
    other_target = batch | {"images": torch.where(visible, 7.0, images)}
    assert torch.equal(
        module._sum_over_pictures(predictions, mask, batch)[0],
        module._sum_over_pictures(predictions, mask, other_target)[0],
    )


def test_absent_pictures_do_not_count():
    module = tiny_module()
    images = torch.randn(3, 3, 16, 16)
    batch = batch_of(images)
    whole, _ = module.loss({name: value[:2] for name, value in batch.items()})
    padded, n_images = module.loss(batch | {"present": torch.tensor([True, True, False])})
    assert n_images == 2
    torch.testing.assert_close(whole, padded)


def test_patches_are_put_together_again():
    images = torch.randn(2, 3, 12, 12)
    patches = patchify(images, 4)
    assert torch.equal(unpatchify(patches, 4, 3), images)
    torch.testing.assert_close(patches[1], plain_mae.cut(images[1], 4))


def test_a_patch_of_one_colour_has_a_target_of_zero():
    assert patch_targets(torch.full((1, 3, 4, 4), 0.7), 4, normalise=True).abs().max() < 1e-3


def test_every_patch_is_masked_equally_often():
    noise = torch.rand(4000, 16, generator=torch.Generator().manual_seed(0))
    visible, mask = random_masking(noise, 4)
    assert visible.shape == (4000, 4)
    standard_error = math.sqrt(0.75 * 0.25 / 4000)
    assert (mask.mean(dim=0) - 0.75).abs().max() < 4.5 * standard_error


def test_position_tables_are_the_definition():
    table = sincos_table(8, 3)
    assert table.shape == (1, 10, 8)
    assert not table[0, 0].any()
    for n in range(9):
        torch.testing.assert_close(table[0, 1 + n], plain_mae.position(8, n // 3, n % 3))


def test_a_perfect_prediction_is_shown_as_the_picture_itself():
    images, noise = torch.rand(2, 3, 16, 16), torch.rand(2, 16)
    _, mask = random_masking(noise, 4)
    for normalised in (True, False):
        perfect = patch_targets(images, 4, normalised)
        masked, filled = reconstruct(images, perfect, mask, 4, normalised)
        torch.testing.assert_close(filled, images, atol=1e-5, rtol=1e-5)
        wrong = reconstruct(images, torch.zeros_like(perfect), mask, 4, normalised)[1]
        hidden = unpatchify(mask[:, :, None].expand(-1, -1, 16), 4, 1) > 0
        assert torch.equal(torch.where(hidden, 0.0, wrong), torch.where(hidden, 0.0, images))
        assert torch.equal(masked, torch.where(hidden, 0.0, images))


@pytest.mark.parametrize("kind", ["mlp", "swiglu", "qd-moa"])
def test_operations_agree_with_torchs_own_count(kind):
    """By convention the backward pass counts as two forward ones."""
    config = MAEConfig(**TINY, ffn=ViTFFNConfig(kind))
    model = MaskedAutoencoder(config)
    for block in [*model.encoder.blocks, *model.decoder.blocks]:
        block.attn.fused_attn = False  # whose products torch does not count on the CPU
    images, noise = torch.randn(1, 3, 16, 16), torch.rand(1, 16)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images, noise)
    assert flops_per_image(config) == 3 * counter.get_total_flops()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.encode(images)
    assert encoder_flops(config) == counter.get_total_flops()


def test_the_groups_without_decay():
    model = tiny_model("qd-moa")
    module = tiny_module(kind="qd-moa")
    groups = {
        rule.group: parameters for rule, parameters in assign_parameters(model.named_parameters(), module.rules())
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    exempt = {names[id(parameter)] for parameter in groups["no_decay"]}
    assert exempt == {
        name
        for name, parameter in model.named_parameters()
        if name.endswith("bias") or "norm" in name or name in ("encoder.cls_token", "decoder.mask_token")
    }
    assert "encoder.blocks.0.mlp.u.weight" not in exempt


@pytest.mark.parametrize("kind", ["mlp", "bi-moa"])
def test_muon_takes_the_matrices_of_the_blocks(kind):
    """Neither gates nor what turns patches into tokens and back."""
    model, module = tiny_model(kind), tiny_module(kind=kind)
    module.optimizer_config = ViTOptimizerConfig("muon_adamw", lr=1e-3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    taken = [
        names[id(parameter)]
        for rule, parameters in assign_parameters(model.named_parameters(), module.rules())
        for parameter in parameters
        if rule.optimizer == "muon"
    ]
    matrices = {name for name, parameter in model.named_parameters() if ".blocks." in name and parameter.ndim == 2}
    assert set(taken) == {name for name in matrices if not name.endswith((".u.weight", ".v.weight"))}
    assert taken


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "vit_gigantic"}, "choose one of vit_tiny"),
        ({"size": None}, "model.width is None"),
        ({"image_size": 225}, "the nearest sizes are 224 or 240"),
        ({"image_size": 8}, "the nearest sizes are 16"),
        ({"in_channels": 2}, "1 .grey. or 3 .colour."),
        ({"mask_ratio": 1.0}, "at least one has to be visible"),
        ({"mask_ratio": 0.0}, "one masked"),
        ({"mask_ratio": float("nan")}, "model.mask_ratio is nan"),
        ({"depth": 10**9, "size": None, "width": 768, "heads": 12}, "model.depth is 1000000000"),
        ({"decoder_width": 500}, "multiple of model.decoder_heads"),
        ({"size": None, "width": 770, "depth": 2, "heads": 12}, "multiple of model.heads"),
        ({"width": 770}, "means model.width 768"),
        ({"init": "zeros"}, "choose one of timm, xavier"),
    ],
)
def test_impossible_sizes_are_errors_that_help(settings, message):
    with pytest.raises(ValueError, match=message):
        MAEConfig(**settings)


def test_initial_values_are_as_documented():
    torch.manual_seed(0)
    config = MAEConfig(size="vit_tiny", ffn=ViTFFNConfig("qd-moa", gate_init_std=0.5))
    weights = MaskedAutoencoder(config).state_dict()
    assert weights["encoder.blocks.3.mlp.u.weight"].std() == pytest.approx(0.5, rel=0.05)
    assert weights["encoder.blocks.3.mlp.w1.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert weights["encoder.cls_token"].std() == pytest.approx(0.02, rel=0.2)
    assert not weights["encoder.blocks.3.attn.qkv.bias"].any()
    xavier = MaskedAutoencoder(MAEConfig(size="vit_tiny", init="xavier")).state_dict()
    limit = math.sqrt(6 / (192 + 192))
    assert xavier["encoder.blocks.3.attn.proj.weight"].abs().max() == pytest.approx(limit, rel=0.01)
    assert xavier["encoder.patch_embed.proj.weight"].abs().max() == pytest.approx(math.sqrt(6 / (192 + 768)), rel=0.01)
    mixed = MaskedAutoencoder(MAEConfig(**TINY, ffn=ViTFFNConfig("la", coefficient_init=0.25))).state_dict()
    assert (mixed["decoder.blocks.0.mlp.alpha"] == 0.25).all()
