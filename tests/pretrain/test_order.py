"""The order of samples: a pure function of seed and epoch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pretrain.order import SampleStream, noise_seed, permutation


@given(st.integers(0, 2**32), st.integers(0, 1000), st.integers(1, 500))
def test_an_epoch_visits_every_sample_once(seed, epoch, n):
    assert sorted(permutation(seed, epoch, n)) == list(range(n))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(permutation(seed, epoch, 100)) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 6


def test_the_order_is_that_of_earlier_versions():
    """A resumed run relies on it: a change here breaks every run under way."""
    assert permutation(0, 0, 10).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


@given(st.integers(1, 50), st.lists(st.integers(0, 40), max_size=12))
def test_reading_in_pieces_equals_one_epoch_after_another(n, pieces):
    stream, position, read = SampleStream(n, seed=3), 0, []
    for length in pieces:
        read += stream.read(position, position + length).tolist()
        position += length
    epochs = np.concatenate([permutation(3, epoch, n) for epoch in range(position // n + 1)])
    assert read == epochs[:position].tolist()


def test_noise_differs_between_steps_and_ranks_and_repeats():
    seeds = {noise_seed(seed, step, rank) for seed in (0, 1) for step in range(50) for rank in range(4)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert noise_seed(1, 2, 3) == noise_seed(1, 2, 3)
