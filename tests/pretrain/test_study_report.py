"""The report of a study says what its runs say, and can be made again from one file."""

import csv
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from pretrain.cli import config_folder
from pretrain.errors import UserError
from pretrain.study.__main__ import main
from pretrain.study.compare import compare
from pretrain.study.file import Study, read_study
from pretrain.study.report import write_report
from pretrain.study.results import Result, Results, read_results, write_results

ROOT = Path(__file__).parents[2]
STUDIES = config_folder() / "studies"
SEEDS = (1, 2, 3)
SIZES = {"small": 1e6, "medium": 2e6, "large": 4e6, "huge": 8e6}


def write_study(folder: Path) -> Path:
    file = folder / "study.yaml"
    study = {
        "title": "Three methods at four sizes",
        "command": "lm.fit",
        "config": str(config_folder() / "lm_tiny.yaml"),
        "sizes": {size: {"model.d_model": 64 * (i + 1)} for i, size in enumerate(SIZES)},
        "methods": {name: {"model.ffn.kind": name} for name in ("swiglu", "moa", "bi-moa")},
        "lr": [1e-3, 2e-3, 4e-3],
        "then": {"seeds": list(SEEDS), "lr": ["best", "common"]},
    }
    file.write_text(yaml.safe_dump(study, sort_keys=False))
    return file


def loss(size: str, method: str, lr: float, seed: int) -> float:
    """SwiGLU is best at 2e-3; the others gain 0.02 and 0.05 there, and more where they are best, at 4e-3."""
    law = 1.5 + 40 * SIZES[size] ** -0.3
    from_best = {"swiglu": abs(lr - 2e-3), "moa": abs(lr - 4e-3), "bi-moa": abs(lr - 4e-3)}[method]
    gain = {"swiglu": 0.0, "moa": 0.03, "bi-moa": 0.06}[method]
    return law - gain + 5 * from_best + 0.1 * seed + (0.001 * seed if method == "moa" else 0.0)


def result(size: str, method: str, lr: float, seed: int, **changes) -> Result:
    final = loss(size, method, lr, seed)
    n = int(SIZES[size]) + {"swiglu": 0, "moa": 1000, "bi-moa": 2000}[method]
    summary = {
        "exit_state": "finished", "step": 30, "total_steps": 30, "tokens_seen": 30 * 64, "seconds": 5.0,
        "final": {"step": 30, "val/loss": final}, "best": {"step": 30, "val/loss": final},
        "parameters": {"total": n, "activated": n}, "tokens_per_second": 100.0 if method == "swiglu" else 80.0,
        "plan": {"global_batch_size": 4, "units_per_sample": 16}, "versions": {"torch": "2.14"},
        "precision": "32-true", "device": "cpu", "git_commit": "0123456789abcdef",
    }  # fmt: skip
    curve = [{"step": float(step), "val/loss": final + 1 / step} for step in (10, 20, 30)]
    return Result(size, method, lr, seed, **{"state": "finished", "summary": summary, "curve": curve} | changes)


@pytest.fixture(scope="module")
def results() -> Results:
    found = []
    for size in SIZES:
        for method in ("swiglu", "moa", "bi-moa"):
            best = 2e-3 if method == "swiglu" else 4e-3
            pairs = [(lr, 0) for lr in (1e-3, 2e-3, 4e-3)] + [(lr, s) for lr in {2e-3, best} for s in SEEDS]
            found += [result(size, method, lr, seed) for lr, seed in pairs]
    evaluated = found[3]  # swiglu, small, the first seed
    assert (evaluated.method, evaluated.seed) == ("swiglu", 1)
    evaluated.downstream = {"arc_challenge": 25.5}
    return Results(found)


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    return read_study(write_study(tmp_path_factory.mktemp("study")))


@pytest.fixture(scope="module")
def report(study, results, tmp_path_factory) -> str:
    return write_report(study, results, tmp_path_factory.mktemp("report")).read_text()


def test_the_table_says_how_much_lower_the_loss_is_and_how_sure_that_is(report):
    # moa - swiglu is -0.03 + 0.001 seed: mean -0.028, deviation 0.001, interval 4.3027 x 0.001 / sqrt(3)
    mean = f"{loss('small', 'moa', 4e-3, 2):.4f}"
    relative = "-0.0280 ± 0.0010 | -0.0305 to -0.0255 | <0.001"
    assert f"| moa | 0.004 | {mean} ± 0.1010 | {relative} | 3 | 1,001,000 (+0.10%) | 1.25x |" in report
    assert "| swiglu | 0.002 |" in report
    common = report.split("All at the baseline's best learning rate:")[1]
    assert "| moa | 0.002 |" in common
    assert "-0.0180 ± 0.0010" in common


