"""Each method against its baseline, as numbers: what tables and figures show."""

import statistics
from dataclasses import dataclass
from typing import Any

from pretrain.study.file import BEST, COMMON, Point, Study
from pretrain.study.grid import Selection, rate, select
from pretrain.study.results import Result, Results
from pretrain.study.statistics import Paired, paired

Mode = str | float


@dataclass(frozen=True)
class Comparison:
    """A method at one size, with the learning rate of one mode, over all seeds."""

    point: Point
    baseline: str
    lr: float | None
    runs: list[Result]  # finished ones
    n_seeds: int  # that were asked for
    versus: Paired | None  # None for a baseline, and where no seed has both
    parameters: int | None
    activated: int | None
    parameter_overhead: float | None  # parameters over the baseline's, - 1
    time_overhead: (
        float | None
    )  # time for a token (or image) over the baseline's, - 1, median over seeds; None: untimed

    @property
    def is_baseline(self) -> bool:
        return self.point.method == self.baseline

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.losses) if self.runs else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds."""
        return statistics.stdev(self.losses) if len(self.runs) > 1 else None

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs if run.loss is not None]


@dataclass(frozen=True)
class Comparisons:
    """A whole study: the selected learning rates, and the comparisons of each mode."""

    study: Study
    selections: dict[tuple[str, str], Selection]
    by_mode: dict[Mode, list[Comparison]]

    @property
    def main(self) -> list[Comparison]:
        """The comparisons that figures show: each method at its own best learning rate, or the only mode there is."""
        return self.by_mode.get(BEST) or next(iter(self.by_mode.values()))

    def at(self, size: str, among: list[Comparison] | None = None) -> list[Comparison]:
        """Return those of one size, by default of the main mode."""
        return [comparison for comparison in among or self.main if comparison.point.size == size]


def compare(study: Study, results: Results) -> Comparisons:
    """Work out all comparisons that a study asks for: those of its seeds, else of the selection's runs themselves."""
    selections = select(study, results.loss_of)
    modes, seeds = (study.then_lrs, study.then_seeds) if study.then_seeds else ((BEST,), (study.select_seed,))
    by_mode = {}
    for mode in modes:
        found: dict[tuple[str, str], tuple[float | None, list[Result]]] = {}
        for point in study.points:
            lr = rate(study, selections, point, mode)
            found[point.size, point.method] = lr, results.finished(point.size, point.method, lr, seeds)
        by_mode[mode] = [_comparison(study, point, found, len(seeds)) for point in study.points]
    return Comparisons(study, selections, by_mode)


def mode_name(mode: Mode) -> str:
    """Return what a mode of `then.lr` is called in a report."""
    names = {BEST: "each method at its own best learning rate", COMMON: "all at the baseline's best learning rate"}
    return names[mode] if isinstance(mode, str) else f"all at learning rate {mode:g}"


def _comparison(
    study: Study, point: Point, found: dict[tuple[str, str], tuple[float | None, list[Result]]], n_seeds: int
) -> Comparison:
    baseline = study.baselines[point.method]
    lr, runs = found[point.size, point.method]
    _, theirs = found[point.size, baseline]
    by_seed = {run.seed: run for run in theirs}
    pairs = [(run.loss, by_seed[run.seed].loss) for run in runs if run.seed in by_seed]
    parameters, of_baseline = _parameters(runs), _parameters(theirs)
    speed, baseline_speed = _speed(runs), _speed(theirs)
    return Comparison(
        point=point,
        baseline=baseline,
        lr=lr,
        runs=runs,
        n_seeds=n_seeds,
        versus=None if point.method == baseline else paired([a for a, _ in pairs], [b for _, b in pairs]),  # type: ignore[misc]
        parameters=parameters.get("total"),
        activated=parameters.get("activated"),
        parameter_overhead=parameters["total"] / of_baseline["total"] - 1 if parameters and of_baseline else None,
        time_overhead=baseline_speed / speed - 1 if study.timed and speed and baseline_speed else None,
    )


def _parameters(runs: list[Result]) -> dict[str, Any]:
    return runs[0].summary.get("parameters", {}) if runs else {}


def _speed(runs: list[Result]) -> float | None:
    """Return the median of tokens (or images) a second; None if no run has measured it."""
    speeds = [value for run in runs for key, value in run.summary.items() if key.endswith("_per_second") and value]
    return statistics.median(speeds) if speeds else None
