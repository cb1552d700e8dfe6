"""The figures of a report, as SVG: the same results give the same bytes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from pretrain.study.compare import Comparison, Comparisons
from pretrain.study.statistics import ScalingLaw, log_ratio, quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Baselines in greys; methods in colours that colour-blind readers can tell apart (Okabe and Ito), then darker ones.
GREYS = ("#4d4d4d", "#8c8c8c", "#b3b3b3")
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#a05a2c", "#11a579", "#b22222")
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "study",  # ids in the file would be drawn at random
    "svg.fonttype": "path",
}
ACROSS = 3  # panels side by side


def draw_figures(compared: Comparisons, laws: dict[str, ScalingLaw], folder: Path) -> dict[str, str]:
    """Draw every figure that the results suffice for; return {name: file name in `folder`}."""
    drawn = {
        "relative": relative_figure(compared),
        "curves": curves_figure(compared),
        "rates": rates_figure(compared),
        "scaling": scaling_figure(compared, laws),
    }
    files = {}
    for name, figure in drawn.items():
        file = folder / f"{name}.svg"
        file.unlink(missing_ok=True)  # one of earlier results
        if figure is not None:
            with matplotlib.rc_context(STYLE):
                figure.savefig(file, metadata={"Date": None})
            files[name] = file.name
    return files


def colours(compared: Comparisons) -> dict[str, str]:
    """Return the colour of every method, the same in all figures."""
    baselines = list(dict.fromkeys(compared.study.baselines.values()))
    others = [method for method in compared.study.methods if method not in baselines]
    return {name: GREYS[i % len(GREYS)] for i, name in enumerate(baselines)} | {
        name: COLOURS[i % len(COLOURS)] for i, name in enumerate(others)
    }


def relative_figure(compared: Comparisons) -> Figure | None:
    """Terminal loss relative to the baseline: every seed a dot, the mean a bar, the confidence interval a line."""
    shown = [c for c in compared.main if c.versus is not None]
    if not shown:
        return None
    sizes = [size for size in compared.study.sizes if any(c.point.size == size for c in shown)]
    rows = max(len([c for c in shown if c.point.size == size]) for size in sizes)
    colour = colours(compared)
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(sizes, width=5.0 if len(sizes) == 1 else 3.4, height=0.9 + 0.34 * rows, share_x=True)
        for size, axes in zip(sizes, panels, strict=True):
            here = [c for c in shown if c.point.size == size]
            for row, c in enumerate(here):
                _relative_row(axes, row, c, colour[c.point.method])
            axes.set_yticks(range(len(here)), [c.point.method for c in here])
            axes.set_ylim(len(here) - 0.4, -0.6)
            axes.grid(axis="y", visible=False)
            axes.axvline(0, color="#4d4d4d", linewidth=1)
            axes.set_xlabel("validation loss relative to the baseline")
            axes.set_title(size)
    return figure


def _relative_row(axes: "Axes", row: int, c: Comparison, colour: str) -> None:
    versus = c.versus
    assert versus is not None
    axes.barh(row, versus.mean, height=0.62, color=colour, alpha=0.35, linewidth=0)
    axes.plot([versus.mean] * 2, [row - 0.31, row + 0.31], color=colour, linewidth=2)
    axes.plot(versus.differences, [row] * versus.n, "o", color=colour, markersize=4, markeredgecolor="white", zorder=3)
    if versus.low is not None and versus.high is not None:
        axes.plot([versus.low, versus.high], [row, row], color=colour, linewidth=1.2)


def curves_figure(compared: Comparisons) -> Figure | None:
    """Validation loss over the tokens (or images) of training: mean over the seeds, and their range."""
    sizes = [s for s in compared.study.sizes if any(len(_curve(c)[0]) > 1 for c in compared.at(s))]
    if not sizes:
        return None
    colour = colours(compared)
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(sizes, width=5.6 if len(sizes) == 1 else 3.6, height=3.4)
        for size, axes in zip(sizes, panels, strict=True):
            lowest, highest = np.inf, -np.inf
            for c in compared.at(size):
                x, losses = _curve(c)
                if len(x) < 2:
                    continue
                mean, paint = losses.mean(0), colour[c.point.method]
                axes.plot(x, mean, color=paint, label=c.point.method, linewidth=1.5)
                axes.fill_between(x, losses.min(0), losses.max(0), color=paint, alpha=0.15, linewidth=0)
                lowest, highest = min(lowest, mean.min()), max(highest, mean[len(mean) // 3])
            # The first third falls from far above: what tells the methods apart is below it.
            axes.set_ylim(lowest - 0.05 * (highest - lowest), highest + 0.25 * (highest - lowest))
            axes.set(title=size, xlabel=f"{_unit(compared)} of training", ylabel="validation loss")
            axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=" "))
        _legend(figure, panels[0])
    return figure


def _curve(c: Comparison) -> tuple[Any, Any]:
    """Return the tokens (or images) at which every seed was validated, and the losses there, (seeds, points)."""
    by_seed = [{int(row["step"]): row["val/loss"] for row in run.curve if "val/loss" in row} for run in c.runs]
    steps = sorted(set.intersection(*map(set, by_seed))) if by_seed else []
    per_step = 1.0
    if c.runs:
        plan = c.runs[0].summary["plan"]
        per_step = plan["global_batch_size"] * plan["units_per_sample"]
    return np.array(steps) * per_step, np.array([[losses[step] for step in steps] for losses in by_seed])


def _unit(compared: Comparisons) -> str:
    for comparison in compared.main:
        for run in comparison.runs:
            return next(key for key in run.summary if key.endswith("_seen")).removesuffix("_seen")
    return "steps"


def rates_figure(compared: Comparisons) -> Figure | None:
    """Terminal loss of the selection against the learning rate, the best one marked."""
    chosen = [s for s in compared.selections.values() if len(s.losses) > 1 and s.best is not None]
    if not chosen:
        return None
    sizes = [size for size in compared.study.sizes if any(s.size == size for s in chosen)]
    colour = colours(compared)
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(sizes, width=5.6 if len(sizes) == 1 else 3.6, height=3.2)
        for size, axes in zip(sizes, panels, strict=True):
            rates: set[float] = set()
            for selection in (s for s in chosen if s.size == size):
                x = [lr for lr, loss in selection.losses.items() if np.isfinite(loss)]
                y, paint = [selection.losses[lr] for lr in x], colour[selection.method]
                axes.plot(x, y, "o-", color=paint, label=selection.method, linewidth=1.2, markersize=3.5)
                axes.plot(
                    selection.best, selection.losses[selection.best], "o", color=paint, markersize=9, fillstyle="none"
                )
                rates |= set(selection.losses)
            axes.set_xscale("log")
            axes.set_xticks(sorted(rates), [f"{lr:g}" for lr in sorted(rates)])
            axes.minorticks_off()
            axes.set(title=size, xlabel="peak learning rate", ylabel="terminal validation loss")
        _legend(figure, panels[0])
    return figure


def scaling_figure(compared: Comparisons, laws: dict[str, ScalingLaw]) -> Figure | None:
    """Left: loss against parameters, with the fitted laws; right: log(L_baseline / L_method). Bands: 95% confidence."""
    if not laws:
        return None
    colour = colours(compared)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for method, law in laws.items():
            points = [c for c in compared.main if c.point.method == method and c.mean is not None]
            n, paint = np.array([c.parameters for c in points], dtype=float), colour[method]
            grid = np.geomspace(n.min(), n.max(), 100)
            left.plot(n, [c.mean for c in points], "o", color=paint, markersize=4)
            left.plot(grid, law(grid), color=paint, label=method, linewidth=1.4)
            if law.covariance is not None:
                left.fill_between(grid, *law.band(grid), color=paint, alpha=0.15, linewidth=0)
            baseline = compared.study.baselines[method]
            if method != baseline and baseline in laws:
                _log_ratio_panel(right, compared, method, laws, grid, paint)
        right.axhline(0, color="#4d4d4d", linewidth=1)
        left.set(xscale="log", xlabel="parameters", ylabel="terminal validation loss")
        right.set(xscale="log", xlabel="parameters", ylabel="log(baseline's loss / loss)")
        for axes in (left, right):
            axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=" "))
            axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        _legend(figure, left)
    return figure


def _log_ratio_panel(
    axes: "Axes", compared: Comparisons, method: str, laws: dict[str, ScalingLaw], grid: Any, colour: str
) -> None:
    baseline = compared.study.baselines[method]
    value, error = log_ratio(laws[baseline], laws[method], grid)
    axes.plot(grid, value, color=colour, linewidth=1.4)
    if error is not None:
        half = quantile(min(laws[baseline].degrees_of_freedom, laws[method].degrees_of_freedom)) * error
        axes.fill_between(grid, value - half, value + half, color=colour, alpha=0.15, linewidth=0)
    means = {(c.point.size, c.point.method): c.mean for c in compared.main}
    for c in compared.main:
        theirs = means.get((c.point.size, baseline))
        if c.point.method == method and c.mean is not None and theirs is not None and c.parameters is not None:
            axes.plot(c.parameters, np.log(theirs / c.mean), "o", color=colour, markersize=4)


def _panels(names: list[str], width: float, height: float, share_x: bool = False) -> tuple[Figure, list["Axes"]]:
    """Return a figure with a panel for each name, in rows of `ACROSS`."""
    across = min(len(names), ACROSS)
    down = -(-len(names) // across)
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, sharex=share_x).ravel()
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    return figure, list(panels[: len(names)])


def _legend(figure: Figure, axes: "Axes") -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