def test_the_report_warns_of_the_edge_of_the_grid(report):
    assert "- small moa: the best learning rate 0.004 is the highest of the grid: widen it" in report
    assert "small swiglu: the best" not in report


def test_the_law_of_the_baseline_is_the_planted_one(report):
    (row,) = [line for line in report.split("## Scaling laws")[1].splitlines() if line.startswith("| swiglu")][:1]
    exponent = float(row.split("|")[4].split()[0])
    assert exponent == pytest.approx(0.3, abs=1e-3)


def test_evaluations_become_a_table(report):
    assert "| method | arc_challenge |" in report
    assert "| swiglu | 25.50 |" in report


def test_figures_are_drawn_and_the_same_results_give_the_same_bytes(study, results, tmp_path):
    for folder in ("a", "b"):
        write_report(study, results, tmp_path / folder)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    figures = ["curves.svg", "rates.svg", "relative.svg", "scaling.svg"]
    assert files == sorted(["comparisons.csv", "report.md", "runs.csv", *figures])
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
        if file.endswith(".svg"):
            assert ElementTree.parse(tmp_path / "a" / file).getroot().tag.endswith("svg")
            assert f"({file})" in (tmp_path / "a" / "report.md").read_text()


def test_a_report_is_made_again_from_its_results_file(results, report, tmp_path):
    for name in ("once.json.gz", "twice.json.gz"):
        write_results(tmp_path / name, results)
    assert (tmp_path / "once.json.gz").read_bytes() == (tmp_path / "twice.json.gz").read_bytes()
    file, folder = write_study(tmp_path), tmp_path / "docs"
    main([str(file), "--report", "--results", str(tmp_path / "once.json.gz"), "--report_dir", str(folder)])
    assert (folder / "report.md").read_text() == report
    assert not list(folder.glob("*.gz"))


PUBLISHED = sorted((ROOT / "studies" / "results").glob("*.json.gz"))


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.name.split(".")[0])
def test_a_published_report_is_what_its_results_say(file, tmp_path):
    study = read_study(STUDIES / f"{file.name.split('.')[0]}.yaml")
    write_report(study, read_results(file), tmp_path)
    for name in ("report.md", "comparisons.csv", "runs.csv"):
        assert (ROOT / "docs" / "studies" / study.name / name).read_text() == (tmp_path / name).read_text()


def test_another_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "results.json.gz").write_text("nothing")
    with pytest.raises(UserError, match="holds no results of a study"):
        read_results(tmp_path / "results.json.gz")


def test_runs_that_did_not_finish_are_named_and_left_out(study, results, tmp_path):
    changed = [
        result(r.size, r.method, r.lr, r.seed, state="diverged", error="the loss is nan")
        if (r.size, r.method, r.seed) == ("huge", "moa", 2) and r.lr == 4e-3
        else r
        for r in results.all
    ]
    compared = compare(study, Results(changed))
    (moa,) = [c for c in compared.at("huge") if c.point.method == "moa"]
    assert [run.seed for run in moa.runs] == [1, 3]
    assert moa.versus is not None
    assert moa.versus.differences == pytest.approx([-0.029, -0.027])  # each against the baseline of its own seed
    text = write_report(study, Results(changed), tmp_path).read_text()
    assert "- huge moa, lr 0.004, seed 2 diverged: the loss is nan" in text
    assert "| 2 of 3 |" in text
    with (tmp_path / "runs.csv").open() as file:
        assert sum(row["state"] == "diverged" for row in csv.DictReader(file)) == 1


def test_each_group_has_its_own_baseline(tmp_path, results):
    file = write_study(tmp_path)
    text = yaml.safe_load(file.read_text()) | {"baseline": {"swiglu": ["moa"], "bi-moa": []}}
    file.write_text(yaml.safe_dump(text, sort_keys=False))
    compared = compare(read_study(file), results)
    assert [c.is_baseline for c in compared.at("small")] == [True, False, True]
    assert compared.by_mode["common"][2].lr == 4e-3  # bi-moa's own best


def test_a_report_of_nothing_says_so(study, tmp_path):
    nothing = [Result(r.size, "swiglu", 1e-3, 0, "open") for r in [result("small", "swiglu", 1e-3, 0)]]
    text = write_report(study, Results(nothing), tmp_path).read_text()
    assert "1 runs are still to be done" in text
    assert "small swiglu: no learning rate of the grid led to the end" in text
