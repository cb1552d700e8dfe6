"""A picture whose patches are coloured by their gates."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from pretrain.inspection import Mix
from pretrain.mix_figures import INK, colour, symbol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STRONGEST = 0.9  # opacity of the largest weight
FADED = 0.45  # of the picture that shines through


def gate_maps_figure(picture: Tensor, mixes: Sequence[Mix]) -> "Figure":
    """Draw the picture and beside it, for each activation, its patches coloured by their weight; one row a layer.

    The colour runs from white, the least weight of the layer's patches, to the activation's own, the largest; the two
    are written below.

    Args:
        picture: (C, H, W) in [0, 1].
        mixes: of one gate; a row for the class token, then one for each patch, row by row.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    labels = mixes[0].labels
    pixels = picture.permute(1, 2, 0).numpy()
    grey = pixels.mean(-1, keepdims=True) * FADED + (1 - FADED)
    figure = Figure(figsize=(1.25 * (len(labels) + 1) + 0.5, 1.45 * len(mixes) + 0.6), layout="constrained")
    grid = figure.subplots(len(mixes), len(labels) + 1, squeeze=False)
    for mix, row in zip(mixes, grid, strict=True):
        row[0].imshow(pixels.squeeze(), cmap="gray", vmin=0, vmax=1)
        row[0].set_ylabel(mix.layer, fontsize=9, color=INK)
        for k, axes in enumerate(row[1:]):
            weights = mix.weights[1:, k].numpy()
            side = round(len(weights) ** 0.5)
            low, high = weights.min(), weights.max()
            strength = (STRONGEST * (weights - low) / max(high - low, 1e-9)).reshape(side, side, 1)
            scale = len(pixels) // side
            opacity = strength.repeat(scale, axis=0).repeat(scale, axis=1)
            axes.imshow(np.clip(grey * (1 - opacity) + np.array(to_rgb(colour(labels[k]))) * opacity, 0, 1))
            axes.set_xlabel(f"{low:.2f} to {high:.2f}", fontsize=7, color=INK, labelpad=2)
    for axes, label in zip(grid[0][1:], labels, strict=True):
        axes.set_title(label, fontsize=9, color=colour(label), fontweight="bold")
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_color("#cccccc")
    figure.suptitle(f"weight {symbol(mixes[0].gate)} of each patch", fontsize=11, color=INK)
    return figure
