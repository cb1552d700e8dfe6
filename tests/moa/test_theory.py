"""The theorems made visible: exact constructions, a true norm, proven bounds that no fit undercuts, one command."""

import json
import os
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

from moa.theory import __main__ as command
from moa.theory import pool, report, search, sobolev
from moa.theory.constructions import build, exact, staircase
from moa.theory.fitting import fit
from moa.theory.networks import Network, candidates, draw_starts, fixed_pair
from moa.theory.search import Effort
from moa.theory.targets import TARGETS, TYPE_ONE, Target

SUM, GATED, PRODUCT = TARGETS
SMALL = Effort(starts=4, scout=6, finalists=2, least_squares=20, minimax=4)


def numpy_jet(target: Target, points: np.ndarray) -> np.ndarray:
    """Value and gradient by hand, in NumPy."""
    x = points.T
    if target is SUM:
        on = x[0] > 0
        return np.stack([on * (x[0] + x[0] ** 2), on * (1 + 2 * x[0])], axis=1)
    gate, slope = np.tanh(2 * x[0]), 2 / np.cosh(2 * x[0]) ** 2
    second, on = np.maximum(x[1], 0), 1.0 * (x[1] > 0)
    if target is GATED:
        return np.stack([gate * second, slope * second, gate * on], axis=1)
    third, on_third = np.maximum(x[2], 0), 1.0 * (x[2] > 0)
    columns = [gate * second * third, slope * second * third, gate * on * third, gate * second * on_third]
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_constructions_of_one_neuron_equal_the_target(target):
    points = sobolev.grid(target)
    for construction in exact(target):
        assert construction.network.width == 1
        found = construction.network.jet(construction.theta[None], points)[0].numpy()
        difference = found - numpy_jet(target, points.numpy())
        assert np.abs(difference).max() < 1e-12, construction.label
        assert search.measure(target, construction.network, construction.theta).total < 1e-6


