"""In which order the samples of a dataset are seen: a pure function of (seed, epoch).

Training reads an endless stream of samples: epoch 0 in its order, then epoch 1 in another, and so on. Position `p` of
the stream is sample `permutation(seed, p // n, n)[p % n]`. A training step takes the next `global_batch_size`
positions, also across the border of two epochs, so no sample is ever dropped, and the whole state of the data is one
number: the samples consumed so far. Neither the number of ranks nor of workers enters.
"""

import os
from collections import OrderedDict

import numpy as np


def global_seed() -> int:
    """Return the seed that `lightning.seed_everything` was last given, 0 if it was not called."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def noise_seed(seed: int, micro_batch: int, rank: int) -> int:
    """Return the seed of the random numbers drawn in one micro-batch on one rank (dropout, masks), 63 bits.

    Derived, not stored: a resumed run draws what it would have drawn.
    """
    return int(np.random.SeedSequence((seed, micro_batch, rank)).generate_state(1, np.uint64)[0] >> 1)


def permutation(seed: int, epoch: int, n_samples: int) -> np.ndarray:
    """Return the order of one epoch: a permutation of `range(n_samples)`, int64.

    Sorting raw bits keeps the order the same over versions: NumPy guarantees the raw stream of a bit generator and
    `SeedSequence`, but not what `Generator.permutation` makes of them.
    """
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(n_samples)
    return np.argsort(bits, kind="stable")


class SampleStream:
    """The endless stream of sample indices.

    Args:
        n_samples: size of the dataset.
        seed: with the epoch it decides the order.
    """

    def __init__(self, n_samples: int, seed: int) -> None:
        if n_samples < 1:
            raise ValueError("a stream needs at least one sample")
        self.n_samples = n_samples
        self.seed = seed
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the sample indices at positions [start, stop) of the stream, int64."""
        pieces = []
        while start < stop:
            epoch, offset = divmod(start, self.n_samples)
            taken = min(stop - start, self.n_samples - offset)
            pieces.append(self._order(epoch)[offset : offset + taken])
            start += taken
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)

    def _order(self, epoch: int) -> np.ndarray:
        # Two epochs are kept: a step at a border needs the end of one and the start of the next.
        if epoch not in self._orders:
            self._orders[epoch] = permutation(self.seed, epoch, self.n_samples)
            while len(self._orders) > 2:
                self._orders.popitem(last=False)
        return self._orders[epoch]
