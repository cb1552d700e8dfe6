"""How figures of a report look."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretrain.study.compare import Comparisons

# Baselines in greys; methods in colours that colour-blind readers can tell apart (Okabe and Ito), then darker ones.
GREYS = ("#4d4d4d", "#8c8c8c", "#b3b3b3")
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#a05a2c", "#11a579", "#b22222")
STYLE: Any = {  # a plain dictionary, whose keys matplotlib types one by one
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


def colours(compared: Comparisons) -> dict[str, str]:
    """Return the colour of every method, the same in all figures."""
    baselines = list(dict.fromkeys(compared.study.baselines.values()))
    others = [method for method in compared.study.methods if method not in baselines]
    return {name: GREYS[i % len(GREYS)] for i, name in enumerate(baselines)} | {
        name: COLOURS[i % len(COLOURS)] for i, name in enumerate(others)
    }


def panels(names: list[str], width: float, height: float, share_x: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each name, in rows of `ACROSS`."""
    across = min(len(names), ACROSS)
    down = -(-len(names) // across)
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=share_x).ravel()
    for spare in axes[len(names) :]:
        spare.set_visible(False)
    for lowest in axes[max(0, len(names) - across) : len(names)]:
        lowest.tick_params(labelbottom=True)  # shared scales are labelled in the last row alone, which may be short
    return figure, list(axes[: len(names)])


def legend(figure: Figure, axes: Axes) -> None:
    """Explain the lines of all panels beside them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
