"""From a study to its runs: first those that select the learning rate, then the seeds at the selected ones."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from pretrain.study.file import BEST, COMMON, LR, SEED, Point, Study
from pretrain.study.settings import Settings, fingerprint, override


@dataclass(frozen=True)
class Run:
    """One run of a study; two with the same `key` compute the same."""

    size: str
    method: str
    lr: float
    seed: int
    settings: Settings
    key: str

    @property
    def label(self) -> str:
        return " ".join([*([self.size] if self.size else []), self.method, f"lr {self.lr:g}", f"seed {self.seed}"])

    @property
    def folder_name(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', self.label)}-{self.key}"


def make_run(study: Study, point: Point, lr: float, seed: int) -> Run:
    """Return the run of a point at a learning rate and a seed."""
    settings = override(point.settings, {LR: lr, SEED: seed})
    return Run(point.size, point.method, lr, seed, settings, fingerprint(study.command, settings))


def selection_runs(study: Study) -> list[Run]:
    """Return the runs of the first stage: the grid of learning rates, on one seed."""
    return [
        make_run(study, point, lr, study.select_seed)
        for point in study.points
        if point.method in study.select_methods
        for lr in point.lrs
    ]


@dataclass(frozen=True)
class Selection:
    """The learning rate of a size and method with the lowest terminal loss; None where every run failed."""

    size: str
    method: str
    best: float | None
    losses: dict[float, float]  # by learning rate; inf where the run diverged or failed

    @property
    def warning(self) -> str | None:
        """What is doubtful about it."""
        who = f"{self.size} {self.method}".strip()
        if self.best is None:
            return f"{who}: no learning rate of the grid led to the end"
        if len(self.losses) > 1 and self.best in (min(self.losses), max(self.losses)):
            side = "lowest" if self.best == min(self.losses) else "highest"
            return f"{who}: the best learning rate {self.best:g} is the {side} of the grid: widen it"
        return None


def select(study: Study, loss_of: Callable[[Run], float | None]) -> dict[tuple[str, str], Selection]:
    """Select the learning rates by (size, method).

    Args:
        loss_of: the terminal validation loss of a run, or None if it has none.
    """
    found: dict[tuple[str, str], dict[float, float]] = {}
    for run in selection_runs(study):
        loss = loss_of(run)
        found.setdefault((run.size, run.method), {})[run.lr] = math.inf if loss is None else loss
    selections = {}
    for (size, method), losses in found.items():
        best = min(losses, key=lambda lr: losses[lr])
        selections[size, method] = Selection(size, method, best if math.isfinite(losses[best]) else None, losses)
    return selections


def rate(study: Study, selections: dict[tuple[str, str], Selection], point: Point, mode: str | float) -> float | None:
    """Return the learning rate of a point in a mode of `then.lr`; None if the selection found none."""
    if isinstance(mode, float):
        return mode
    selection = selections.get((point.size, study.baselines[point.method] if mode == COMMON else point.method))
    return None if selection is None else selection.best


def seed_runs(study: Study, selections: dict[tuple[str, str], Selection]) -> list[Run]:
    """Return the runs of the second stage, each once: every seed at every learning rate that `then` asks for."""
    runs: dict[str, Run] = {}
    for mode in study.then_lrs:
        for point in study.points:
            lr = rate(study, selections, point, mode)
            if lr is not None:
                found = [make_run(study, point, lr, seed) for seed in study.then_seeds]
                runs |= {run.key: run for run in found}
    return list(runs.values())


def most_seed_runs(study: Study, point: Point) -> int:
    """Return how many runs the second stage adds for a point, at most: `best` and `common` may turn out the same."""
    is_selected = point.method in study.select_methods
    modes = {mode for mode in study.then_lrs if mode != BEST or is_selected}
    if point.method == study.baselines[point.method] and {BEST, COMMON} <= modes:
        modes.discard(COMMON)
    # A rate of the grid on the seed of the selection has been run by then.
    had = {mode for mode in modes if is_selected and (mode in (BEST, COMMON) or mode in point.lrs)}
    return sum(not (seed == study.select_seed and mode in had) for mode in modes for seed in study.then_seeds)
