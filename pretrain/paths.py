"""Names of files and folders as users write them."""

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
