"""The keys and values that a Llama has computed, so that generation computes each token once.

Shapes as in `lm.model`: B batch, H heads, L length, K head size.
"""

from collections.abc import Sequence

import torch

PADDING = -1  # the segment of what stands before a sequence that is shorter than others


class LayerCache:
    """Keys and values of one attention layer: buffers (B, H, capacity, K), of which the first `length` are filled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.buffers: list[torch.Tensor] = []  # keys and values, once their shape is known

    def extend(self, k_BHLK: torch.Tensor, v_BHLK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of new tokens; return those of all tokens so far."""
        start, end = self.length, self.length + k_BHLK.shape[2]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a cache for {self.capacity}")
        if not self.buffers:
            shape = (*k_BHLK.shape[:2], self.capacity, k_BHLK.shape[3])
            self.buffers = [k_BHLK.new_empty(shape), v_BHLK.new_empty(shape)]
        for buffer, new in zip(self.buffers, (k_BHLK, v_BHLK), strict=True):
            buffer[:, :, start:end] = new
        self.length = end
        keys, values = (buffer[:, :, :end] for buffer in self.buffers)
        return keys, values

    def keep_rows(self, rows: Sequence[int]) -> None:
        """See `KeyValueCache`, here and below."""
        self.buffers = [buffer[rows] for buffer in self.buffers]

    def keep_last(self, n_tokens: int) -> None:
        for buffer in self.buffers:
            buffer[:, :, :n_tokens] = buffer[:, :, self.length - n_tokens : self.length].clone()
        self.length = n_tokens

    def replace(self, rows: Sequence[int], other: "LayerCache") -> None:
        start = self.length - other.length
        for buffer, theirs in zip(self.buffers, other.buffers, strict=True):
            buffer[rows, :, start : self.length] = theirs[:, :, : other.length]


class KeyValueCache:
    """The caches of all layers, and the documents that the tokens so far belong to.

    Args:
        n_layers: the model's.
        capacity: tokens of each sequence that have room.
    """

    def __init__(self, n_layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(n_layers)]
        self.segments_BL: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of each sequence that the model has seen."""
        return self.layers[0].length

    def add_segments(self, segments_BL: torch.Tensor) -> torch.Tensor:
        """Note the documents of new tokens; return those of all tokens so far."""
        old = [] if self.segments_BL is None else [self.segments_BL]
        self.segments_BL = torch.cat((*old, segments_BL), dim=1)
        return self.segments_BL

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Forget all sequences but these."""
        for layer in self.layers:
            layer.keep_rows(rows)
        if self.segments_BL is not None:
            self.segments_BL = self.segments_BL[rows]

    def keep_last(self, n_tokens: int) -> None:
        """Forget all but the last tokens of each sequence; only with segments, by which positions are counted."""
        assert self.segments_BL is not None
        for layer in self.layers:
            layer.keep_last(n_tokens)
        self.segments_BL = self.segments_BL[:, -n_tokens:]

    def replace(self, rows: Sequence[int], other: "KeyValueCache") -> None:
        """Put the sequences of another cache, no longer than these, in the place of some, so that they end together.

        What stands before them becomes padding. Only with segments.
        """
        assert self.segments_BL is not None
        for layer, theirs in zip(self.layers, other.layers, strict=True):
            layer.replace(rows, theirs)
        start = self.length - other.length
        self.segments_BL[rows, :start] = PADDING
        self.segments_BL[rows, start:] = 0
