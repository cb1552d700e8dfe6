"""Files and folders that appear whole or not at all; a folder is made by one process at a time."""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrain.errors import UserError


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold the lock that lets one process at a time make `output`; it dies with the process."""
    path = output.parent / f".{output.name}.lock"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _take_lock(path, output)
    except OSError as error:
        raise UserError(f"the output {output} cannot be written: {error.strerror} ({error.filename})") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _take_lock(path: Path, output: Path) -> int:
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is preparing {output}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Whoever held it before has removed the file: then this lock is on a name that nobody else will find.
        if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
            return lock
        os.close(lock)


@contextmanager
def partial_folder(output: Path) -> Iterator[Path]:
    """A fresh sibling folder to work in, gone afterwards unless published.

    To be used under the lock: then whatever lies there already was left by a killed process.
    """
    partial = output.parent / f".{output.name}.partial"
    retired = _retired(output)
    try:
        if settled(output) == retired:
            retired.rename(output)
        remove(partial)
        remove(retired)
        partial.mkdir()
        yield partial
    except OSError as error:
        raise UserError(f"the output {output} cannot be written: {error.strerror or error}") from error
    finally:
        remove(partial)


def publish(partial: Path, output: Path) -> None:
    """Make `partial`, a folder or a file that is on the disk, `output`, in the place of what was there."""
    _sync_folder(partial)
    retired = _retired(output)
    if partial.is_dir() or output.is_dir():  # a folder takes the place of nothing, and a file that of a file alone
        if output.exists():
            remove(retired)
            output.rename(retired)
        partial.rename(output)
    else:
        os.replace(partial, output)
    _sync_folder(output.parent)
    remove(retired)


def settled(output: Path) -> Path:
    """Return where `output` lies: elsewhere only if a kill has come between the two renames of `publish`."""
    retired = _retired(output)
    return retired if retired.exists() and not output.exists() else output


def _retired(output: Path) -> Path:
    return output.parent / f".{output.name}.retired"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a folder or a file, if it is there and can be removed."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def readable_as_usual(file: Path) -> None:
    """Give a file the permissions of one that `open` makes: safetensors makes its files for their owner alone."""
    umask = os.umask(0)  # there is no way only to read it
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def write_atomically(file: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, file)


def write_durably(path: Path, text: str) -> None:
    """Write a text file and wait until it is on the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
