"""Sequences of one length, cut from the stream of tokens of a prepared split."""

import numpy as np
import torch
from torch.utils.data import Dataset

from lm.data.split import PreparedSplit
from pretrain.errors import UserError

IGNORED = -100  # the target that cross-entropy leaves out


class PackedTokens(Dataset[dict[str, torch.Tensor]]):
    """The stream t_0 .. t_{n-1} of a split as ceil((n - 1) / L) sequences of L inputs and L targets.

    Sequence i covers tokens [i L, i L + L + 1): neighbours share one token, so every token but t_0 is a target exactly
    once. The last sequence is filled up: inputs with end-of-text, targets with -100. Index -1 is a filler whose targets
    are all -100, for ranks that run out of sequences before the others.

    Args:
        split: an open split of a prepared folder.
        sequence_length: L.
        document_mask: also give "segments", the number of each input's document within the sequence, from 0. An
            end-of-text belongs to the document that it ends; all filling is one more segment.

    Raises:
        UserError: an empty split, or a sequence length below 1.
    """

    def __init__(self, split: PreparedSplit, sequence_length: int, document_mask: bool = False) -> None:
        if sequence_length < 1:
            raise UserError(f"sequence_length is {sequence_length}: give 1 or more")
        if split.n_tokens < 1:
            raise UserError(f"the {split.split} split of {split.folder} is empty: prepare it from a source with text")
        self.split = split
        self.sequence_length = sequence_length
        self.document_mask = document_mask
        self._length = max(1, -(-(split.n_tokens - 1) // sequence_length))

    def __len__(self) -> int:
        return self._length

    def n_targets(self, index: int | np.ndarray) -> int | np.ndarray:
        """How many targets of sequence `index` count, without reading it; an array for an array. 0 for index -1."""
        indices = np.asarray(index, dtype=np.int64)
        if np.any((indices < -1) | (indices >= len(self))):
            raise IndexError(f"sequence {index} of {len(self)}")
        left = self.split.n_tokens - 1 - indices * self.sequence_length
        counts = np.where(indices < 0, 0, np.minimum(left, self.sequence_length))
        return int(counts) if counts.ndim == 0 else counts

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """{"inputs": int64 (L,), "targets": int64 (L,)} and, with document_mask, "segments": int32 (L,)."""
        if not -1 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = index * self.sequence_length
        stop = min(start + self.sequence_length + 1, self.split.n_tokens)
        tokens = self.split.read(start, stop) if index >= 0 else np.empty(0)
        inputs = np.full(self.sequence_length, self.split.eot, dtype=np.int64)
        targets = np.full(self.sequence_length, IGNORED, dtype=np.int64)
        n_inputs = min(len(tokens), self.sequence_length)
        inputs[:n_inputs] = tokens[:n_inputs]
        targets[: max(len(tokens) - 1, 0)] = tokens[1:]
        sequence = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
        if self.document_mask:
            ends = np.concatenate([[0], inputs[:-1] == self.split.eot])
            ends[n_inputs + 1 :] = 0
            sequence["segments"] = torch.from_numpy(np.cumsum(ends, dtype=np.int32))
        return sequence
