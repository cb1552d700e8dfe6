"""The figures of a report, as SVG: the same results give the same bytes."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from pretrain.study.compare import Comparison, Comparisons
from pretrain.study.curves import curves_figure
from pretrain.study.statistics import ScalingLaw, log_ratio, quantile
from pretrain.study.style import STYLE, colours, legend, panels


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


def relative_figure(compared: Comparisons) -> Figure | None:
    """Terminal loss relative to the baseline: every seed a dot, the mean a bar, the confidence interval a line."""
    shown = [c for c in compared.main if c.versus is not None]
    if not shown:
        return None
    sizes = [size for size in compared.study.sizes if any(c.point.size == size for c in shown)]
    rows = max(len([c for c in shown if c.point.size == size]) for size in sizes)
    colour = colours(compared)
    with matplotlib.rc_context(STYLE):
        figure, plots = panels(sizes, width=5.0 if len(sizes) == 1 else 3.4, height=0.9 + 0.34 * rows, share_x=True)
        for size, axes in zip(sizes, plots, strict=True):
            here = [c for c in shown if c.point.size == size]
            for row, c in enumerate(here):
                _relative_row(axes, row, c, colour[c.point.method])
            axes.set_yticks(range(len(here)), [_against(compared, c) for c in here])
            axes.set_ylim(len(here) - 0.4, -0.6)
            axes.grid(axis="y", visible=False)
            axes.axvline(0, color="#4d4d4d", linewidth=1)
            axes.use_sticky_edges = False  # a bar's foot would be the edge of the panel
            axes.margins(x=0.06)
            axes.set_title(size)
        figure.supxlabel("terminal validation loss, relative to the baseline's", fontsize=9)
    return figure


def _relative_row(axes: Axes, row: int, c: Comparison, colour: str) -> None:
    versus = c.versus
    assert versus is not None
    axes.barh(row, versus.mean, height=0.62, color=colour, alpha=0.35, linewidth=0)
    axes.plot([versus.mean] * 2, [row - 0.31, row + 0.31], color=colour, linewidth=2)
    axes.plot(versus.differences, [row] * versus.n, "o", color=colour, markersize=4, markeredgecolor="white", zorder=3)
    if versus.low is not None and versus.high is not None:
        axes.plot([versus.low, versus.high], [row, row], color=colour, linewidth=1.2)


def _against(compared: Comparisons, c: Comparison) -> str:
    """Return the name of a method, with its baseline's where a study has several."""
    return f"{c.point.method} − {c.baseline}" if len(set(compared.study.baselines.values())) > 1 else c.point.method


def rates_figure(compared: Comparisons) -> Figure | None:
    """Terminal loss of the selection against the learning rate, the best one marked."""
    chosen = [s for s in compared.selections.values() if len(s.losses) > 1 and s.best is not None]
    if not chosen:
        return None
    sizes = [size for size in compared.study.sizes if any(s.size == size for s in chosen)]
    colour = colours(compared)
    with matplotlib.rc_context(STYLE):
        figure, plots = panels(sizes, width=5.6 if len(sizes) == 1 else 3.6, height=3.2)
        for size, axes in zip(sizes, plots, strict=True):
            rates: set[float] = set()
            for selection in (s for s in chosen if s.size == size):
                x = [lr for lr, loss in selection.losses.items() if np.isfinite(loss)]
                y, paint = [selection.losses[lr] for lr in x], colour[selection.method]
                axes.plot(x, y, "o-", color=paint, label=selection.method, linewidth=1.2, markersize=3.5)
                best = min(x, key=lambda lr: selection.losses[lr])
                axes.plot(best, selection.losses[best], "o", color=paint, markersize=9, fillstyle="none")
                rates |= set(selection.losses)
            axes.set_xscale("log")
            axes.set_xticks(sorted(rates), [f"{lr:g}" for lr in sorted(rates)])
            axes.minorticks_off()
            axes.set(title=size, xlabel="peak learning rate", ylabel="terminal validation loss")
        legend(figure, plots[0])
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
            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
            axes.xaxis.set_minor_formatter(NullFormatter())
        legend(figure, left)
    return figure


def _log_ratio_panel(
    axes: Axes, compared: Comparisons, method: str, laws: dict[str, ScalingLaw], grid: Any, colour: str
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
