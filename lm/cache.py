"""The keys and values that a Llama has computed, so that generation computes each token once.

Shapes as in `lm.model`: B batch, H heads, L length, K head size.
"""

import torch


class LayerCache:
    """Keys and values of one attention layer: buffers (B, H, capacity, K), of which the first `length` are filled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def extend(self, k_BHLK: torch.Tensor, v_BHLK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of new tokens; return those of all tokens so far."""
        start, end = self.length, self.length + k_BHLK.shape[2]
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a cache for {self.capacity}")
        if self.keys is None or self.values is None:
            shape = (*k_BHLK.shape[:2], self.capacity, k_BHLK.shape[3])
            self.keys, self.values = k_BHLK.new_empty(shape), v_BHLK.new_empty(shape)
        self.keys[:, :, start:end] = k_BHLK
        self.values[:, :, start:end] = v_BHLK
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


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
