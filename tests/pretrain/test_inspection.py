"""What is said of a mix, against closed forms and the layers' own reference."""

import math

import pytest
import torch
from PIL import Image

import moa
from moa import mixing
from pretrain.errors import UserError
from pretrain.inspection import (
    TABLE,
    Mix,
    choose_layers,
    components,
    curves,
    layer_inputs,
    layer_mixes,
    mixing_layers,
    output_folder,
    table,
    write_inspection,
)
from pretrain.mix_figures import COLOURS, colour, mix_figures

NAMES = ["first", "second", "third", "fourth"]
WEIGHTS = torch.tensor([[0.1, 0.5], [0.3, 0.5], [0.2, 0.5], [0.6, 0.5]])
FOUR = Mix("layer 0", "pi", ["id", "relu"], WEIGHTS, "token", NAMES)


def test_mean_spread_and_ends():
    assert FOUR.means() == pytest.approx({"id": 0.3, "relu": 0.5})
    assert FOUR.metrics()["id/spread"] == pytest.approx(math.sqrt((0.04 + 0 + 0.01 + 0.09) / 4))
    assert FOUR.metrics()["relu/spread"] == 0
    assert FOUR.most_varied() == 0
    least, most = FOUR.ends(2)
    assert least[0].tolist() == [0, 2]
    assert most[0].tolist() == [3, 1]
    assert FOUR.ends(99)[0].shape == (2, 4)


def test_entropy_is_one_for_an_even_mix_and_zero_for_a_single_activation():
    def entropy(*rows):
        return Mix("layer", "pi", ["a"] * len(rows[0]), torch.tensor(rows)).entropy

    assert entropy([0.2, 0.2, 0.2]) == pytest.approx(1)
    assert entropy([0.7, 0.0, 0.0]) == pytest.approx(0)
    assert entropy([0.5, -0.5], [1.0, 0.0]) == pytest.approx(0.5)  # the mean over the rows; signs do not matter


def test_a_curve_is_the_closed_form():
    t = torch.tensor([-2.0, 0.0, 3.0])
    expected = [[0.1 * -2, 0, 0.6 * 3], [0.3 * -2, 0, 0.8 * 3], [0.2 * -2, 0, 0.7 * 3], [0.6 * -2, 0, 1.1 * 3]]
    torch.testing.assert_close(curves(FOUR, moa.ACTIVATIONS, t), torch.tensor(expected))
    by_row = curves(FOUR, moa.ACTIVATIONS, t).mean(0)
    with_the_mean = (FOUR.mean[:, None] * components(FOUR.labels, moa.ACTIVATIONS, t)).sum(0)
    torch.testing.assert_close(by_row, with_the_mean)


@pytest.mark.parametrize("kind", ["moa", "bi-moa", "one-moa", "qd-moa"])
def test_curves_are_what_the_layer_computes_between_its_projections(kind):
    layer = moa.build_ffn(kind, 8, 6)
    x, t, z = torch.randn(5, 8), torch.linspace(-3, 3, 7), 0.7
    mixes = {mix.gate: mix for mix in layer_mixes("layer", layer, x)}
    functions = {gate: curves(mix, moa.ACTIVATIONS, t, z) for gate, mix in mixes.items()}
    y, z_branch = t.expand(5, -1), torch.full((5, 7), z)
    weights = layer.gates(x)
    if kind == "moa":
        expected, found = mixing.type_one_mixture(y, None, weights, layer.activations), functions["pi"]
    elif kind == "qd-moa":
        expected, found = mixing.quadratic_mixture(y, z_branch, weights, layer.activations), functions["pi"]
    elif kind == "one-moa":
        expected = mixing.one_sided_mixture(y, y, weights, layer.activations)
        found = torch.nn.functional.silu(t) * functions["pi"]
    else:
        expected = mixing.bi_sided_mixture(y, y, weights, layer.activations)
        found = functions["rho"] * functions["pi"]
    torch.testing.assert_close(found, expected)


def test_inputs_are_recorded_from_outside_and_leave_nothing_behind():
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), moa.build_ffn("moa", 8, 6), moa.build_ffn("relu", 8, 6))
    layers = mixing_layers(network)
    assert list(layers) == ["1"]
    x = torch.randn(2, 3, 4)
    inputs = layer_inputs(layers, lambda: network(x))
    torch.testing.assert_close(inputs["1"], network[0](x).flatten(0, 1).detach())
    assert not network[1]._forward_pre_hooks


def test_the_table_names_rows_at_both_ends():
    lines = table(
        [FOUR, Mix("layer 1", "alpha", ["id", "relu"], torch.tensor([[0.25, -1.0]]), unit="")], 2
    ).splitlines()
    assert lines[0].startswith("layer 0, pi: 4 tokens, entropy 0.865")
    assert [line.split() for line in lines[2:6]] == [
        ["id", "0.300", "0.187", "least", "first", "third"],
        ["most", "fourth", "second"],
        ["relu", "0.500", "0.000", "least", "first", "second"],
        ["most", "fourth", "third"],
    ]
    assert [line.split() for line in lines[7:]] == [
        ["layer", "1,", "alpha:", "constants"],
        ["id", "0.250"],
        ["relu", "-1.000"],
    ]


def test_layers_are_chosen_by_number():
    assert choose_layers(None, 3) == [0, 1, 2]
    assert choose_layers("2, 0,2", 3) == [0, 2]
    for wrong in ("3", "-1", "one", "", "0;1", "²"):
        with pytest.raises(UserError, match="has to be numbers of layers, such as 0,2: the run has 0 to 2"):
            choose_layers(wrong, 3)


def test_every_activation_has_a_colour_of_its_own():
    assert set(COLOURS) == set(moa.ACTIVATIONS)
    assert len(set(COLOURS.values())) == len(COLOURS)
    assert colour("gelu*gelu") == colour("gelu")
    assert colour("gelu*relu2") == "#6a6859"  # halfway between 0072b2 and d55e00
    assert colour("somebody's own") == colour("somebody's own")


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("labels", [["id", "relu"], ["id*id", "id*relu"]])
def test_pictures_of_any_number_of_layers(tmp_path, labels, count):
    mixes = [Mix(f"layer {i}", "pi", labels, WEIGHTS, "token", ["$x^2$", "\\alpha", "日", "<b>"]) for i in range(count)]
    folder = tmp_path / "out"
    write_inspection(folder, {TABLE: "text\n"}, mix_figures(mixes, moa.ACTIVATIONS))
    for name in ("mix_pi", "weights_pi", "curves_pi"):
        with Image.open(folder / f"{name}.png") as image:
            image.verify()


def test_an_inspection_replaces_an_earlier_one_and_nothing_else(tmp_path):
    folder = tmp_path / "out"
    for text in ("one", "two"):
        assert output_folder("no checkpoint is needed", str(folder)) == folder
        write_inspection(folder, {TABLE: text, f"{text}.html": ""}, {})
    assert {path.name for path in folder.iterdir()} == {TABLE, "two.html"}
    (folder / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="is no earlier inspection"):
        output_folder("run", str(folder))
    with pytest.raises(UserError, match="is no earlier inspection"):
        output_folder("run", str(folder / TABLE))
