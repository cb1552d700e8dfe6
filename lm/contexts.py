"""What a model reads before it draws the next token of each sequence: without a cache, and the same with one.

A model sees at most `max_length` tokens. When a sequence outgrows them, its older half is dropped at once, and it goes
on from the rest (`window_start`). A window that slid by one token would make every cached key and value void each time;
this one moves once in max_length / 2 tokens, so that a token costs the same however long the text is.

Sequences of different lengths are aligned at their ends. What stands before the shorter ones is a segment of its own:
attention and positions stay within a sequence (`lm.model`), so that each is computed as if it were alone.
"""

from collections.abc import Sequence

import torch

from lm.cache import PADDING, KeyValueCache
from lm.model import Llama


def window_start(length: int, max_length: int) -> int:
    """Return the first token that the model sees of a sequence of `length` tokens.

    It is 0 up to max_length tokens. One more drops the older half, and so on: between max_length // 2 + 1 and
    max_length tokens are seen.
    """
    if length <= max_length:
        return 0
    half = max_length - max_length // 2
    return -(-(length - max_length) // half) * half


def aligned(
    windows: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tokens (B, L), aligned at their ends, and their segments (B, L); None if all are equally long."""
    length = max(map(len, windows))
    tokens = [[0] * (length - len(window)) + list(window) for window in windows]
    segments = [[PADDING] * (length - len(window)) + [0] * len(window) for window in windows]
    equal = min(map(len, windows)) == length
    return torch.tensor(tokens, device=device), None if equal else torch.tensor(segments, device=device)


class Contexts:
    """The reference: every token is computed anew for every new one.

    Args:
        model: a Llama.
        max_length: tokens that it sees.
    """

    def __init__(self, model: Llama, max_length: int) -> None:
        self.model = model
        self.max_length = max_length
        self.device = next(model.parameters()).device

    def next_logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits of the token after each sequence, (B, V).

        Args:
            sequences: from call to call, each grows by one token.
        """
        tokens_BL, segments_BL = aligned([self._window(sequence) for sequence in sequences], self.device)
        return self.model(tokens_BL, segments_BL, last_only=True)[:, -1]

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these sequences alone."""

    def _window(self, sequence: Sequence[int]) -> Sequence[int]:
        return sequence[window_start(len(sequence), self.max_length) :]


class CachedContexts(Contexts):
    """The same logits, with keys and values kept; a sequence whose window moves is computed anew, the others are not.

    Args:
        n_tokens: that are going to be drawn, at most.
    """

    def __init__(self, model: Llama, max_length: int, n_tokens: int) -> None:
        super().__init__(model, max_length)
        self.n_tokens = n_tokens
        self._cache: KeyValueCache | None = None
        self._starts: list[int] = []

    def next_logits(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        before, self._starts = self._starts, [window_start(len(sequence), self.max_length) for sequence in sequences]
        moved = [row for row, start in enumerate(self._starts) if before and start != before[row]]
        if self._cache is None or len(moved) == len(sequences):
            logits_BV, self._cache = self._read(sequences)
            return logits_BV
        if self._cache.length == self._cache.layers[0].capacity:
            self._cache.keep_last(self.max_length)  # what is older lies outside of every window
        last_B1 = torch.tensor([sequence[-1:] for sequence in sequences], device=self.device)
        segments_B1 = None if self._cache.segments_BL is None else torch.zeros_like(last_B1)
        logits_BV = self.model(last_B1, segments_B1, cache=self._cache)[:, -1]
        if moved:
            logits_BV[moved], anew = self._read([sequences[row] for row in moved])
            self._cache.replace(moved, anew)
        return logits_BV

    def keep(self, rows: Sequence[int]) -> None:
        self._starts = [self._starts[row] for row in rows]
        assert self._cache is not None
        self._cache.keep_rows(rows)

    def _read(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, KeyValueCache]:
        tokens_BL, segments_BL = aligned([self._window(sequence) for sequence in sequences], self.device)
        # Windows of one length move together and are then all computed anew. Others move one by one, while the cache
        # grows: it has room for two windows, so that old columns are given up once in max_length tokens.
        limit = self.max_length if segments_BL is None else 2 * self.max_length
        cache = KeyValueCache(len(self.model.blocks), min(tokens_BL.shape[1] + self.n_tokens, limit))
        return self.model(tokens_BL, segments_BL, cache=cache, last_only=True)[:, -1], cache
