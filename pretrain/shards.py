"""A checkpoint as a folder to which every device writes its slices, readable on any number of devices.

    last.ckpt/
        state.ckpt                            everything but the tensors of model and optimizer
        part-00000-of-00002.safetensors       the slices of one device; part 0 also has what all devices hold alike

A slice is some rows of a tensor. Its place, {name: [first row, rows in all]}, and its CRC-32 are in the header of its
file, so that the files are all there is: no index that could disagree with them. Tensors are called by parameter, as
`weights/model.norm.weight` and `optimizer.0/model.norm.weight/exp_avg`.

Not the format of torch.distributed.checkpoint, whose index is a pickle that names classes of torch: reading it means to
execute it, and needs the version that wrote it. safetensors headers are plain JSON, checked against the size of the
file before anything is read.
"""

import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pretrain.atomic import publish, readable_as_usual, remove
from pretrain.errors import UserError
from pretrain.untrusted import check_archive, check_content

STATE = "state.ckpt"
PART = re.compile(r"part-(\d{5})-of-(\d{5})\.safetensors")
ROWS, CHECKSUMS = "rows", "crc32"  # in the header of a part


def is_shard_folder(path: Path) -> bool:
    """Return whether this is such a folder, whole or not."""
    return (path / STATE).is_file()


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on the disk, in slices: `stored[a:b]` reads rows, `stored[()]` or `stored[:]` all of it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: tuple[tuple[int, Path], ...]  # (first row, file), in order

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, rows: slice | tuple[()]) -> Tensor:
        if not self.ndim:
            return _read(self.slices[0][1], self.name, None)
        start, stop, _ = (rows if isinstance(rows, slice) else slice(None)).indices(self.shape[0])
        result = torch.empty((max(stop - start, 0), *self.shape[1:]), dtype=self.dtype)
        return self.read_into(result, start)

    def read_into(self, target: Tensor, start: int = 0) -> Tensor:
        """Fill a tensor with the rows from `start` on."""
        stop = start + len(target)
        ends = [first for first, _ in self.slices[1:]] + [self.shape[0]]
        for (first, file), end in zip(self.slices, ends, strict=True):
            low, high = max(start, first), min(stop, end)
            if low < high:
                target[low - start : high - start] = _read(file, self.name, slice(low - first, high - first))
        return target


def _read(file: Path, name: str, rows: slice | None) -> Tensor:
    with safe_open(file, "pt") as part:
        return part.get_tensor(name) if rows is None else part.get_slice(name)[rows]


def read_shards(folder: Path, with_optimizer: bool) -> dict[str, Any]:
    """Return the checkpoint in a folder, as a single file would hold it, with a `StoredTensor` for each tensor.

    Raises:
        UserError: a part is missing, damaged or does not fit the others.
    """
    try:
        check_archive(folder / STATE)
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        check_content(state)
        stored = _stored_tensors(folder)
        weights = {name: stored[f"weights/{name}"] for name in state.pop("weight_names")}
        optimizer_states = []
        for number, (names, groups) in enumerate(state.pop("optimizers")):
            entries: dict[int, dict[str, StoredTensor]] = {}
            position = {name: index for index, name in enumerate(names)}
            for key, tensor in stored.items():
                kind, *rest = key.split("/")
                if kind == f"optimizer.{number}":
                    entries.setdefault(position[rest[0]], {})[rest[1]] = tensor
            optimizer_states.append({"state": dict(sorted(entries.items())), "param_groups": groups})
    except UserError:
        raise
    except Exception as error:  # pickle's, safetensors' and json's own, and whatever a stranger's file leads to
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{folder} is no readable checkpoint ({reason}): use another one") from error
    return {**state, "state_dict": weights, **({"optimizer_states": optimizer_states} if with_optimizer else {})}


def damaged_slice(folder: Path) -> str | None:
    """Return which slice is not what was written, reading them all; None: all are, as far as they have a checksum."""
    for file in _parts(folder):
        with safe_open(file, "pt") as part:
            for name, expected in json.loads((part.metadata() or {}).get(CHECKSUMS, "{}")).items():
                if _checksum(part.get_tensor(name)) != expected:
                    return f"{name} in {file.name}"
    return None


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def assembled(checkpoint: Any, allocate: Callable[..., Tensor] = torch.empty) -> Any:
    """Return what `read_shards` has returned with ordinary tensors, on the CPU.

    Args:
        allocate: makes the tensors that are filled, as `torch.empty`.
    """
    if isinstance(checkpoint, StoredTensor):
        if not checkpoint.ndim:
            return checkpoint[()]
        return checkpoint.read_into(allocate(checkpoint.shape, dtype=checkpoint.dtype))
    if isinstance(checkpoint, dict):
        return {key: assembled(value, allocate) for key, value in checkpoint.items()}
    if isinstance(checkpoint, list):
        return [assembled(value, allocate) for value in checkpoint]
    return checkpoint


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    found: dict[str, list[tuple[int, int, list[int], str, Path]]] = {}
    for file in _parts(folder):
        for name, first, in_all, shape, dtype in _slices(file):
            found.setdefault(name, []).append((first, in_all, shape, dtype, file))
    return {name: _assembled(folder, name, sorted(slices, key=_by_row)) for name, slices in found.items()}


def _by_row(piece: tuple[int, int, list[int], str, Path]) -> tuple[int, int]:
    return piece[0], piece[2][0] if piece[2] else 0  # an empty slice comes before the one that begins in the same row


def _parts(folder: Path) -> list[Path]:
    files = {file.name: file for file in folder.iterdir() if PART.fullmatch(file.name)}
    sizes = {int(name[14:19]) for name in files}
    if len(sizes) != 1 or len(files) != max(sizes):
        raise UserError(f"{folder} is no whole checkpoint: some of its parts are missing; use another one")
    return [files[name] for name in sorted(files)]


