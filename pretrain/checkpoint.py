"""Checkpoints: how they are written, where they are found, how they are read. Nothing in one is executed."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import nn

from pretrain.atomic import publish, settled
from pretrain.errors import UserError
from pretrain.paths import user_path
from pretrain.shards import assembled, is_shard_folder, read_shards
from pretrain.untrusted import check_archive, check_content

LAST = "last.ckpt"
NEXT = "next.ckpt"  # whole, and about to become last.ckpt
EARLIER = "step_*.ckpt"  # what was last.ckpt before
BEST = "best.ckpt"
# What a checkpoint holds besides weights if a run can go on from it.
RESUMABLE = ("global_step", "pytorch-lightning_version", "loops", "optimizer_states", "lr_schedulers", "config")


def find_checkpoint(run_or_file: str | Path) -> Path:
    """Return the checkpoint of a run folder (its last one) or the checkpoint itself: a file, or a folder of shards.

    A folder of runs, such as runs/lm_tiny, stands for the run in it that has saved last.

    Raises:
        UserError: if there is none.
    """
    path = settled(user_path(run_or_file))
    if is_checkpoint(path):
        return path
    if path.is_dir():
        for name in (LAST, NEXT):  # killed between two renames, see shift_checkpoints
            if is_checkpoint(last := settled(path / "checkpoints" / name)):
                return last
        of_runs = [settled(run / "checkpoints" / LAST) for run in path.iterdir()]
        of_runs = [file for file in of_runs if is_checkpoint(file)]
        of_runs.sort(key=lambda file: (file.stat().st_mtime_ns, file))
        if of_runs:
            return of_runs[-1]
        raise UserError(
            f"{path} holds no checkpoints/{LAST}, nor does a folder in it: give the folder of a run that has saved, "
            "or a .ckpt file"
        )
    raise UserError(f"{path} does not exist: give the folder of a run or a .ckpt file")


def is_checkpoint(path: Path) -> bool:
    """Return whether something is a file, or a folder of shards, and so may be a checkpoint."""
    return path.is_file() or is_shard_folder(path)


def read_checkpoint(file: str | Path, resumable: bool = False, lazy: bool = False) -> dict[str, Any]:
    """Load a checkpoint, a file or a folder of shards, to the CPU: tensors and primitives only.

    Args:
        resumable: ask for optimizer, data position and counters too, not for weights alone.
        lazy: leave tensors on the disk until they are used: a file's as memory maps (as always), a folder's as
            `pretrain.shards.StoredTensor`, which has shape, type and slices.

    Raises:
        UserError: if it is damaged, holds anything else, or lacks something.
    """
    if is_shard_folder(Path(file)):
        checkpoint = read_shards(Path(file), with_optimizer=resumable)
        if not lazy:
            checkpoint = assembled(checkpoint)
    else:
        checkpoint = _read_file(file)
    needed = ("state_dict", *(RESUMABLE if resumable else ()))
    missing = [key for key in needed if not isinstance(checkpoint, dict) or key not in checkpoint]
    if missing:
        raise UserError(f"{file} is no checkpoint of a run: it has no {' and no '.join(missing)}")
    return checkpoint


def _read_file(file: str | Path) -> Any:
    if not zipfile.is_zipfile(file):
        raise UserError(f"{file} is no readable checkpoint (empty, cut short or of another kind): use another one")
    try:
        check_archive(file)
        checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        check_content(checkpoint)
        return checkpoint
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{file} is no readable checkpoint: it holds more than tensors and plain values, and nothing is executed"
        ) from error
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{file} is no readable checkpoint ({reason}): use another one") from error


def model_weights(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the model's own state dict from a checkpoint of its LightningModule."""
    prefix = "model."
    return {name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items()}


def check_same_architecture(model: nn.Module, checkpoint: dict[str, Any], where: str) -> None:
    """Raise a UserError, naming the first differences, unless the weights fit the model exactly."""
    weights = {name: tuple(value.shape) for name, value in model_weights(checkpoint).items()}
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if weights == wanted:
        return
    missing = sorted(set(wanted) - set(weights))
    unknown = sorted(set(weights) - set(wanted))
    differ = [
        f"{name} {weights[name]} instead of {wanted[name]}"
        for name in sorted(set(weights) & set(wanted))
        if weights[name] != wanted[name]
    ]
    parts = [
        f"{len(names)} {what} ({', '.join(names[:2])}{', ..' if len(names) > 2 else ''})"
        for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", differ))
        if names
    ]
    raise UserError(
        f"{where} belongs to another architecture, parameters {' and '.join(parts)}: "
        "set the model's keys as in the run that wrote it (its config.yaml)"
    )


def load_weights(model: nn.Module, run_or_file: str | Path) -> None:
    """Copy the weights of a checkpoint into the model; optimizer, schedule and data position are left out."""
    file = find_checkpoint(run_or_file)
    checkpoint = read_checkpoint(file)
    check_same_architecture(model, checkpoint, str(file))
    model.load_state_dict(model_weights(checkpoint))


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint beside its place and move it there when it is whole and on the disk.

    Whatever happens in between, a kill or a full disk, the checkpoint before it stays as it was. (Lightning writes in
    the system's temporary folder; from there, a move to another file system is a copy that can be cut short.)
    """

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        if is_shard_folder(Path(path)):
            return read_checkpoint(path, resumable=True)
        return super().load_checkpoint(path, weights_only=weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        path = Path(path)
        unfinished = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            publish(unfinished, path)
        except (OSError, RuntimeError) as error:  # torch.save speaks of a full disk as a RuntimeError
            unfinished.unlink(missing_ok=True)
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"{path} cannot be written ({reason}): make room; what was there before is whole, go on with --resume"
            ) from error
