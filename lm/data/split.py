"""One split of a prepared folder, opened for reading."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from lm.data.manifest import Manifest, read_manifest
from lm.tokenizers import Tokenizer
from pretrain.errors import UserError
from pretrain.paths import user_path

OPEN_FILES = 128  # at once, of any number of shards; a process may have 1024


class PreparedSplit:
    """One split of a prepared folder: its documents joined into one stream of tokens, each followed by end-of-text.

    Tokens are read, not mapped: a file that is cut short meanwhile, or a file system that goes away, would end the
    process with a bus error. Can be pickled; another process opens the files anew.
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        info = manifest.splits[split]
        self.folder = folder
        self.split = split
        self.manifest = manifest
        self.n_tokens = info.tokens
        self.n_documents = info.documents
        self.n_bytes = info.bytes
        self.eot = manifest.eot
        self._dtype = little_endian(manifest.dtype)
        self._shards = info.shards
        self._starts = np.cumsum([0, *(shard.tokens for shard in info.shards)])
        self._open: OrderedDict[int, int] = OrderedDict()  # descriptors, by shard

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_open", {}).values():
            os.close(descriptor)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of the stream, (stop - start,) in the stored dtype; not to be written to.

        Raises:
            IndexError: the range leaves the stream.
            UserError: a file has changed since it was opened, or holds an id that the tokenizer does not have.
        """
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens {start} to {stop} of a stream of {self.n_tokens}")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        for index in range(first, len(self._shards)):
            offset = int(self._starts[index])
            if offset >= stop:
                break
            pieces.append(
                self._read_shard(index, max(start - offset, 0), min(stop - offset, self._shards[index].tokens))
            )
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=self._dtype)

    def _read_shard(self, index: int, start: int, stop: int) -> np.ndarray:
        path, width = self.folder / self._shards[index].file, self._dtype.itemsize
        try:
            data = os.pread(self._descriptor(index), (stop - start) * width, start * width)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from error
        if len(data) != (stop - start) * width:
            raise UserError(f"{path} ends before token {stop}: it was cut short while it was in use")
        ids = np.frombuffer(data, dtype=self._dtype)
        if len(ids) and ids.max() >= self.manifest.n_vocab:  # some microseconds; an embedding would only fail later
            wrong = int(np.argmax(ids >= self.manifest.n_vocab))
            raise UserError(
                f"{path}, token {start + wrong}: the id {ids[wrong]}, and the tokenizer has {self.manifest.n_vocab}: "
                "the file is damaged, prepare the data again"
            )
        return ids

    def _descriptor(self, index: int) -> int:
        if index not in self._open:
            while len(self._open) >= OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            self._open[index] = os.open(self.folder / self._shards[index].file, os.O_RDONLY)
        return self._open[index]


def little_endian(dtype: str) -> np.dtype:
    """The numpy type of ids as they lie on the disk."""
    return np.dtype(dtype).newbyteorder("<")


def open_prepared(folder: str | Path, split: str = "train") -> PreparedSplit:
    """Open one split of a prepared folder.

    Raises:
        UserError: no such folder or split, or a shard that is missing or not of the size that the manifest states.
    """
    folder = user_path(folder)
    manifest = read_manifest(folder)
    if split not in manifest.splits:
        raise UserError(
            f"{folder} has no {split} split (it has {', '.join(manifest.splits)}): "
            "prepare it with a val_fraction above 0, give data.val_source, or do without: data.val_fraction 0"
        )
    width = little_endian(manifest.dtype).itemsize
    for shard in manifest.splits[split].shards:
        path = folder / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.tokens * width:
            state = "is missing" if size is None else f"has {size:,} bytes instead of {shard.tokens * width:,}"
            raise UserError(f"{path} {state}: copy the folder again, or prepare the data again")
    return PreparedSplit(folder, split, manifest)


def check_tokenizer(folder: str | Path, tokenizer: Tokenizer) -> None:
    """Check that `folder` was prepared with `tokenizer`.

    Raises:
        UserError: it was prepared with another one.
    """
    manifest = read_manifest(folder)
    if manifest.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{folder} was prepared with the tokenizer {manifest.tokenizer} ({manifest.fingerprint[:8]}), not with "
            f"{tokenizer.name} ({tokenizer.fingerprint[:8]}): choose the former, or prepare the data with the latter"
        )
    for name in ("n_vocab", "eot"):
        if getattr(manifest, name) != getattr(tokenizer, name):
            raise UserError(
                f"{folder} is damaged: it states {name} {getattr(manifest, name)}, and its tokenizer "
                f"{manifest.tokenizer} has {getattr(tokenizer, name)}: prepare the data again"
            )
