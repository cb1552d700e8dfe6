"""The figure: what each class misses of each target, and by how much at which width. Needs matplotlib."""

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moa.theory import sobolev
from moa.theory.report import measured, nearest
from moa.theory.search import Fit
from moa.theory.sobolev import ONE_SIDED
from moa.theory.targets import LAMBDA, TARGETS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"fixed": "#d1793b", "LA": "#3f7cac", "MoA": "#2a9d6f"}
INK, GRID_INK = "#2b2d34", "#e4e5ea"
STYLES = {"fixed": "-", "LA": (0, (5, 2)), "MoA": (0, (1.2, 1.2))}
TITLES = (
    r"$\mathrm{ReLU}(x_1)+\mathrm{ReLU}^2(x_1)$",
    rf"$\tanh({LAMBDA:g}x_1)\,\mathrm{{ReLU}}(x_2)$",
    rf"$\tanh({LAMBDA:g}x_1)\,\mathrm{{ReLU}}(x_2)\,\mathrm{{ReLU}}(x_3)$",
)
LINES = (
    r"slope $\partial f/\partial x_1$",
    r"jump of $\partial f/\partial x_2$ across $x_2=0$",
    r"jump of $\partial f/\partial x_2$ across $x_2=0$, at $x_3=1$",
)
FLOOR = 3e-7
"""Where smaller distances are drawn: they are those of exact networks, rounded."""
SETTINGS: Any = {
    "font.size": 9.5,
    "svg.hashsalt": "moa",  # the same file each time
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def draw(fits: list[Fit], widths: list[int], file_format: str) -> bytes:
    """The figure as the bytes of a file ("png", "svg" or "pdf")."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=(11, 6.4), layout="constrained", facecolor="white")
        axes = figure.subplots(2, 3)
        shown = widths[len(widths) // 2]
        for index in range(len(TARGETS)):
            _draw_gradient(axes[0, index], fits, index, shown)
            _draw_gap(axes[1, index], fits, index, widths)
        axes[1, 0].set_ylabel("distance in $W^{1,\\infty}$ (value + gradient)")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        for handle, label in zip(*axes[1, 1].get_legend_handles_labels(), strict=True):
            handles, labels = [*handles, handle], [*labels, label]
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=file_format, dpi=105)
    return buffer.getvalue()


def _draw_gradient(axes: "Axes", fits: list[Fit], index: int, width: int) -> None:
    """A line through the target on which the classes part, with the nearest network of each at one width."""
    x = torch.linspace(-1, 1, 400, dtype=torch.float64)
    target = TARGETS[index]
    axes.plot(x, _along(index, lambda points: sobolev.jet(target, points), x), color=INK, lw=4.5, alpha=0.22,
              label="target", solid_capstyle="butt")  # fmt: skip
    for group, color in COLORS.items():
        fit = nearest(fits, index, group, width)

        def network_jet(points: Tensor, fit: Fit = fit) -> Tensor:
            return fit.network.jet(fit.theta[None], points)[0]

        label = {"fixed": "best fixed activation (or pair)", "LA": "LA", "MoA": "MoA"}[group]
        axes.plot(x, _along(index, network_jet, x), color=color, lw=1.8, ls=STYLES[group], label=label)
    axes.set_title(TITLES[index], fontsize=12, pad=24)
    axes.text(0.5, 1.03, f"{LINES[index]}, width {width}", transform=axes.transAxes, ha="center", fontsize=9)
    axes.set_xlabel("$x_1$")
    _plain(axes)


def _along(index: int, jet: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What `LINES` says of a function: jet (N, d) -> (N, 1 + d), x1 (N,) -> (N,)."""
    if index == 0:
        return jet(x[:, None])[:, 1]
    sides = []
    for side in (ONE_SIDED, -ONE_SIDED):
        columns = [x, torch.full_like(x, side), torch.ones_like(x)]
        sides.append(jet(torch.stack(columns[: TARGETS[index].d], dim=1))[:, 2])
    return sides[0] - sides[1]


def _draw_gap(axes: "Axes", fits: list[Fit], index: int, widths: list[int]) -> None:
    """The distance of the nearest network against the width, what is proven of it, and the exact constructions."""
    target = TARGETS[index]
    for group, color in COLORS.items():
        totals = [max(nearest(fits, index, group, width).distance.total, FLOOR) for width in widths]
        axes.plot(widths, totals, color=color, marker="o", ms=5, lw=1.8, ls=STYLES[group])
        bounds = [target.bound(group, width) for width in widths]
        if all(bounds) and group != "LA":  # where LA has a bound, it is that of the fixed ones
            axes.plot(widths, bounds, color=INK, lw=1, ls=":")
            axes.fill_between(widths, bounds, FLOOR / 3, color=INK, alpha=0.04, lw=0)
            nobody = "fixed or LA" if target.bound("LA", 1) else "fixed"
            axes.text(
                0.93, 0.6, f"no {nobody} network", transform=axes.transAxes, ha="right", style="italic", alpha=0.7
            )
    for it, distance in measured(index):
        color, shift = COLORS[it.network.group], 0.9 if it.network.group == "LA" else 1  # so that both can be seen
        star: Any = {"marker": "*", "ms": 15, "mec": "white", "mew": 0.8, "color": color}
        axes.plot([widths[0] * shift], [max(distance.total, FLOOR)], **star, ls="", clip_on=False, zorder=5)
    if index == 1:  # one set of entries for the legend of the figure
        axes.plot([], [], color=INK, lw=1, ls=":", label="proven lower bound")
        axes.plot([], [], marker="*", ms=11, color=INK, mec="white", ls="", label="exact, with one neuron")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 3, 8)
    axes.set_yticks(
        [FLOOR, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1], ["0", *(f"$10^{{{power}}}$" for power in range(-5, 0)), "1"]
    )
    axes.set_xlim(widths[0] / 1.3, widths[-1] * 1.3)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("width (hidden neurons)")
    _plain(axes)


def _plain(axes: "Axes") -> None:
    axes.grid(color=GRID_INK, lw=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#9a9ca6")
