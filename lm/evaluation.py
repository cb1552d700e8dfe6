"""How well a model predicts text: whole documents, seen through a window that slides over them.

Shapes: B batch, L length, S scored targets, D model width, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from lm.data.whole import WholeDocuments
from lm.model import Llama

Precision = Literal["float32", "bfloat16"]
# Windows are sorted by length within so many batches, so that short ones meet short ones.
SORTED_BATCHES = 64


class Window(NamedTuple):
    """A piece of text: every token but the last is an input, and the last `n_scored` are targets that count."""

    tokens: Sequence[int] | np.ndarray
    n_scored: int


class Score(NamedTuple):
    """Log-likelihood of a window's scored targets in nats, and whether each of them was the most likely token."""

    log_likelihood: float
    greedy: bool


def sliding_windows(tokens: Sequence[int] | np.ndarray, length: int, stride: int) -> Iterator[Window]:
    """Cut a text into windows such that every token but the first is scored exactly once.

    The first window scores all its targets, each further one the next `stride` targets, seen from as far back as the
    length allows: at least length - stride + 1 tokens before each, or all there are. The last window ends with the
    text and has more context instead.

    Args:
        tokens: the text; the first token is context only.
        length: most inputs of a window.
        stride: targets by which a window goes beyond the one before, 1 to `length`. The smaller, the more context, and
            the more windows.
    """
    last = len(tokens) - 1
    done = 0
    while done < last:
        end = min(done + (stride if done else length), last)
        yield Window(tokens[max(0, end - length) : end + 1], end - done)
        done = end


class WindowScorer:
    """Scores windows in batches of similar length, padded on the right, which a causal model cannot see.

    Args:
        model: in evaluation mode, on its device.
        batch_size: windows per forward pass.
        n_vocab: ids from here on are padding of the vocabulary and take no part in the softmax; None: all take part.
        precision: bfloat16 computes as training with bf16-mixed does; losses are in float32 and summed in float64.
    """

    def __init__(
        self, model: Llama, batch_size: int, n_vocab: int | None = None, precision: Precision = "float32"
    ) -> None:
        self.model = model
        self.batch_size = batch_size
        self.n_vocab = n_vocab
        self.precision = precision
        self.device = next(model.parameters()).device

    def autocast(self) -> torch.autocast:
        """Return the context in which the model computes with the chosen precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bfloat16")

    def score(self, windows: Sequence[Window], progress: Callable[[list[Window]], None] | None = None) -> list[Score]:
        """Return the scores in the order of `windows`; `progress` is called with every batch that is done."""
        order = sorted(range(len(windows)), key=lambda index: -len(windows[index].tokens))
        scores: dict[int, Score] = {}
        for start in range(0, len(order), self.batch_size):
            indices = order[start : start + self.batch_size]
            batch = [windows[index] for index in indices]
            scores.update(zip(indices, self._score_batch(batch), strict=True))
            if progress is not None:
                progress(batch)
        return [scores[index] for index in range(len(windows))]

    @torch.no_grad()
    def _score_batch(self, windows: list[Window]) -> list[Score]:
        rows = [torch.from_numpy(np.asarray(window.tokens, dtype=np.int64)) for window in windows]
        inputs_BL = pad_sequence([row[:-1] for row in rows], batch_first=True).to(self.device)
        losses, hits = [], []
        with self.autocast():
            x_BLD, _ = self.model.hidden(inputs_BL)
            for x_LD, row, window in zip(x_BLD, rows, windows, strict=True):  # the logits of a batch would be large
                end = len(row) - 1
                logits_SV = self.model.head(x_LD[end - window.n_scored : end])[:, : self.n_vocab]
                logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
                targets_S = row[len(row) - window.n_scored :].to(self.device)
                losses.append(F.cross_entropy(logits_SV, targets_S, reduction="none"))
                hits.append(logits_SV.argmax(-1) == targets_S)
        counts = [window.n_scored for window in windows]
        losses_by_window = torch.cat(losses).cpu().double().split(counts)
        hits_by_window = torch.cat(hits).cpu().split(counts)
        return [
            Score(-float(loss.sum()), bool(hit.all()))
            for loss, hit in zip(losses_by_window, hits_by_window, strict=True)
        ]


@dataclass
class TextEvaluation:
    """How well a model predicts text.

    Attributes:
        source: where the text comes from.
        documents: documents read.
        tokens: targets: the documents' tokens and the end-of-text that follows each of them.
        bytes: UTF-8 bytes of the documents' text; an end-of-text has none.
        nats: the targets' negative log-likelihood.
        left_out: documents without a character and broken rows, as far as text was read that was not prepared.
    """

    source: str
    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0
    left_out: int = 0

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Length of the code that tells the documents, and where each ends, per byte of their text."""
        return self.nats / math.log(2) / self.bytes

    def as_dict(self) -> dict[str, Any]:
        """Return what was counted, and what follows from it."""
        derived = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return asdict(self) | derived

    def report(self) -> str:
        """Return the same as a table."""
        left_out = f" ({self.left_out:,} left out, empty or broken)" if self.left_out else ""
        rows = {
            "text": self.source,
            "documents": f"{self.documents:,}{left_out}",
            "tokens": f"{self.tokens:,}",
            "bytes": f"{self.bytes:,}",
            "loss": f"{self.loss:.4f}  nats per token",
            "perplexity": f"{self.perplexity:.4f}",
            "bits per byte": f"{self.bits_per_byte:.4f}",
        }
        return "\n".join(f"{name:<14} {value}" for name, value in rows.items())


def evaluate_text(
    scorer: WindowScorer, text: WholeDocuments, eot: int, length: int, stride: int, limit: int | None = None
) -> TextEvaluation:
    """Predict every token of every document, and the end-of-text behind it, once; a bar on a terminal shows how far.

    An end-of-text before each document is its first context. Since the one behind it is predicted too, the code says
    where a document ends, as in the validation during training; there, however, documents share sequences, and the
    padding of the vocabulary takes part. Order of documents and batch size change the result by rounding only.

    Args:
        scorer: the model; its `n_vocab` is to be the tokenizer's.
        text: the documents.
        eot: the end-of-text token.
        length, stride: see `sliding_windows`.
        limit: stop after so many documents.
    """
    found = TextEvaluation(text.name)

    def windows() -> Iterator[Window]:
        for tokens, size in islice(text.documents, limit):
            found.documents += 1
            found.tokens += len(tokens) + 1
            found.bytes += size
            yield from sliding_windows(np.concatenate(([eot], tokens, [eot])), length, stride)

    remaining = windows()
    nats: list[float] = []
    # disable=None shows the bar on a terminal only.
    n_tokens = text.n_tokens if limit is None else None
    with tqdm(desc="evaluate", unit="tok", unit_scale=True, total=n_tokens, disable=None) as bar:
        while pool := list(islice(remaining, scorer.batch_size * SORTED_BATCHES)):
            scores = scorer.score(pool, lambda batch: bar.update(sum(window.n_scored for window in batch)))
            nats += [-score.log_likelihood for score in scores]
    found.nats = math.fsum(nats)
    if text.n_bytes is not None and found.documents == text.n_documents:
        found.bytes = text.n_bytes
    if text.report is not None:
        found.left_out = text.report.empty + text.report.bad
    return found
