"""One file from a folder of slices: `python -m pretrain.consolidate --checkpoint runs/NAME/TIME`."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pretrain.checkpoint import AtomicCheckpointIO, find_checkpoint
from pretrain.errors import UserError, command
from pretrain.paths import new_output_path
from pretrain.shards import assembled, is_shard_folder, read_shards

PROG = "python -m pretrain.consolidate"


def consolidate(checkpoint: str, output: str | None = None) -> Path:
    """Turn the checkpoint that the devices of a sharded run have written together into an ordinary single file.

    Every command reads such a folder as it is; a single file is for moving, for keeping, and for other programs.

    Args:
        checkpoint: Folder of a run, or one of its checkpoints.
        output: The file to write. null: beside the folder, last.consolidated.ckpt for last.ckpt.
    """
    folder = find_checkpoint(checkpoint)
    if not is_shard_folder(folder):
        raise UserError(f"{folder} is a single file already: use it as it is")
    file = new_output_path(folder.with_name(f"{folder.stem}.consolidated.ckpt") if output is None else output)
    stored = read_shards(folder, with_optimizer=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _on_disk(file.parent, _size(stored)) as allocate:
            AtomicCheckpointIO().save_checkpoint(assembled(stored, allocate), file)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror or error}): make room") from error
    print(file)
    return file


@contextmanager
def _on_disk(folder: Path, n_bytes: int) -> Iterator[Any]:
    """Yield a function like `torch.empty` whose tensors lie in files, so that memory need not hold them all at once.

    Args:
        n_bytes: of all tensors together, for the progress bar.
    """
    with (
        tempfile.TemporaryDirectory(prefix=".consolidate", dir=folder) as scratch,
        tqdm(total=n_bytes, desc="reading", unit="B", unit_scale=True) as bar,
    ):
        numbers = iter(range(10**9))

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            n_values = torch.Size(shape).numel()
            bar.update(n_values * dtype.itemsize)
            if not n_values:
                return torch.empty(shape, dtype=dtype)
            # A file without blocks: what is missing on the disk ends this with an error, not with a signal.
            place = Path(scratch) / str(next(numbers))
            with place.open("wb") as empty:
                os.posix_fallocate(empty.fileno(), 0, n_values * dtype.itemsize)
            return torch.from_file(str(place), shared=True, size=n_values, dtype=dtype).view(shape)

        yield allocate


def _size(stored: Any) -> int:
    """Return the bytes of all tensors in a nested structure."""
    if hasattr(stored, "shape"):
        return torch.Size(stored.shape).numel() * stored.dtype.itemsize if stored.shape else 0
    children = stored.values() if isinstance(stored, dict) else stored if isinstance(stored, list) else ()
    return sum(map(_size, children))


@command
def main(args: list[str] | None = None) -> None:
    from pretrain.cli import OneLineParser  # costs seconds, and needs jsonargparse

    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_function_arguments(consolidate)
    consolidate(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    main()