def test_one_la_neuron_has_the_first_target_and_one_moa_neuron_each_of_them():
    groups = [{construction.network.group for construction in exact(target)} for target in TARGETS]
    assert groups == [{"LA", "MoA"}, {"MoA"}, {"MoA"}]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_grid_reaches_the_boundary_and_both_sides_of_each_kink_but_lies_on_none(target):
    points = sobolev.grid(target)
    for k in range(target.d):
        assert points[:, k].min() == -1
        assert points[:, k].max() == 1
        assert bool((points[:, k] == 0).any()) == (k not in target.kinks)
        if k in target.kinks:
            assert {-1e-9, 1e-9} <= set(points[:, k].tolist())
    assert np.allclose(sobolev.jet(target, points), numpy_jet(target, points.numpy()), atol=1e-15)
    assert (sobolev.training_points(target, 64, 0)[:, target.kinks].abs() > 1e-6).all()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_gradients_and_jacobians_are_those_of_finite_differences(target):
    points = sobolev.training_points(target, 5, 0)
    for network in candidates(target, 2)[-4:]:
        theta, _ = draw_starts(network, target, 2, torch.Generator().manual_seed(3))
        jet, jacobian, h = network.jet(theta, points), network.jacobian(theta, points), 1e-6
        for k in range(target.d):
            step = h * torch.eye(target.d, dtype=torch.float64)[k]
            slope = (network.jet(theta, points + step) - network.jet(theta, points - step))[..., 0] / (2 * h)
            assert torch.allclose(jet[..., 1 + k], slope, atol=1e-6)
        for index in (0, theta.shape[1] // 2, theta.shape[1] - 1):
            step = h * torch.eye(theta.shape[1], dtype=torch.float64)[index]
            slope = (network.jet(theta + step, points) - network.jet(theta - step, points)) / (2 * h)
            assert torch.allclose(jacobian[..., index], slope, atol=1e-5)


def test_a_fixed_pair_is_the_product_of_its_two_activations():
    network = fixed_pair("tanh", "relu2", 3, 1)
    values = {
        "w1.weight": {(0, 0): 2.0},
        "w1.bias": {0: 0.5},
        "w2.weight": {(0, 2): 3.0},
        "w3.weight": {(0, 0): -1.5},
        "w3.bias": {0: 0.25},
        "alpha": {1: 1.0},
    }
    x = torch.tensor([[0.3, -0.8, 0.4], [-0.9, 0.1, -0.2]], dtype=torch.float64)
    found = network.jet(build("", network, values).theta[None], x)[0, :, 0]
    assert np.allclose(found, 0.25 - 1.5 * np.tanh(2 * x[:, 0] + 0.5) * np.maximum(3 * x[:, 2], 0) ** 2)
    theta, free = draw_starts(network, PRODUCT, 4, torch.Generator().manual_seed(0))
    held = network.unflatten(free[0].double())["alpha"]
    assert network.unflatten(theta[0])["alpha"].tolist() == [0, 1, 0]
    assert not held.any()


@pytest.mark.parametrize("width", [1, 3, 8])
def test_the_staircase_misses_what_the_bound_allows_for_pieces_of_its_number(width):
    known = staircase(SUM, width)
    distance = search.measure(SUM, known.network, known.theta)
    assert distance.gradient == pytest.approx(1 / width, abs=1e-6)
    assert distance.value == pytest.approx(1 / (8 * width**2), abs=1e-6)
    assert distance.total > SUM.bound("fixed", width)


@pytest.mark.parametrize("activation", TYPE_ONE)
def test_no_fixed_activation_comes_nearer_to_the_first_target_than_is_proven(activation):
    network = Network("fixed", activation, activation, None, 1, 2)
    best = search.refine(search.scout(search.Work(0, network, SMALL)))
    assert best.distance.total > SUM.bound("fixed", 2) == 1 / 2


def test_neither_fixed_nor_la_comes_nearer_to_the_second_than_is_proven():
    for network in candidates(GATED, 2):
        if network.label in ("relu", "tanh", "la"):
            best = search.refine(search.scout(search.Work(1, network, SMALL)))
            assert best.distance.total > GATED.bound(network.group, 2) == pytest.approx(np.tanh(2) / 2)


def test_a_fit_from_kinks_in_the_right_place_finds_the_la_neuron_and_held_entries_stay():
    network = candidates(SUM, 2)[-2]
    points, goal = search.problem(SUM, seed=0)
    theta, free = draw_starts(network, SUM, 8, torch.Generator().manual_seed(0))
    found = fit(network, theta, free, points, goal, least_squares=40, minimax=0)
    assert torch.equal(found[~free], theta[~free])
    assert min(search.measure(SUM, network, one).total for one in found) < 1e-9


def test_the_weights_lead_from_least_squares_towards_a_smaller_maximum():
    network = candidates(SUM, 2)[3]  # gelu
    points, goal = search.problem(SUM, seed=0)
    theta, free = draw_starts(network, SUM, 4, torch.Generator().manual_seed(0))
    square = fit(network, theta, free, points, goal, least_squares=30, minimax=0)
    both = fit(network, square, free, points, goal, least_squares=0, minimax=15)
    largest = [sobolev.norms(network.jet(it, points) - goal).sum(-1) for it in (square, both)]
    assert (largest[1] <= largest[0]).all()
    assert largest[1].min() < 0.95 * largest[0].min()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What `python -m moa.theory` leaves."""
    place = tmp_path_factory.mktemp("theory")
    with redirect_stdout(StringIO()) as shown:
        command.main(f"--quick --widths 1 --starts 2 --processes 1 --output {place}/theory.png".split())
    (place / "stdout.txt").write_text(shown.getvalue())
    return place


def test_the_command_shows_zero_for_the_constructions_and_a_gap_for_every_fixed_network(folder):
    record = json.loads((folder / "theory.json").read_text())
    assert [target["name"] for target in record["targets"]] == ["sum", "gated", "product"]
    for target in record["targets"]:
        assert max(one["total"] for one in target["exact"]) < 1e-6
        assert min(one["total"] for one in target["found"] if one["group"] == "fixed") > 1e-2
        assert {one["group"] for one in target["found"]} == {"fixed", "LA", "MoA"}
    table = (folder / "stdout.txt").read_text()
    for target in TARGETS:
        assert target.formula in table
    assert "one LA neuron: " in table
    assert "fixed, best of 28" in table


def test_its_picture_opens_and_nothing_else_is_left(folder):
    from PIL import Image

    with Image.open(folder / "theory.png") as picture:
        picture.verify()
        assert picture.size[0] > 1000
    assert sorted(path.name for path in folder.iterdir()) == ["stdout.txt", "theory.json", "theory.png"]


def test_the_numbers_are_the_same_in_other_processes(folder):
    found = json.loads((folder / "theory.json").read_text())["targets"][1]["found"]
    effort = replace(command.QUICK, starts=2)
    works = [search.Work(1, network, effort) for network in candidates(GATED, 1)[-2:]]
    with pool.spread(2) as each:
        fits = list(each(search.refine, list(each(search.scout, works))))
    for nearest in fits:
        (before,) = [one["total"] for one in found if one["label"] == nearest.network.label]
        assert nearest.distance.total == before


def test_the_table_names_the_nearest_and_the_bound():
    fits = search.staircases([1, 2])
    assert report.nearest(fits, 0, "fixed", 2).distance.total == pytest.approx(1 / 2 + 1 / 32, abs=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "theory.txt"], "name a file that ends in .png, .svg, .pdf"),
        (["--output", "nowhere/theory.png"], "there is no folder nowhere: make it first"),
        (["--widths", "0"], "'0' is not a positive whole number"),
        (["--starts", "many"], "'many' is not a positive whole number"),
    ],
)
def test_mistakes_are_told_before_any_work(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "theory.png"
    path.write_bytes(b"before")

    def full(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        command.write(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_ctrl_c_stops_at_once_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    with pytest.raises(SystemExit) as end:
        command.main(["--quick"])
    assert end.value.code == 130
    assert "nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
