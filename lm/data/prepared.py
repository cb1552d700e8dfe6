"""The prepared folder: token shards on disk with a manifest, written whole or not at all.

FOLDER/
  train-00000.bin   token ids, raw little-endian uint16 (uint32 beyond 65,536 ids); end-of-text after each document
  train-00001.bin   goes on where the one before ends, in the middle of a document if need be
  val-00000.bin     held-out documents, when some were asked for
  manifest.json     tokenizer, counts and sizes; written last
"""

import hashlib
import json
import math
import os
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lm.data.documents import ReadReport, find_files, read_documents
from lm.data.encode import MAX_WORKERS, EncodedChunks, available_cores, encode_chunks, split_into_chunks, token_dtype
from lm.data.manifest import FORMAT, MANIFEST, Manifest, Shard, SplitInfo, is_prepared, read_manifest
from lm.data.split import check_tokenizer, little_endian, open_prepared
from lm.tokenizers import Tokenizer, load_tokenizer
from pretrain.atomic import locked, partial_folder, publish, write_durably
from pretrain.errors import UserError
from pretrain.hub import hub_revision
from pretrain.paths import user_path

SHARD_TOKENS = 1 << 28


def prepare(
    source: str,
    output: str | Path,
    tokenizer: Tokenizer | str,
    *,
    text_field: str = "text",
    val_fraction: float = 0.0,
    max_bad: int = 0,
    max_tokens: int | None = None,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = True,
    overwrite: bool = False,
    described: list[dict[str, Any]] | None = None,
) -> Manifest:
    """Tokenize the documents of `source` into the folder `output`, which appears when it is complete.

    The result is the same, byte by byte, for any number of workers.

    Args:
        source, text_field, max_bad: see `lm.data.documents.read_documents`.
        output: the folder to make.
        tokenizer: a tokenizer or its name.
        val_fraction: share of the documents held out as the val split, 0 to 0.5: the second document and from there on
            evenly spread ones.
        max_tokens: stop after the document that brings the tokens of both splits to this number; None reads everything.
        workers: processes that tokenize; None takes every core, 1 works in this process.
        shard_tokens: tokens per file.
        progress: show a progress bar when stderr is a terminal.
        overwrite: replace `output` if it is a prepared folder.
        described: the source as the caller has found it; None looks now.

    Raises:
        UserError: impossible arguments, an existing output, or a source that cannot be read or changes meanwhile;
            nothing is left behind.
    """
    _check_settings(val_fraction, max_bad, max_tokens, workers, shard_tokens)
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    output = user_path(output)
    settings = {
        "source": source,
        "text_field": text_field,
        "val_fraction": val_fraction,
        "max_bad": max_bad,
        "max_tokens": max_tokens,
        "shard_tokens": shard_tokens,
    }
    if is_prepared(source):
        raise UserError(f"{source} is a prepared folder already: train on it with --data.source {source}")
    _check_output(output, overwrite)
    sources = described or _describe_sources(source)
    with locked(output):
        _check_output(output, overwrite)  # again: another process may have made it meanwhile
        with partial_folder(output) as partial:
            report = ReadReport()
            documents = read_documents(source, text_field, max_bad, report, sources[0].get("revision"))
            chunks = split_into_chunks(documents, report, val_fraction)
            results = encode_chunks(chunks, tokenizer, workers or available_cores())
            splits, skipped = _write_shards(partial, results, tokenizer, settings, progress)
            _check_unchanged(source, sources)
            manifest = Manifest(
                format=FORMAT,
                tokenizer=tokenizer.name,
                fingerprint=tokenizer.fingerprint,
                n_vocab=tokenizer.n_vocab,
                eot=tokenizer.eot,
                dtype=token_dtype(tokenizer.n_vocab),
                splits=splits,
                sources=[{key: value for key, value in item.items() if key != "mtime_ns"} for item in sources],
                skipped=skipped,
                settings=settings,
            )
            write_durably(partial / MANIFEST, json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n")
            publish(partial, output)
    return manifest


def cached_prepare(
    source: str,
    tokenizer: Tokenizer | str,
    *,
    text_field: str = "text",
    val_fraction: float = 0.0,
    max_bad: int = 0,
    max_tokens: int | None = None,
    workers: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = True,
    cache: str | Path | None = None,
) -> Path:
    """The prepared folder for `source`: `source` itself when it is one, else one in the cache, made when need be.

    A changed file (size or time of change), tokenizer or setting leads to another folder of the cache, and so does
    another revision of a Hugging Face dataset.

    Args:
        cache: folder of the cache; by default $MOA_CACHE, or ~/.cache/moa-pretrain/prepared.
        others: see `prepare`. When `source` is a prepared folder they have had their effect already.

    Raises:
        UserError: as `prepare`, or a prepared source made with another tokenizer.
    """
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if is_prepared(source):
        check_tokenizer(source, tokenizer)
        return user_path(source)
    root = user_path(cache or os.environ.get("MOA_CACHE") or "~/.cache/moa-pretrain/prepared")
    settings: dict[str, Any] = {
        "text_field": text_field,
        "val_fraction": val_fraction,
        "max_bad": max_bad,  # decides whether the source is accepted at all
        "max_tokens": max_tokens,
        "shard_tokens": shard_tokens,
    }
    sources = _describe_sources(source)
    folder = _cache_folder(root, [FORMAT, tokenizer.fingerprint, sources, settings])
    if not _complete(folder):
        with suppress(_OutputExists):  # another process made it while this one waited for the lock
            prepare(
                source,
                folder,
                tokenizer,
                workers=workers,
                progress=progress,
                overwrite=is_prepared(folder),
                described=sources,
                **settings,
            )
    return folder


def _cache_folder(root: Path, identity: list[Any]) -> Path:
    """The place of this identity in the cache; a hub that cannot be asked stands at the last known revision."""
    sources = identity[2]
    if "dataset" in sources[0]:
        known = root / f"{_digest([*identity[:2], sources[0]['dataset'], identity[3]])}.revision"
        if sources[0]["revision"] is not None:
            root.mkdir(parents=True, exist_ok=True)
            write_durably(known, sources[0]["revision"])
        elif known.is_file():
            sources[0]["revision"] = known.read_text(encoding="utf-8")
    return root / _digest(identity)


def _digest(identity: list[Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _complete(folder: Path) -> bool:
    try:
        for split in read_manifest(folder).splits:
            open_prepared(folder, split)
    except UserError:
        return False
    return True


class _OutputExists(UserError):
    pass


def _check_settings(
    val_fraction: float, max_bad: int, max_tokens: int | None, workers: int | None, shard_tokens: int
) -> None:
    if not 0 <= val_fraction <= 0.5:
        raise UserError(f"val_fraction is {val_fraction}: give a share of the documents from 0 to 0.5")
    if max_bad < 0:
        raise UserError(f"max_bad is {max_bad}: give the number of broken rows that may be left out, 0 or more")
    for name, value in {"max_tokens": max_tokens, "workers": workers, "shard_tokens": shard_tokens}.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}: give a number of 1 or more")
    if workers is not None and workers > MAX_WORKERS:
        raise UserError(f"workers is {workers}: give at most {MAX_WORKERS}")


def _check_output(output: Path, overwrite: bool) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not is_prepared(output):
        raise UserError(f"the output {output} exists and is no prepared folder: choose another one, or move it away")
    if not overwrite:
        raise _OutputExists(f"the output {output} exists: choose another one, or give --overwrite to replace it")


def _describe_sources(source: str) -> list[dict[str, Any]]:
    found = find_files(source)
    if found is None:
        return [{"dataset": source, "revision": hub_revision(source)}]
    stats = [(file.resolve(), file.stat()) for file in found.files]
    return [{"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns} for path, stat in stats]


def _check_unchanged(source: str, sources: list[dict[str, Any]]) -> None:
    if "dataset" in sources[0]:
        return  # read at one revision
    after = _describe_sources(source)
    changed = [item["path"] for item in [*sources, *after] if item not in sources or item not in after]
    if changed:
        raise UserError(f"{changed[0]} changed while it was read: prepare the data when nothing writes there any more")


class _SplitWriter:
    """Appends tokens to the numbered shards of one split."""

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int) -> None:
        self.info = SplitInfo()
        self._folder = folder
        self._name = name
        self._dtype = little_endian(dtype)
        self._shard_tokens = shard_tokens
        self._file: Any = None

    def add(self, ids: np.ndarray, size: int) -> None:
        """Write one document of `size` UTF-8 bytes."""
        self.info.documents += 1
        self.info.tokens += len(ids)
        self.info.bytes += size
        ids = ids.astype(self._dtype, copy=False)
        while len(ids):
            if self._file is None:
                self.info.shards.append(Shard(f"{self._name}-{len(self.info.shards):05d}.bin", 0))
                self._file = open(self._folder / self.info.shards[-1].file, "wb")  # noqa: SIM115
            shard = self.info.shards[-1]
            fitting = ids[: self._shard_tokens - shard.tokens]
            self._file.write(fitting.tobytes())
            shard.tokens += len(fitting)
            ids = ids[len(fitting) :]
            if shard.tokens == self._shard_tokens:
                self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _write_shards(
    folder: Path,
    results: EncodedChunks,
    tokenizer: Tokenizer,
    settings: dict[str, Any],
    progress: bool,
) -> tuple[dict[str, SplitInfo], dict[str, Any]]:
    dtype = token_dtype(tokenizer.n_vocab)
    writers = {name: _SplitWriter(folder, name, dtype, settings["shard_tokens"]) for name in ("train", "val")}
    limit = settings["max_tokens"] or math.inf
    total = 0
    skipped: dict[str, Any] = {}
    # disable=None shows the bar on a terminal only.
    with tqdm(desc="prepare", unit="B", unit_scale=True, disable=None if progress else True) as bar, closing(results):
        for chunk, tokens in results:
            skipped = chunk.skipped
            start = 0
            for mark, length, size in zip(chunk.held_out, tokens.lengths, tokens.sizes, strict=True):
                if total >= limit:
                    break
                writers["val" if mark else "train"].add(tokens.ids[start : start + length], size)
                start += length
                total += length
                bar.update(size)
            bar.set_postfix_str(f"{total:,} tokens, {sum(w.info.documents for w in writers.values()):,} documents")
            if total >= limit:
                break
    for writer in writers.values():
        writer.close()
    splits = {name: writer.info for name, writer in writers.items() if writer.info.documents}
    if settings["val_fraction"] > 0 and "val" not in splits:
        raise UserError(
            f"{settings['source']} gives {splits['train'].documents} document(s) here, too few to hold one out: "
            "give data.val_source, or set val_fraction to 0"
        )
    return splits, skipped
