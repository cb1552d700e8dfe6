"""The report of a study: tables, CSV files and figures in one folder, from the results alone."""

from collections import Counter
from pathlib import Path

from pretrain.atomic import write_atomically
from pretrain.study.compare import Comparisons, compare, mode_name
from pretrain.study.figures import draw_figures
from pretrain.study.file import Study
from pretrain.study.results import Result, Results
from pretrain.study.statistics import ScalingLaw, fit_scaling_law
from pretrain.study.store import FINISHED, OPEN
from pretrain.study.tables import (
    comparisons_csv,
    downstream_table,
    loss_table,
    rate_table,
    runs_csv,
    scaling_table,
)

SIZES_OF_A_LAW = 3


def write_report(study: Study, results: Results, folder: Path) -> Path:
    """Write report.md, comparisons.csv, runs.csv and the figures; return the report's file."""
    folder.mkdir(parents=True, exist_ok=True)
    compared = compare(study, results)
    laws = scaling_laws(compared)
    figures = draw_figures(compared, laws, folder)
    write_atomically(folder / "comparisons.csv", comparisons_csv(compared))
    write_atomically(folder / "runs.csv", runs_csv(results))
    report = folder / "report.md"
    write_atomically(report, report_text(compared, results, laws, figures))
    return report


def scaling_laws(compared: Comparisons) -> dict[str, ScalingLaw]:
    """Fit the law of every method that has enough sizes, to the mean losses over the seeds."""
    laws = {}
    for method in compared.study.methods:
        points = [c for c in compared.main if c.point.method == method and c.mean is not None and c.parameters]
        if len({c.parameters for c in points}) >= SIZES_OF_A_LAW:
            laws[method] = fit_scaling_law([c.parameters for c in points], [c.mean for c in points])
    return laws


def report_text(compared: Comparisons, results: Results, laws: dict[str, ScalingLaw], figures: dict[str, str]) -> str:
    """Return the report as Markdown."""
    study = compared.study
    parts = [f"# {study.title}", _facts(study, results)]
    if warnings := report_warnings(compared, results):
        parts.append("**To be read with care**\n\n" + "\n".join(f"- {warning}" for warning in warnings))
    if "relative" in figures:
        parts.append(_picture("relative", figures))
    parts.append(_meaning(study))
    for size in study.sizes:
        if size:
            parts.append(f"## {size}")
        for mode, comparisons in compared.by_mode.items():
            parts += [f"{mode_name(mode).capitalize()}:", loss_table(compared.at(size, comparisons))]
        if table := downstream_table(compared.at(size)):
            parts += ["Zero-shot accuracy, percent:", table]
    if laws:
        parts += ["## Scaling laws", "L(N) = L0 + a (N / reference)^-b:", scaling_table(laws)]
        parts.append(_picture("scaling", figures))
    parts.append("## Learning rates")
    parts.append(f"Terminal validation loss on seed {study.select_seed}:")
    for size in study.sizes:
        parts += [f"{size}:", rate_table(compared, size)] if size else [rate_table(compared, size)]
    parts += [_picture(name, figures) for name in ("rates", "curves") if name in figures]
    return "\n\n".join(parts) + "\n"


def report_warnings(compared: Comparisons, results: Results) -> list[str]:
    """Return what a reader has to know before believing the tables, a line each."""
    warnings = [s.warning for s in compared.selections.values() if s.warning]
    for result in results.all:
        if result.state not in (FINISHED, OPEN):
            warnings.append(f"{_label(result)} {result.state}: {result.error}")
    if n_open := sum(result.state == OPEN for result in results.all):
        warnings.append(f"{n_open} runs are still to be done: the numbers will change")
    elif compared.study.then_seeds and any(len(c.runs) < 2 for cs in compared.by_mode.values() for c in cs):
        warnings.append("not every method has two finished seeds: the spread is not known everywhere")
    return warnings


def _facts(study: Study, results: Results) -> str:
    finished = [result.summary for result in results.all if result.state == FINISHED]
    counts = Counter(result.state for result in results.all)
    lines = [
        f"{len(results.all)} runs of `{study.command}`: {', '.join(f'{n} {s}' for s, n in sorted(counts.items()))}."
    ]
    if finished:
        steps = sorted({summary["total_steps"] for summary in finished})
        unit = next(key for key in finished[0] if key.endswith("_seen"))
        seen = sorted({summary[unit] for summary in finished})
        lines.append(f"{_range(steps)} optimizer steps, {_range(seen)} {unit.removesuffix('_seen')} a run.")
        versions = sorted({f"torch {s['versions']['torch']}, {s['precision']}, {s['device']}" for s in finished})
        commits = sorted({str(s["git_commit"])[:12] for s in finished if s.get("git_commit")})
        lines.append(f"{'; '.join(versions)}" + (f"; commit {', '.join(commits)}" if commits else "") + ".")
    return "\n".join(lines)


def _range(values: list[int]) -> str:
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _meaning(study: Study) -> str:
    baselines = " and ".join(f"`{name}`" for name in dict.fromkeys(study.baselines.values()))
    return (
        f"Relative: terminal validation loss minus that of the baseline ({baselines}) with the same seed, mean ± "
        "standard deviation over the seeds; below 0 is better. Interval and p: Student's t for pairs. "
        "Parameters: in all, and against the baseline."
        + (" Time: of a step, as a multiple of the baseline's, as these runs measured it." if study.timed else "")
    )


def _label(result: Result) -> str:
    return f"{result.size} {result.method}, lr {result.lr:g}, seed {result.seed}".strip()


def _picture(name: str, figures: dict[str, str]) -> str:
    return f"![{name}]({figures[name]})"
