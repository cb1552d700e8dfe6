"""Names of files and folders as users write them."""

import os
from pathlib import Path

from pretrain.errors import UserError


def user_path(name: str | Path) -> Path:
    """Return a path with ~ and ~USER written out.

    Raises:
        UserError: no path at all: a NUL byte in it, or a user who does not exist.
    """
    if "\0" in str(name):
        raise UserError(f"{str(name)!r} is no name of a file: it holds a NUL byte")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"{name} begins with a user who is unknown here: write the path out") from error


def output_path(name: str | Path) -> Path:
    """Return where a command is to write its --output, checked before the work whose result would be lost.

    Raises:
        UserError: no file and no folder can be made there.
    """
    path = user_path(name)
    try:
        path.exists()  # an OSError if its name is too long
        folder = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as error:
        raise UserError(f"{name} cannot be written ({error.strerror}): give another --output") from error
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise UserError(f"{name} cannot be written, since {folder} is no writable folder: give another --output")
    return path


def new_output_path(name: str | Path) -> Path:
    """Return `output_path` of what is written in the place of nothing.

    Raises:
        UserError: there is something already, or nothing can be made there.
    """
    path = output_path(name)
    if path.exists():
        raise UserError(f"{name} exists already: give another --output, or remove it first")
    return path
