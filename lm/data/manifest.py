"""What a prepared folder says about itself: its manifest, which may come from anybody."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lm.data.encode import token_dtype
from pretrain.errors import UserError
from pretrain.paths import user_path

FORMAT = 1
MANIFEST = "manifest.json"
MAX_BYTES = 64 << 20  # of a manifest: a line for each shard, so some hundred thousand of them


@dataclass
class Shard:
    """One file of tokens."""

    file: str
    tokens: int


@dataclass
class SplitInfo:
    """What a split holds: documents, tokens (one end-of-text per document included), UTF-8 bytes of text, files."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    shards: list[Shard] = field(default_factory=list)


@dataclass
class Manifest:
    """What a prepared folder says about itself.

    Attributes:
        format: version of the layout.
        tokenizer, fingerprint, n_vocab, eot: the tokenizer, see `lm.tokenizers.Tokenizer`.
        dtype: numpy name of the stored ids, little-endian.
        splits: "train", and "val" when documents were held out.
        sources: the files read (path, size in bytes), or the hub dataset with its revision.
        skipped: empty documents, broken rows and ignored files, with the first few broken rows by name.
        settings: the arguments of `prepare` that decide the content.
    """

    format: int
    tokenizer: str
    fingerprint: str
    n_vocab: int
    eot: int
    dtype: str
    splits: dict[str, SplitInfo]
    sources: list[dict[str, Any]]
    skipped: dict[str, Any]
    settings: dict[str, Any]


def is_prepared(folder: str | Path) -> bool:
    """Whether `folder` is a prepared folder, complete or damaged."""
    path = user_path(folder) / MANIFEST
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b'"fingerprint"' in file.read(1000)


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a prepared folder, with every number in it checked.

    Raises:
        UserError: there is none, it is damaged or contradicts itself, or another version of this package wrote it.
    """
    path = user_path(folder) / MANIFEST
    try:
        data = json.loads(_read(path))
        if data["format"] != FORMAT:
            raise UserError(f"{path} has format {data['format']}, this version reads {FORMAT}: prepare the data again")
        splits = {
            name: SplitInfo(**(info | {"shards": [Shard(**shard) for shard in info["shards"]]}))
            for name, info in data["splits"].items()
        }
        manifest = Manifest(**(data | {"splits": splits}))
        _check(manifest)
    except FileNotFoundError as error:
        raise UserError(f"{folder} is no prepared folder, it has no {MANIFEST}: make one with lm.prepare") from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): prepare the data again") from error
    return manifest


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES >> 20} MB")
    return content.decode("utf-8")


def _check(manifest: Manifest) -> None:
    """Raise ValueError for what `prepare` never writes."""

    def check(name: str, value: Any, kind: type, is_right: Callable[[Any], bool] = lambda value: True) -> None:
        if type(value) is not kind or not is_right(value):  # `type`, because a bool is an int as well
            raise ValueError(f"{name} is {value!r}")

    for name in ("tokenizer", "fingerprint"):
        check(name, getattr(manifest, name), str)
    check("n_vocab", manifest.n_vocab, int, lambda n: 1 <= n <= 1 << 32)
    check("eot", manifest.eot, int, lambda eot: 0 <= eot < manifest.n_vocab)
    check("dtype", manifest.dtype, str, lambda dtype: dtype == token_dtype(manifest.n_vocab))
    check("sources", manifest.sources, list)
    for name in ("skipped", "settings"):
        check(name, getattr(manifest, name), dict)
    for split, info in manifest.splits.items():
        for shard in info.shards:
            check(f"a file of {split}", shard.file, str, _is_plain_name)
            check(f"tokens of {shard.file}", shard.tokens, int, lambda tokens: tokens >= 1)
        check(f"documents of {split}", info.documents, int, lambda n: n >= 1)
        # Each document has some text, and an end-of-text.
        for name in ("bytes", "tokens"):
            check(f"{name} of {split}", getattr(info, name), int)
            if getattr(info, name) < info.documents:
                raise ValueError(f"{name} of {split} is {getattr(info, name)}, of {info.documents} documents")
        if info.tokens != sum(shard.tokens for shard in info.shards):
            raise ValueError(f"tokens of {split} is {info.tokens}, and its files hold another number")


def _is_plain_name(name: str) -> bool:
    """Whether a name stands for a file in the folder itself, and not for one elsewhere."""
    return name not in ("", ".", "..") and not any(mark in name for mark in ("/", "\0", os.sep))
