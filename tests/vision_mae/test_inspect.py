"""`vision_mae.inspect` on real runs: its numbers against the equations, its pictures against the gates."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pretrain.inspection import TABLE, Mix
from pretrain.reload import load_module
from tests.vision_mae.pictures import two_halves
from tests.vision_mae.runs import train
from vision_mae import inspect
from vision_mae.data.module import CHANNEL_STATISTICS
from vision_mae.gate_maps import gate_maps_figure
from vision_mae.module import MaskedAutoencoderModule

SIDE = 4  # patches along a side of 32 pixels
QUICK = {"trainer__max_steps": 1, "trainer__limit_val_batches": 1, "model__probe__every_n_steps": 0}


@pytest.fixture
def picture(tmp_path) -> Path:
    two_halves(32, 32).save(tmp_path / "halves.png")
    return tmp_path / "halves.png"


@pytest.fixture(scope="module")
def bi_moa(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("bi"), model__ffn__kind="bi-moa", **QUICK).folder


def look(run: Path, output: Path, *arguments: str) -> str:
    inspect.main(["--checkpoint", str(run), "--output", str(output), *arguments])
    return (output / TABLE).read_text()


def layer_inputs(run: Path, pixels: torch.Tensor) -> tuple[list[torch.nn.Module], list[torch.Tensor]]:
    """Return the encoder's feed-forward layers and what each is given, block by block, without the help of hooks."""
    model = load_module(MaskedAutoencoderModule, run)[0].model
    encoder, inputs = model.encoder, []
    with torch.no_grad():
        x = encoder.patch_embed(pixels[None]) + model.positions[:, 1:]
        x = torch.cat((encoder.cls_token + model.positions[:, :1], x), dim=1)
        for block in encoder.blocks:
            x = x + block.attn(block.norm1(x))
            inputs.append(block.norm2(x)[0])
            x = x + block.mlp(block.norm2(x))
    return [block.mlp for block in encoder.blocks], inputs


def normalised(picture: Path) -> torch.Tensor:
    pixels = torch.from_numpy(np.asarray(Image.open(picture), dtype=np.float32) / 255).permute(2, 0, 1)
    mean, std = (torch.tensor(values)[:, None, None] for values in CHANNEL_STATISTICS[3])
    return (pixels - mean) / std


def test_the_table_holds_the_gates_of_every_patch(trained, bi_moa, picture, tmp_path):
    names = ["class"] + [f"({row},{column})" for row in range(SIDE) for column in range(SIDE)]
    for run in (trained.folder, bi_moa):
        shown = look(run, tmp_path / run.name, "--image", str(picture), "--top", "1", "--layers", "1")
        layer, x = (found[1] for found in layer_inputs(run, normalised(picture)))
        for gate, labels in layer.gate_labels().items():
            weights = torch.sigmoid(x @ getattr(layer, {"pi": "u", "rho": "v"}[gate]).weight.detach().T)
            (block,) = (part for part in shown.split("\n\n") if part.startswith(f"layer 1, {gate}: 17 tokens"))
            rows = [line.split() for line in block.splitlines()[2:]]
            for k, label in enumerate(labels):
                (name, mean, spread, _, least), (_, most) = rows[2 * k : 2 * k + 2]
                assert name == label
                assert float(mean) == pytest.approx(weights[:, k].mean().item(), abs=6e-4)
                assert float(spread) == pytest.approx(weights[:, k].std(correction=0).item(), abs=6e-4)
                torch.testing.assert_close(weights[names.index(least), k], weights[:, k].min())
                torch.testing.assert_close(weights[names.index(most), k], weights[:, k].max())


def test_every_file_is_a_picture(bi_moa, picture, tmp_path, capsys):
    look(bi_moa, tmp_path / "out", "--image", str(picture), "--layers", "0")
    pictures = {f"{name}_{gate}.png" for name in ("mix", "weights", "curves", "patches") for gate in ("pi", "rho")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == pictures | {TABLE}
    for name in pictures:
        with Image.open(tmp_path / "out" / name) as image:
            image.verify()
    assert "layer 1" not in capsys.readouterr().out


def test_patches_are_coloured_where_they_lie():
    weights = torch.zeros(1 + SIDE * SIDE, 1)
    weights[0] = 9.0  # the class token, which has no place in the picture
    weights[1 + 1 * SIDE + 2] = 1.0  # row 1, column 2
    figure = gate_maps_figure(torch.ones(3, 8, 8), [Mix("layer 0", "pi", ["silu"], weights)])
    left, right = (axes.images[0].get_array() for axes in figure.axes)
    assert np.asarray(left).min() == 1
    coloured = (np.asarray(right) < 1).any(-1)
    assert coloured[2:4, 4:6].all()
    assert coloured.sum() == 4


def test_without_a_picture_it_is_the_first_held_out_one_and_lies_in_the_run(bi_moa, capsys):
    inspect.main(["--checkpoint", str(bi_moa), "--layers", "1"])
    assert f"written to {bi_moa}/inspect: {TABLE}, mix_pi.png" in capsys.readouterr().out


def test_learnable_activations_have_coefficients_but_no_patches(tmp_path, picture, capsys):
    run = train(tmp_path / "runs", model__ffn__kind="la", **QUICK).folder
    shown = look(run, tmp_path / "out", "--image", str(picture))
    assert "la mixes every patch alike: the picture that was given makes no difference" in capsys.readouterr().out
    alpha = load_module(MaskedAutoencoderModule, run)[0].model.encoder.blocks[1].mlp.alpha
    values = [float(line.split()[1]) for line in shown.split("\n\n")[1].splitlines()[1:]]
    assert values == pytest.approx(alpha.tolist(), abs=6e-4)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {TABLE, "mix_alpha.png", "weights_alpha.png", "curves_alpha.png"}


def test_mistakes_are_told_in_one_line(trained, tmp_path, capsys):
    fixed = train(tmp_path / "runs", model__ffn__kind="mlp", **QUICK).folder
    (tmp_path / "words.png").write_text("no picture")
    run, output = str(trained.folder), ["--output", str(tmp_path / "out")]
    capsys.readouterr()
    for arguments, message in (
        (["--checkpoint", str(tmp_path / "gone")], "gone does not exist"),
        (["--checkpoint", str(fixed)], "kind gelu, whose activation is fixed: there is no mix to look at"),
        (["--checkpoint", run, "--image", str(tmp_path / "gone.png")], "gone.png does not exist, or is no file"),
        (["--checkpoint", run, "--image", str(tmp_path)], "does not exist, or is no file"),
        (["--checkpoint", run, "--image", str(tmp_path / "words.png")], "words.png: not a picture of any known format"),
        (["--checkpoint", run, "--layers", "7"], "the run has 0 to 1"),
    ):
        with pytest.raises(SystemExit) as stop:
            inspect.main([*arguments, *output])
        shown = capsys.readouterr().err
        assert stop.value.code == 2
        assert message in shown
        assert shown.count("\n") == 1
    assert not (tmp_path / "out").exists()
