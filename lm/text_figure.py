"""A text coloured by the gates of its tokens, as a picture."""

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lm.passage import Piece, visible
from pretrain.inspection import PIXELS_PER_INCH, Mix
from pretrain.mix_figures import INK, colour, symbol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS, MAX_LINES = 96, 4
FONT = "DejaVu Sans Mono"  # comes with matplotlib
ADVANCE = 0.602  # width of its letters, all of them, over its size
POINTS = 10 / ADVANCE * 72 / PIXELS_PER_INCH  # size of the letters: 10 pixels wide, since widths are whole pixels
LINE_HEIGHT = 1.75  # over the size of a letter
BASELINE = 0.65  # of a line's height, from its top
STRONGEST = 0.75  # opacity of the largest weight
NO_GLYPH = "□"  # in the place of what the font lacks or what does not print
MORE = "…"  # where the picture ends before the text


class Cell(NamedTuple):
    """A letter with its combining marks: where it stands on a line, in columns, and the number of its piece, if any."""

    column: int
    width: int
    text: str
    piece: int | None


def text_figure(pieces: Sequence[Piece], mixes: Sequence[Mix]) -> "Figure":
    """Draw the beginning of a text once for each layer, coloured by the activation whose weight varies most there.

    Letters stand one by one in the order of the text, also those of scripts that run from right to left.

    Args:
        pieces: the text.
        mixes: of one gate, a row for each token.
    """
    from matplotlib.figure import Figure
    from matplotlib.font_manager import findfont, get_font
    from matplotlib.patches import Rectangle

    lines = wrap(pieces)
    glyphs = get_font(findfont(FONT)).get_charmap()
    font = {"family": FONT, "size": POINTS}
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
            for column, cells, text, piece in line:
                if piece is not None:
                    strength = STRONGEST * (weights[piece] - low) / max(high - low, 1e-9)
                    corner = (column, top + index + 0.06)
                    shade = Rectangle(corner, cells, 0.88, color=colour(mix.labels[k]), alpha=strength, linewidth=0)
                    axes.add_patch(shade)
                if text != " ":
                    place = (column + (cells - 1) / 2, top + index + BASELINE)
                    shown = text if all(ord(char) in glyphs for char in text) else NO_GLYPH
                    axes.text(*place, shown, fontdict=font, color=INK, va="baseline", parse_math=False)
    return figure


def wrap(pieces: Sequence[Piece]) -> list[list[Cell]]:
    """Return the first lines of a text, broken at spaces; where they are not all of it they end with an ellipsis."""
    lines: list[list[tuple[int, str, int | None]]] = [[]]
    for number, piece in enumerate(pieces):
        for char in piece.text:
            if unicodedata.category(char).startswith("M") and lines[-1]:
                width, letter, owner = lines[-1][-1]
                lines[-1][-1] = (width, letter + char, owner)
                continue
            width = 2 if unicodedata.east_asian_width(char) in "WF" else 1
            while _columns(lines[-1]) + width > COLUMNS:
                lines.append(_last_word(lines[-1]))
            shown = char if char == " " else visible(char)
            lines[-1].append((width, shown if len(shown) == 1 else NO_GLYPH, number))
            if char == "\n":
                lines.append([])
    if any(lines[MAX_LINES:]):
        last = lines[MAX_LINES - 1]
        while _columns(last) == COLUMNS:
            last.pop()
        last.append((1, MORE, None))
    return [[Cell(_columns(line[:place]), *letter) for place, letter in enumerate(line)] for line in lines[:MAX_LINES]]


def _columns(line: Sequence[tuple[int, str, int | None]]) -> int:
    return sum(width for width, _, _ in line)


def _last_word(line: list[tuple[int, str, int | None]]) -> list[tuple[int, str, int | None]]:
    """Take the unfinished word off a full line, unless it fills the line."""
    space = max((place for place, (_, char, _) in enumerate(line) if char == " "), default=len(line) - 1)
    word = line[space + 1 :]
    del line[space + 1 :]
    return word
