"""A study file says which runs there are, and what they will take, before any of them starts."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lm.prepare import main as prepare
from pretrain.cli import config_folder
from pretrain.errors import UserError
from pretrain.study.__main__ import main
from pretrain.study.cost import cost_table, study_costs
from pretrain.study.file import read_study
from pretrain.study.grid import make_run, most_seed_runs, seed_runs, select, selection_runs
from pretrain.study.settings import flat, nested, override

STUDIES = config_folder() / "studies"
TINY = {"command": "lm.fit", "config": str(config_folder() / "lm_tiny.yaml"), "methods": {"swiglu": None}}


def write(folder: Path, **changes) -> Path:
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(TINY | changes, sort_keys=False))
    return file


@pytest.mark.parametrize(
    ("name", "selection", "seeds"),
    [
        ("table1", 10 * 7, 0),
        ("table1_dictionaries", 1 + 4 * 6 + 4, 0),
        ("table2", 6 * 7, 0),
        ("table3", 7, 2),
        ("figure1", 6 * 7, 0),
        ("figure2", 3 * 4 * 7, 0),
        ("figure3", 5 * 7, 5 * 2),  # the baseline's run at its own best learning rate is there already
        ("figure4", 3 * 7, 0),
        ("figure5", 2 * 5, 0),
        ("nano_table1", 10 * 3 + 6, 10 * 2 * 3 - 2 * 3),  # for the two baselines, best and common are one
        ("nano_figure3", 5 * 3, 5 * 3 * 3),
    ],
)
def test_the_shipped_studies_have_the_runs_of_the_paper(name, selection, seeds):
    study = read_study(STUDIES / f"{name}.yaml")
    assert len(selection_runs(study)) == selection
    assert sum(most_seed_runs(study, point) for point in study.points) == seeds


def test_every_study_of_the_paper_has_a_nano_twin_of_the_same_structure():
    names = {file.stem for file in STUDIES.glob("*.yaml")}
    for name in names:
        if name.startswith("nano_"):
            read_study(STUDIES / f"{name}.yaml")
            continue
        large, nano = read_study(STUDIES / f"{name}.yaml"), read_study(STUDIES / f"nano_{name}.yaml")
        assert (large.command, large.methods, large.baselines) == (nano.command, nano.methods, nano.baselines)
        assert len(large.sizes) == len(nano.sizes)


@pytest.mark.parametrize(
    ("name", "method", "steps"),
    [
        # N x tokens per parameter / (512 x 1,024), rounded up; N as in the paper, see tests/lm/test_configs.py
        ("table1", "swiglu", [4568]),
        ("table1", "qd-moa", [4570]),
        ("figure2", "swiglu", [4568, 9691, 22840]),
        ("figure3", "swiglu", [21674, 35033, 54004, 71712, 118419]),  # of the activated parameters
        ("figure5", "swiglu", [250_228]),  # 800 epochs of 1,281,167 pictures in batches of 4,096
    ],
)
def test_the_steps_of_the_paper(name, method, steps):
    study = read_study(STUDIES / f"{name}.yaml")
    costs = study_costs(replace(study, points=tuple(p for p in study.points if p.method == method)), prepare=False)
    assert [cost.plan.total_steps for cost in costs] == steps
    assert [cost.units for cost in costs] == [n * (4096 if name == "figure5" else 512 * 1024) for n in steps]


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    methods = {"swiglu": {"model.ffn.kind": "swiglu"}, "moa": {"model.ffn.kind": "moa"}}
    file = write(tmp_path, methods=methods, lr=[1e-3, 2e-3], then={"seeds": [1, 2], "lr": ["best", "common"]})
    main([str(file), "--dry_run", "--set", "trainer.max_steps=10"])
    shown = capsys.readouterr().out
    tokens = 10 * 16 * 256
    assert [line.split()[0] for line in shown.splitlines()[2:4]] == ["swiglu", "moa"]
    assert "2 + 2" in shown
    assert "2 + 4" in shown
    assert f"10 runs at most: {10 * tokens:,} tokens" in shown
    assert list(tmp_path.iterdir()) == [file]


def test_a_budget_beyond_its_source_has_to_say_how_often_it_repeats(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The state of the union is strong. " * 300)  # 10,200 bytes
    prepare([f"--source={text}", f"--output={tmp_path / 'tokens'}", "--tokenizer=bytes", "--workers=1"])
    overrides = {
        "data.source": str(tmp_path / "tokens"), "data.val_source": None, "data.val_fraction": 0,
        "data.sequence_length": 100, "trainer.max_steps": 10,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"16,000 tokens .* 10,200 1.57 times, .* allows 1: set `epochs`"):
        study_costs(read_study(write(tmp_path, overrides=overrides)), prepare=False)
    (cost,) = study_costs(read_study(write(tmp_path, overrides=overrides, epochs=2)), prepare=False)
    assert cost.epochs == pytest.approx(160 / 102)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {}}, "'method' is no key here: did you mean methods?"),
        ({"methods": {}}, "names no methods"),
        ({"command": "lm.evaluate"}, "lm.evaluate cannot be studied, only lm.fit and vision_mae.fit"),
        ({"baseline": "moa"}, "baseline: 'moa' is none of the methods swiglu"),
        ({"lr": ["much"]}, "lr: 'much' has to be a number above 0"),
        ({"then": {"seeds": [-1]}}, "then.seeds: -1 has to be a whole number"),
        ({"methods": {"a": {"model.ffn.kind": {"each": "moa"}}}}, "`each` stands alone, with a list"),
        ({"methods": ["moa"]}, "methods: ['moa'] has to be keys and values"),
        ({"methods": {"moa": "bi-moa"}}, "methods, moa: 'bi-moa' has to be keys and values"),
        ({"lr": 1e-3}, "lr: 0.001 has to be a list"),
        ({"then": {"seeds": 3}}, "then.seeds: 3 has to be a list"),
        ({"config": "nowhere.yaml"}, "nowhere.yaml does not exist"),
        ({"runs": "a/b"}, "the name of one folder"),
    ],
)
def test_mistakes_in_a_study_file_are_told_in_one_line(tmp_path, capsys, changes, message):
    with pytest.raises(SystemExit) as end:
        main([str(write(tmp_path, **changes)), "--dry_run"])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_settings_that_no_run_accepts_are_told_before_any_run_starts(tmp_path, capsys):
    methods = {"right": {"model.ffn.kind": "swiglu"}, "wrong": {"model.ffn.kidn": "moa"}}
    with pytest.raises(SystemExit):
        main([str(write(tmp_path, methods=methods)), "--output", str(tmp_path / "out")])
    assert "study, wrong: " in (error := capsys.readouterr().err)
    assert "ffn.kidn" in error
    assert not (tmp_path / "out").exists()


def test_a_grid_is_a_product_of_sizes_methods_and_rates(tmp_path):
    study = read_study(
        write(
            tmp_path,
            sizes={"small": {"model.d_model": 64}, "large": {"model.d_model": 128, "lr": [1e-3]}},
            methods={
                "moa": {"model.ffn.gate": {"each": ["tanh", "softmax"]}, "model.ffn.kind": {"each": ["moa", "bi-moa"]}}
            },
            lr=[1e-3, 3e-3],
        )
    )
    assert study.methods == ["moa tanh moa", "moa tanh bi-moa", "moa softmax moa", "moa softmax bi-moa"]
    runs = selection_runs(study)
    assert len(runs) == 4 * 2 + 4 * 1
    assert len({run.key for run in runs}) == len(runs)
    assert runs[0].settings["model.d_model"] == 64
    assert runs[0].label == "small moa tanh moa lr 0.001 seed 0"


def test_a_method_may_have_a_grid_of_its_own(tmp_path):
    methods = {"moa": {"model.ffn.kind": "moa"}, "bi-moa": {"model.ffn.kind": "bi-moa", "lr": [2e-3, 4e-3]}}
    sizes = {"small": {}, "large": {"model.d_model": 128, "lr": [5e-4]}}
    study = read_study(write(tmp_path, methods=methods, sizes=sizes, lr=[1e-3]))
    grids = {(point.size, point.method): point.lrs for point in study.points}
    assert grids["small", "moa"] == (1e-3,)
    assert grids["large", "moa"] == (5e-4,)
    assert grids["small", "bi-moa"] == grids["large", "bi-moa"] == (2e-3, 4e-3)
    assert all("lr" not in run.settings for run in selection_runs(study))


def test_a_run_is_known_by_what_it_computes(tmp_path):
    """Not by where the study file lies, what it calls things, or how it writes a number."""
    one = read_study(write(tmp_path, title="one", lr=[0.001], methods={"a": {"model.ffn": {"kind": "moa"}}}))
    text = (tmp_path / "study.yaml").read_text().replace("a:", "b:").replace("0.001", "1e-3")
    other_file = tmp_path / "other.yaml"
    other_file.write_text(text)
    other = read_study(other_file)
    (a,), (b,) = selection_runs(one), selection_runs(other)
    assert (a.key, b.method) == (b.key, "b")
    assert make_run(one, one.points[0], 0.001, 1).key != a.key


def test_an_override_replaces_what_lies_below_and_above_it():
    settings = {"model.moe": None, "model.ffn.kind": "moa", "model.ffn.gate": "tanh"}
    assert override(settings, {"model": {"moe": {"top_k": 2}}})["model.moe.top_k"] == 2
    assert "model.moe" not in override(settings, {"model.moe.top_k": 2})
    assert override(settings, {"model.ffn": None}) == {"model.moe": None, "model.ffn": None}
    assert flat(nested(settings)) == settings


def selected(tmp_path, losses: dict[tuple[str, float], float | None]):
    rates = sorted({lr for _, lr in losses})
    methods = {name: {"model.ffn.kind": name} for name in dict.fromkeys(name for name, _ in losses)}
    study = read_study(
        write(tmp_path, methods=methods, lr=rates, then={"seeds": [1, 2], "lr": ["best", "common", 0.5]})
    )
    return study, select(study, lambda run: losses[run.method, run.lr])


def test_each_method_gets_the_best_rate_of_its_grid(tmp_path):
    losses = {("swiglu", 0.1): 3.0, ("swiglu", 0.2): 2.9, ("swiglu", 0.3): 3.1}
    losses |= {("moa", 0.1): 3.0, ("moa", 0.2): None, ("moa", 0.3): 2.7}
    study, selections = selected(tmp_path, losses)
    swiglu, moa = selections["", "swiglu"], selections["", "moa"]
    assert (swiglu.best, swiglu.warning) == (0.2, None)
    assert moa.best == 0.3
    assert "moa: the best learning rate 0.3 is the highest of the grid: widen it" in str(moa.warning)
    runs = {(run.method, run.lr, run.seed) for run in seed_runs(study, selections)}
    expected = {("swiglu", 0.2), ("moa", 0.3), ("moa", 0.2), ("swiglu", 0.5), ("moa", 0.5)}
    assert runs == {(method, lr, seed) for method, lr in expected for seed in (1, 2)}


def test_a_method_that_never_finishes_has_no_seeds_at_its_best_rate(tmp_path):
    losses = {("swiglu", 0.1): 3.0, ("swiglu", 0.2): 2.9, ("moa", 0.1): None, ("moa", 0.2): None}
    study, selections = selected(tmp_path, losses)
    assert selections["", "moa"].best is None
    assert "no learning rate" in str(selections["", "moa"].warning)
    assert {run.lr for run in seed_runs(study, selections) if run.method == "moa"} == {0.2, 0.5}


def test_a_table_leaves_out_columns_that_say_nothing(tmp_path):
    study = read_study(write(tmp_path, sizes={"wide": {}}))
    assert "wide" in cost_table(study, study_costs(study, prepare=False))
