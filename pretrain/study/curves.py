"""The figure of the loss curves."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from pretrain.study.compare import Comparisons
from pretrain.study.results import Result
from pretrain.study.style import STYLE, colours, legend


def curves_figure(compared: Comparisons) -> Figure | None:
    """Validation loss over the tokens (or images) of training, and the same relative to the baseline's.

    Lines: mean over the seeds. Bands: their range; below, that of the differences seed by seed.
    """
    sizes = [s for s in compared.study.sizes if any(len(_curve(c.runs)[0]) > 1 for c in compared.at(s))]
    if not sizes:
        return None
    with matplotlib.rc_context(STYLE):
        if len(sizes) == 1:
            figure = Figure(figsize=(9.2, 3.4), layout="constrained")
            panels = figure.subplots(1, 2).reshape(2, 1)
        else:
            figure = Figure(figsize=(1.2 + 2.7 * len(sizes), 5.4), layout="constrained")
            panels = figure.subplots(2, len(sizes), sharex="col")
        for column, size in enumerate(sizes):
            _curves(compared, size, panels[0, column], panels[1, column])
        panels[0, 0].set_ylabel("validation loss")
        panels[1, 0].set_ylabel("relative to the baseline's")
        figure.supxlabel(f"{_unit(compared)} of training", fontsize=9)
        legend(figure, panels[0, 0])
    return figure


def _curves(compared: Comparisons, size: str, above: Axes, below: Axes) -> None:
    colour, here = colours(compared), compared.at(size)
    runs = {c.point.method: c.runs for c in here}
    for c in here:
        x, losses = _curve(c.runs)
        if len(x) < 2:
            continue
        look: dict[str, Any] = {"color": colour[c.point.method], "linestyle": "--" if c.is_baseline else "-"}
        above.plot(x, losses.mean(0), label=c.point.method, linewidth=1.5, **look)
        above.fill_between(x, losses.min(0), losses.max(0), color=look["color"], alpha=0.15, linewidth=0)
        theirs = {run.seed: run for run in runs[c.baseline]}
        both = [run for run in c.runs if run.seed in theirs]
        if c.is_baseline or not both:
            continue
        x, own = _curve([*both, *(theirs[run.seed] for run in both)])  # at steps that all of them have
        difference = own[: len(both)] - own[len(both) :]
        below.plot(x, difference.mean(0), linewidth=1.5, **look)
        below.fill_between(x, difference.min(0), difference.max(0), color=look["color"], alpha=0.15, linewidth=0)
    below.axhline(0, color="#4d4d4d", linewidth=1)
    above.set_title(size)
    for axes in (above, below):
        _show_the_later_part(axes)
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
        axes.locator_params(axis="x", nbins=5)


def _show_the_later_part(axes: Axes) -> None:
    """Leave out of sight how far a loss falls in the first third: what tells methods apart comes after it."""
    lines = [np.asarray(line.get_ydata()) for line in axes.get_lines()]
    later = [y[len(y) // 3 :] for y in lines]
    lowest, highest = min(y.min() for y in later), max(y.max() for y in later)
    room = 0.08 * (highest - lowest) or 0.01
    axes.set_ylim(lowest - room, highest + room)


def _curve(runs: list[Result]) -> tuple[Any, Any]:
    """Return the tokens (or images) at which every run was validated, and the losses there, (runs, points)."""
    by_run = [{int(row["step"]): row["val/loss"] for row in run.curve if "val/loss" in row} for run in runs]
    steps = sorted(set.intersection(*map(set, by_run))) if by_run else []
    plan = runs[0].summary["plan"] if runs else {"global_batch_size": 1, "units_per_sample": 1}
    per_step = plan["global_batch_size"] * plan["units_per_sample"]
    return np.array(steps) * per_step, np.array([[losses[step] for step in steps] for losses in by_run])


def _unit(compared: Comparisons) -> str:
    for comparison in compared.main:
        for run in comparison.runs:
            return next(key for key in run.summary if key.endswith("_seen")).removesuffix("_seen")
    return "steps"
