"""Pictures of mixes. Every activation has one colour, the same in all of them."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pretrain.inspection import Activations, Mix, by_gate, components, curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind people can tell apart, and a grey for the identity.
COLOURS = {
    "id": "#7f7f7f",
    "gelu": "#0072b2",
    "silu": "#009e73",
    "relu2": "#d55e00",
    "leaky_relu": "#cc79a7",
    "tanh": "#e69f00",
    "relu": "#56b4e9",
}
SPARE_COLOURS = ("#6a3d9a", "#a6761d", "#b15928", "#1b9e77", "#e7298a", "#666666")  # for activations added by others
INK = "#222222"  # of words and of what belongs to no activation

# The hidden activations of trained models mostly lie within these.
T = torch.linspace(-3.0, 3.0, 121)
Y = torch.linspace(-2.0, 2.0, 81)
SLICES = {-1.5: "#2166ac", -0.5: "#67a9cf", 0.5: "#ef8a62", 1.5: "#b2182b"}  # z of each slice of a surface
GREEK = {"pi": "π", "rho": "ρ", "alpha": "α", "beta": "β"}
PANEL_COLUMNS = 4
LONGEST_NAME = 14  # in letters, of a token in a title


def colour(label: str) -> str:
    """Return the colour of an activation, or of a product "a*b" the one halfway between its two."""
    first, _, second = label.partition("*")
    codes = [COLOURS.get(first) or SPARE_COLOURS[zlib.crc32(first.encode()) % len(SPARE_COLOURS)]]
    if second:
        codes.append(colour(second))
    channels = [[int(code[i : i + 2], 16) for i in (1, 3, 5)] for code in codes]
    return "#" + "".join(f"{round(sum(values) / len(values)):02x}" for values in zip(*channels, strict=True))


def symbol(gate: str) -> str:
    """Return the letter of a gate as the paper writes it."""
    return GREEK.get(gate, gate)


def mix_figure(gate: str, rows: Mapping[str, Mapping[str, float]]) -> "Figure":
    """Draw the mean weight of every activation (columns) in every layer (rows)."""
    from matplotlib.figure import Figure

    labels = list(next(iter(rows.values())))
    values = [[row.get(label, float("nan")) for label in labels] for row in rows.values()]
    figure = Figure(figsize=(2.5 + 0.7 * len(labels), 1.2 + 0.35 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    for tick, label in zip(axes.get_xticklabels(), labels, strict=True):
        tick.set(color=colour(label), fontweight="bold")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_title(f"mean weight of each activation ({gate})")
    lowest, highest = min(map(min, values)), max(map(max, values))
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            ink = "black" if value > lowest + 0.6 * (highest - lowest) else "white"  # viridis ends in a light yellow
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=ink, fontsize=7)
    figure.colorbar(image, ax=axes)
    return figure


def weights_figure(mixes: Sequence[Mix]) -> "Figure":
    """Draw, layer by layer, the weights of all rows (dots), their mean (a ring) and mean +- spread (a bar).

    Args:
        mixes: of one gate.
    """
    labels, gate = mixes[0].labels, symbol(mixes[0].gate)
    figure, panels = _panels(len(mixes), 2.9, 0.7 + 0.24 * len(labels), sharex=True)
    for mix, axes in zip(mixes, panels, strict=False):
        axes.set_title(mix.layer, fontsize=10, color=INK)
        for k, label in enumerate(labels):
            weights, mean, spread = mix.weights[:, k], float(mix.mean[k]), float(mix.spread[k])
            if mix.unit:
                # A low-discrepancy sequence: even, where random heights would clump.
                heights = k + ((torch.arange(len(weights)) * 0.618034) % 1 - 0.5) * 0.7
                alpha = min(0.5, 40 / len(weights))
                axes.scatter(weights, heights, s=7, color=colour(label), alpha=alpha, linewidths=0, rasterized=True)
                axes.plot([mean - spread, mean + spread], [k, k], color=colour(label), linewidth=3)
            axes.plot(mean, k, "o", markersize=6, color="white", markeredgecolor=colour(label), markeredgewidth=2)
        _tidy(axes)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_yticks(range(len(labels)), [])
        axes.locator_params(axis="x", nbins=4)
    for axes in panels[:: min(PANEL_COLUMNS, len(mixes))]:
        axes.set_yticks(range(len(labels)), labels, fontsize=9, fontweight="bold")
        for tick, label in zip(axes.get_yticklabels(), labels, strict=True):
            tick.set_color(colour(label))
    unit = mixes[0].unit
    what = f"weight of each {unit} (dots), mean ± spread (bar)" if unit else "learned constants"
    figure.suptitle(f"{gate}: {what}", fontsize=12, color=INK)
    return figure


def curves_figure(mixes: Sequence[Mix], activations: Activations) -> "Figure":
    """Draw the effective activation of every layer, sum_k w_k sigma_k(t), with the mean weights.

    Around it the spread over the rows; thin, each activation's share w_k sigma_k(t); broken, the rows of least and of
    most weight for the activation whose weight varies most.

    Args:
        mixes: of one gate, none of pairs.
        activations: name -> elementwise function.
    """
    from matplotlib.lines import Line2D

    figure, panels = _panels(len(mixes), 2.9, 2.7, sharex=True, sharey=True)
    for mix, axes in zip(mixes, panels, strict=False):
        for label, part in zip(mix.labels, components(mix.labels, activations, T), strict=True):
            axes.plot(T, float(mix.means()[label]) * part, color=colour(label), linewidth=1, alpha=0.9)
        _draw_band(axes, T, curves(mix, activations, T), INK, linewidth=2.2)
        title = mix.layer
        for (words, row), style in zip(_extremes(mix), ("--", ":"), strict=False):
            axes.plot(T, curves(mix, activations, T)[row], color=INK, linewidth=1.3, linestyle=style)
            title += f"\n{'- -' if style == '--' else '· · ·'} {words}"
        axes.set_title(title, fontsize=9, color=INK, parse_math=False)
        _tidy(axes)
    for axes in panels[max(0, len(mixes) - PANEL_COLUMNS) : len(mixes)]:
        axes.set_xlabel("t", fontsize=9)
    labels = mixes[0].labels
    handles = [Line2D([], [], color=colour(label), label=f"share of {label}") for label in labels]
    handles.insert(0, Line2D([], [], color=INK, linewidth=2.2, label="mean ± spread" if mixes[0].unit else "sum"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, 2 + len(mixes)), frameon=False, fontsize=9)
    gate = symbol(mixes[0].gate)
    figure.suptitle(f"effective activation  Σₖ {gate}ₖ σₖ(t)", fontsize=12, color=INK)
    return figure


def slices_figure(mixes: Sequence[Mix], activations: Activations) -> "Figure":
    """Draw the effective function of two variables of every layer, sum_{k<=l} w_kl sigma_k(y) sigma_l(z), along y.

    One row a layer; one line for each z. Left the mean weights with the spread over the rows, then the rows of least
    and of most weight for the pair whose weight varies most.

    Args:
        mixes: of one gate, all of pairs.
        activations: name -> elementwise function.
    """
    from matplotlib.lines import Line2D

    n_columns = 3 if mixes[0].unit else 1
    figure, panels = _panels(len(mixes) * n_columns, 2.9, 2.3, n_columns, sharex=True, sharey="row")
    rows = [panels[i : i + n_columns] for i in range(0, len(panels), n_columns)]
    for mix, row in zip(mixes, rows, strict=True):
        row[0].set_ylabel(mix.layer, fontsize=10, color=INK)
        for z, shade in SLICES.items():
            values = curves(mix, activations, Y, z)
            _draw_band(row[0], Y, values, shade, linewidth=2)
            for (words, index), axes in zip(_extremes(mix), row[1:], strict=False):
                axes.plot(Y, values[index], color=shade, linewidth=2)
                axes.set_title(words, fontsize=9, color=INK, parse_math=False)
        row[0].set_title(f"mean ± spread over {mix.unit}s" if mix.unit else "learned constants", fontsize=9, color=INK)
        for axes in row:
            _tidy(axes)
    for axes in rows[-1]:
        axes.set_xlabel("y", fontsize=9)
    handles = [Line2D([], [], color=shade, linewidth=2, label=f"z = {z:g}") for z, shade in SLICES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    gate = symbol(mixes[0].gate)
    title = f"effective activation  h(y, z) = Σₖₗ {gate}ₖₗ σₖ(y) σₗ(z)"
    figure.suptitle(title, fontsize=12, color=INK)
    return figure


def mix_figures(mixes: Sequence[Mix], activations: Activations, prefix: str = "") -> dict[str, "Figure"]:
    """Return all pictures of some layers, by name: for each gate the means, the weights and the effective functions.

    Args:
        mixes: rows of one unit.
        activations: name -> elementwise function.
        prefix: of the names.
    """
    figures = {}
    for gate, same in by_gate(mixes).items():
        figures[f"{prefix}mix_{gate}"] = mix_figure(gate, {mix.layer: mix.means() for mix in same})
        figures[f"{prefix}weights_{gate}"] = weights_figure(same)
        draw = slices_figure if same[0].is_of_pairs else curves_figure
        figures[f"{prefix}curves_{gate}"] = draw(same, activations)
    return figures


def _extremes(mix: Mix) -> list[tuple[str, int]]:
    """The rows at the two ends of the column that varies most, each with its words for a title."""
    if not mix.unit:
        return []
    k = mix.most_varied()
    return [
        (f"{word} {mix.labels[k]}: {_short(mix.names[row])} ({mix.weights[row, k]:.2f})", row)
        for word, row in zip(("least", "most"), (int(end[k, 0]) for end in mix.ends(1)), strict=True)
    ]


def _short(name: str) -> str:
    """A name that fits into the title of a panel."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _draw_band(axes: Any, t: torch.Tensor, values: torch.Tensor, shade: str, linewidth: float) -> None:
    """The mean of curves (R, P) as a line, and one standard deviation on either side."""
    mean, spread = values.mean(0), values.std(0, correction=0)
    axes.fill_between(t, mean - spread, mean + spread, color=shade, alpha=0.18, linewidth=0)
    axes.plot(t, mean, color=shade, linewidth=linewidth)


def _panels(
    count: int, width: float, height: float, n_columns: int | None = None, **options: Any
) -> tuple["Figure", list[Any]]:
    """A figure of `count` panels of a size in inches, row by row."""
    from matplotlib.figure import Figure

    n_columns = n_columns or min(PANEL_COLUMNS, count)
    n_rows = math.ceil(count / n_columns)
    figure = Figure(figsize=(max(5.6, width * n_columns + 0.6), height * n_rows + 1.1), layout="constrained")
    panels = list(figure.subplots(n_rows, n_columns, squeeze=False, **options).flat)
    for number, axes in enumerate(panels[count:], start=count):
        axes.set_axis_off()
        panels[number - n_columns].xaxis.set_tick_params(labelbottom=True)  # now the lowest of its column
    return figure, panels


def _tidy(axes: Any) -> None:
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bbbbbb")
    axes.tick_params(labelsize=8, color="#bbbbbb")