def _slices(file: Path) -> Iterator[tuple[str, int, int, list[int], str]]:
    try:
        with safe_open(file, "pt") as part:
            rows = json.loads((part.metadata() or {}).get(ROWS, "{}"))
            for name in part.keys():  # noqa: SIM118 (it is no dictionary)
                piece = part.get_slice(name)
                shape = piece.get_shape()
                first, in_all = rows.get(name, (0, shape[0] if shape else 1))
                yield name, int(first), int(in_all), shape, piece.get_dtype()
    except SafetensorError as error:
        raise UserError(f"{file} is damaged ({error}): use another checkpoint") from error


def _assembled(folder: Path, name: str, slices: list[tuple[int, int, list[int], str, Path]]) -> StoredTensor:
    """Put slices together; what is allocated for them later is never more than what lies on the disk."""
    _, in_all, shape, dtype, _ = slices[0]
    if shape:
        starts = [0, *accumulate(piece[0] for _, _, piece, _, _ in slices)]
        fits = starts[-1] == in_all and all(
            (first, total, piece[1:], kind) == (start, in_all, shape[1:], dtype)
            for start, (first, total, piece, kind, _) in zip(starts, slices, strict=False)
        )
        if not fits:
            raise UserError(f"{folder} is no whole checkpoint: the slices of {name} do not fit together")
    return StoredTensor(
        name,
        tuple([in_all, *shape[1:]] if shape else []),
        getattr(torch, _TYPES[dtype]),
        tuple((first, file) for first, _, _, _, file in slices),
    )


_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def save_shards(checkpoint: dict[str, Any], path: Path, parameter_names: list[list[str]], mesh: Any) -> None:
    """Write a checkpoint whose tensors are spread over a mesh; a call for all ranks.

    It is written beside its place and moved there when every slice is on the disk: a kill or a full disk before that
    leaves what was there.

    Args:
        checkpoint: Lightning's, with DTensors.
        parameter_names: of each optimizer, the names of its parameters in the order in which it numbers them.
        mesh: of one dimension, or of (replicas, shards).

    Raises:
        UserError: on all ranks, if one of them cannot write.
    """
    import torch.distributed as dist

    partial, is_first = path.parent / f".{path.name}.partial", dist.get_rank() == 0
    index, count = mesh.get_local_rank("shard"), mesh.size(mesh.ndim - 1)
    is_writer = mesh.ndim == 1 or mesh.get_local_rank("replicate") == 0  # replicas hold the same

    def begin() -> None:
        if is_first:
            remove(partial)
            partial.mkdir(parents=True)

    def write() -> None:
        if is_writer:
            tensors = _my_slices(_named_tensors(checkpoint, parameter_names), index)
            _write_part(partial / f"part-{index:05d}-of-{count:05d}.safetensors", tensors)
        if is_first:
            _write_state(partial / STATE, checkpoint, parameter_names)

    def finish() -> None:
        if is_first:
            publish(partial, path)

    for step in (begin, write, finish):
        _on_all_ranks(step, path, partial)


def _on_all_ranks(step: Any, path: Path, partial: Path) -> None:
    """Do something on every rank and wait for all; an error of one is an error of all."""
    import torch.distributed as dist

    problem: str | None = None
    try:
        step()
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors speak so of a full disk
        problem = str(error).strip().splitlines()[0]
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    first = next((problem for problem in problems if problem is not None), None)
    if first is not None:
        if dist.get_rank() == 0:
            remove(partial)
        raise UserError(
            f"{path} cannot be written ({first}): make room; what was there before is whole, go on with --resume"
        )


def _named_tensors(checkpoint: dict[str, Any], parameter_names: list[list[str]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in checkpoint["state_dict"].items():
        yield f"weights/{name}", tensor
    for number, (state, names) in enumerate(zip(checkpoint["optimizer_states"], parameter_names, strict=True)):
        for position, entry in state["state"].items():
            for key, value in entry.items():
                yield f"optimizer.{number}/{names[position]}/{key}", torch.as_tensor(value)


def _my_slices(tensors: Iterator[tuple[str, Tensor]], index: int) -> dict[str, tuple[Tensor, int, int]]:
    """Return what this rank writes: (rows, first row, rows in all) by name."""
    from torch.distributed.tensor import DTensor

    from pretrain.sharding import first_row

    mine = {}
    for name, tensor in tensors:
        if isinstance(tensor, DTensor):
            mine[name] = (tensor.to_local(), first_row(tensor), tensor.shape[0])
        elif index == 0:
            mine[name] = (tensor, 0, tensor.shape[0] if tensor.ndim else 1)
    return mine


def _write_part(file: Path, tensors: dict[str, tuple[Tensor, int, int]]) -> None:
    from safetensors.torch import save_file

    rows = {name: (first, in_all) for name, (part, first, in_all) in tensors.items() if part.ndim}
    values = {name: part.detach().cpu().contiguous() for name, (part, _, _) in tensors.items()}
    checksums = {name: _checksum(value) for name, value in values.items()}
    save_file(values, file, metadata={ROWS: json.dumps(rows), CHECKSUMS: json.dumps(checksums)})
    readable_as_usual(file)
    with file.open("rb") as written:
        os.fsync(written.fileno())


def _write_state(file: Path, checkpoint: dict[str, Any], parameter_names: list[list[str]]) -> None:
    state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    groups = [optimizer["param_groups"] for optimizer in checkpoint["optimizer_states"]]
    state |= {
        "weight_names": list(checkpoint["state_dict"]),
        "optimizers": list(zip(parameter_names, groups, strict=True)),
    }
    with file.open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())
