"""Documents whole, as tokens: what evaluation reads, from every source that pre-training reads."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lm.data.documents import ReadReport, read_documents
from lm.data.manifest import is_prepared, read_manifest
from lm.data.module import VENDORED, TextData
from lm.data.split import PreparedSplit, check_tokenizer, open_prepared
from lm.tokenizers import Tokenizer
from pretrain.data import check_vendored
from pretrain.errors import UserError

BLOCK_TOKENS = 1 << 20  # read at once from a prepared folder

# The ids of a document without end-of-text, (n_tokens,), and the UTF-8 bytes of its text.
Document = tuple[np.ndarray, int]


@dataclass
class TextSource:
    """Text to evaluate on; what is not given is as in the run.

    Args:
        source: A file, folder or quoted glob of .txt, .jsonl or .parquet (each also .gz, .zst), a folder that
            lm.prepare made (what it holds out, else all of it), a Hugging Face dataset NAME[:SUBSET[:SPLIT]] or
            demo:val. When not given, the text that the run has validated on.
        tokenizer: The run's tokenizer, if it has moved.
        text_field: Name of the text in .jsonl, .parquet and Hugging Face rows.
        max_bad: Broken rows to pass over before giving up.
    """

    source: str | None = None
    tokenizer: str | None = None
    text_field: str | None = None
    max_bad: int | None = None


@dataclass
class WholeDocuments:
    """The documents of a source, to be read once, in order.

    Attributes:
        name: where they come from.
        documents: one after the other.
        n_documents, n_tokens, n_bytes: of all of them, tokens with an end-of-text each; None: not known beforehand.
        report: what has been read and left out so far; None for tokens that were prepared.
    """

    name: str
    documents: Iterator[Document]
    n_documents: int | None = None
    n_tokens: int | None = None
    n_bytes: int | None = None
    report: ReadReport | None = None


def open_documents(data: TextData, source: str | None = None) -> WholeDocuments:
    """Open the documents of a source, or without one those that a run validates on.

    Of a prepared folder these are what it holds out, or all if it holds out nothing; of every other source all. Text is
    tokenized while it is read and not cached; the run's own validation text comes from its cache.

    Args:
        data: the run's data: tokenizer, text_field and max_bad.
        source: as for data.source.

    Raises:
        UserError: at once, or while reading, for what cannot be read; a folder prepared with another tokenizer; a run
            that has held out nothing.
    """
    if source is None:
        split = data.open_val_split()
        if split is None:
            raise UserError("the run has held out no text: give some with --data.source")
        return prepared_documents(split, data.tokenizer, data.val_source or f"{data.source} (held out)")
    check_vendored(source, VENDORED)
    if is_prepared(source):
        check_tokenizer(source, data.tokenizer)
        name = "val" if "val" in read_manifest(source).splits else "train"
        return prepared_documents(open_prepared(source, name), data.tokenizer, f"{source} ({name})")
    report = ReadReport()
    texts = read_documents(str(VENDORED.get(source, source)), data.text_field, data.max_bad, report)
    documents = ((data.tokenizer.encode_batch([text])[0], len(text.encode("utf-8"))) for text in texts)
    return WholeDocuments(source, documents, report=report)


def prepared_documents(split: PreparedSplit, tokenizer: Tokenizer, name: str) -> WholeDocuments:
    """The documents of a prepared split, called `name`.

    The folder knows the bytes of all its text. A single document's are those of its decoded tokens, which are the same
    unless the tokenizer changes text.
    """
    documents = ((tokens, len(tokenizer.decode(tokens.tolist()).encode("utf-8"))) for tokens in split_documents(split))
    return WholeDocuments(name, documents, split.n_documents, split.n_tokens, split.n_bytes)


def split_documents(split: PreparedSplit, block: int = BLOCK_TOKENS) -> Iterator[np.ndarray]:
    """Cut the stream of a split at its end-of-text tokens, which are left out."""
    pieces: list[np.ndarray] = []
    for start in range(0, split.n_tokens, block):
        tokens = split.read(start, min(start + block, split.n_tokens))
        *ends, rest = np.split(tokens, np.flatnonzero(tokens == split.eot) + 1)
        for end in ends:
            yield np.concatenate([*pieces, end[:-1]])
            pieces = []
        pieces.append(rest)
