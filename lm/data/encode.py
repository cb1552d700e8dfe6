"""Documents to tokens, in this process or in several: the same tokens in the same order for any number of them."""

import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from lm.data.documents import ReadReport
from lm.tokenizers import Tokenizer
from pretrain.errors import UserError

# A chunk goes to one worker at a time. Its size is part of no output, only of the memory in flight.
CHUNK_CHARACTERS = 1 << 20
CHUNK_DOCUMENTS = 4096
# The first chunks are tokenized in this process: for a small source, starting others would take longer.
CHUNKS_ALONE = 6
MAX_WORKERS = 1024


def token_dtype(n_vocab: int) -> str:
    """The smallest of uint16 and uint32 that holds ids below `n_vocab`."""
    return "uint16" if n_vocab <= 1 << 16 else "uint32"


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Chunk:
    """Some documents in a row, which of them are held out, and what had been skipped when the last of them was read."""

    texts: list[str]
    held_out: list[bool]
    skipped: dict[str, Any]


@dataclass
class EncodedDocuments:
    """The ids of a chunk's documents, joined, each with its end-of-text; tokens and UTF-8 bytes of each document."""

    ids: np.ndarray
    lengths: list[int]
    sizes: list[int]


# A generator, so that who stops early can close it and with it the processes.
EncodedChunks = Generator[tuple[Chunk, EncodedDocuments], None, None]


def held_out(index: int, val_fraction: float) -> bool:
    """Whether document `index` is a validation document: number 1, and from there on a share of `val_fraction`."""
    return math.floor((index - 1) * val_fraction) > math.floor((index - 2) * val_fraction)


def split_into_chunks(documents: Iterable[str], report: ReadReport, val_fraction: float) -> Iterator[Chunk]:
    """Gather documents into chunks of about `CHUNK_CHARACTERS`; `report` is the one that the reader fills in."""
    texts: list[str] = []
    marks: list[bool] = []
    characters = 0
    for index, text in enumerate(documents):
        texts.append(text)
        marks.append(held_out(index, val_fraction))
        characters += len(text)
        if characters >= CHUNK_CHARACTERS or len(texts) >= CHUNK_DOCUMENTS:
            yield Chunk(texts, marks, _skipped(report))
            texts, marks, characters = [], [], 0
    yield Chunk(texts, marks, _skipped(report))


def _skipped(report: ReadReport) -> dict[str, Any]:
    return {
        "empty_documents": report.empty,
        "bad_rows": report.bad,
        "first_bad_rows": list(report.first_bad),
        "ignored_files": report.ignored_files,
    }


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> EncodedDocuments:
    """Tokenize documents and join them, each followed by end-of-text."""
    dtype = token_dtype(tokenizer.n_vocab)
    end = np.array([tokenizer.eot], dtype=dtype)
    encoded = tokenizer.encode_batch(texts)
    pieces = [piece for ids in encoded for piece in (ids.astype(dtype), end)]
    ids = np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)
    return EncodedDocuments(ids, [len(ids) + 1 for ids in encoded], [len(text.encode("utf-8")) for text in texts])


def encode_chunks(chunks: Iterator[Chunk], tokenizer: Tokenizer, workers: int) -> EncodedChunks:
    """Each chunk with its tokens, in order; what goes on beyond the first few is spread over `workers` processes."""
    for chunk in islice(chunks, CHUNKS_ALONE) if workers > 1 else chunks:
        yield chunk, encode_documents(tokenizer, chunk.texts)
    if workers > 1:
        yield from _encode_in_processes(chunks, tokenizer, workers)


def _encode_in_processes(chunks: Iterator[Chunk], tokenizer: Tokenizer, workers: int) -> EncodedChunks:
    # "spawn", because forking a process that has loaded torch or Arrow and their threads can hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(tokenizer,))
    pending: deque[tuple[Chunk, Future[EncodedDocuments]]] = deque()
    failure: Exception | None = None
    try:
        while True:
            # A broken row is told when its turn comes, whatever the look-ahead: the outcome is that of one worker.
            while failure is None and len(pending) < 2 * workers + 2:
                try:
                    chunk = next(chunks)
                except Exception as error:
                    failure = error
                else:
                    pending.append((chunk, pool.submit(_encode_in_worker, chunk.texts)))
            if not pending:
                break
            chunk, future = pending.popleft()
            yield chunk, future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a tokenizing process ended early, for want of memory or because the calling program has no main guard: "
            "give fewer workers (1 needs no process)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    if failure is not None and not isinstance(failure, StopIteration):
        raise failure


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process winds up
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # returns when the parent is gone, killed or not
        os._exit(1)


def _encode_in_worker(texts: list[str]) -> EncodedDocuments:
    return encode_documents(_worker_tokenizer, texts)
