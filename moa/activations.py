"""The activations that a layer can mix, and the ways to name a dictionary of them."""

import re
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def identity(t: Tensor) -> Tensor:
    """Id(t) = t, the second branch of SwiGLU (equation 2)."""
    return t


def relu2(t: Tensor) -> Tensor:
    """ReLU2(t) = max(t, 0)^2."""
    # A product, not a power: autocast runs `pow` in float32, which would double the memory of the hidden activations.
    positive = F.relu(t)
    return positive * positive


def leaky_relu(t: Tensor) -> Tensor:
    """max(t, eta t) with eta = 0.01; the paper only says "some fixed eta"."""
    return F.leaky_relu(t, 0.01)


ACTIVATIONS: dict[str, Activation] = {
    "id": identity,
    "gelu": F.gelu,  # the exact one, t Phi(t)
    "silu": F.silu,
    "relu2": relu2,
    "leaky_relu": leaky_relu,
    "tanh": torch.tanh,
    "relu": F.relu,
}
"""Name -> elementwise function. An entry added here can be used in every kind that takes `activations=`."""

LETTERS = {"g": "gelu", "s": "silu", "r2": "relu2", "l": "leaky_relu", "t": "tanh", "r": "relu"}
"""The paper's shorthand, section 5.1. The identity has no letter: the Type-II dictionary K_G always contains it."""


def parse_activations(activations: str | Sequence[str], *, with_identity: bool = False) -> tuple[str, ...]:
    """Turns a dictionary of activations, as a user writes it, into a tuple of names.

    Args:
        activations: a sequence of names, taken as it stands (`["id", "gelu"]`), or the paper's letters (`"gsr2l"`).
        with_identity: whether letters mean a K_G dictionary, which starts with `id`.

    Raises:
        ValueError: an unknown name or letter, a repeated one, or none at all.
    """
    if isinstance(activations, str):
        names = _parse_letters(activations)
        if with_identity:
            names = ("id", *names)
    elif isinstance(activations, Sequence):
        names = tuple(activations)
    else:
        raise ValueError(f"activations must be a list of names or a string of letters, not {activations!r}; {_valid()}")
    for name in names:
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise ValueError(f"unknown activation {name!r}; {_valid()}")
    if not names:
        raise ValueError(f"activations is empty: give at least one; {_valid()}")
    if len(set(names)) < len(names):
        raise ValueError(f"activations {', '.join(names)}: each may appear once; {_valid()}")
    return names


def _parse_letters(letters: str) -> tuple[str, ...]:
    if not re.fullmatch("(r2|[gsltr])+", letters):
        raise ValueError(f"activations {letters!r} is not a string of the paper's letters; {_valid()}")
    return tuple(LETTERS[letter] for letter in re.findall("r2|[gsltr]", letters))


def _valid() -> str:
    letters = ", ".join(f"{letter} = {name}" for letter, name in LETTERS.items())
    return f"valid names in a list: {', '.join(ACTIVATIONS)}; valid letters in a string: {letters}"
