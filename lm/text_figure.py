"""A text coloured by the gates of its tokens, as a picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm.passage import Piece, visible
from pretrain.inspection import PIXELS_PER_INCH, Mix
from pretrain.mix_figures import INK, colour, symbol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS, MAX_LINES = 96, 4
ADVANCE = 0.602  # width of a letter of DejaVu Sans Mono, which comes with matplotlib, over its size
POINTS = 10 / ADVANCE * 72 / PIXELS_PER_INCH  # size of the letters: 10 pixels wide, since widths are whole pixels
LINE_HEIGHT = 1.75  # over the size of a letter
STRONGEST = 0.75  # opacity of the largest weight


def text_figure(pieces: Sequence[Piece], mixes: Sequence[Mix]) -> "Figure":
    """Draw the beginning of a text once for each layer, coloured by the activation whose weight varies most there.

    Args:
        pieces: the text.
        mixes: of one gate, a row for each token.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    lines = wrap(pieces)
    width, row = COLUMNS * ADVANCE * POINTS / 72, LINE_HEIGHT * POINTS / 72
    block = len(lines) + 1.6  # a heading above, a gap below
    figure = Figure(figsize=(width + 0.3, len(mixes) * block * row + 0.1))
    axes = figure.add_axes((0.15 / (width + 0.3), 0, 1 - 0.3 / (width + 0.3), 1))
    axes.set(xlim=(0, COLUMNS), ylim=(len(mixes) * block + 0.1 / row, 0))
    axes.set_axis_off()
    for number, mix in enumerate(mixes):
        top, k = number * block + 1.3, mix.most_varied()
        weights = [float(mix.weights[piece.start : piece.stop, k].mean()) for piece in pieces]
        low, high = min(weights), max(weights)
        heading = f"{mix.layer}: {symbol(mix.gate)} of {mix.labels[k]}, from {low:.2f} (white) to {high:.2f}"
        axes.text(0, top - 0.5, heading, fontsize=9, color=colour(mix.labels[k]), fontweight="bold", va="center")
        for index, line in enumerate(lines):
            for column, text, piece in line:
                strength = STRONGEST * (weights[piece] - low) / max(high - low, 1e-9)
                corner = (column, top + index + 0.06)
                shade = Rectangle(corner, len(text), 0.88, color=colour(mix.labels[k]), alpha=strength, linewidth=0)
                axes.add_patch(shade)
            words = "".join(text for _, text, _ in line)
            font = {"family": "DejaVu Sans Mono", "size": POINTS}
            axes.text(0, top + index + 0.5, words, fontdict=font, color=INK, va="center", parse_math=False)
    return figure


def wrap(pieces: Sequence[Piece]) -> list[list[tuple[int, str, int]]]:
    """Return the first lines of a text, broken at spaces: of each letter the column, itself, and its piece's number."""
    lines: list[list[tuple[str, int]]] = [[]]
    for number, piece in enumerate(pieces):
        for char in piece.text:
            if len(lines[-1]) == COLUMNS:
                lines.append(_last_word(lines[-1]))
            lines[-1].append((char if char == " " else visible(char)[:1], number))
            if char == "\n":
                lines.append([])
    return [[(column, *letter) for column, letter in enumerate(line)] for line in lines[:MAX_LINES]]


def _last_word(line: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Take the unfinished word off a full line, unless it fills the line."""
    space = max((column for column, (char, _) in enumerate(line) if char == " "), default=COLUMNS - 1)
    word = line[space + 1 :]
    del line[space + 1 :]
    return word
