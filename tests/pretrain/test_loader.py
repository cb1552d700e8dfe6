"""Loaders: which samples reach which step, whatever the ranks, workers and interruptions."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.errors import UserError
from pretrain.loader import EvaluationLoader, TrainLoader
from pretrain.order import SampleStream


class Numbers:
    """Samples that know their index; sample i has i % 3 + 1 targets, the filler none."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"index": torch.tensor(index)}

    def n_targets(self, indices: np.ndarray) -> np.ndarray:
        return np.where(indices < 0, 0, indices % 3 + 1)


def loader(n: int = 10, steps: int = 7, **changes) -> TrainLoader:
    settings = {"seed": 5, "global_batch_size": 4, "micro_batch_size": 2} | changes
    return TrainLoader(Numbers(n), total_steps=steps, **settings)


def indices(batches) -> list[int]:
    return [index for batch in batches for index in batch["index"].tolist()]


def test_two_epochs_visit_every_sample_twice_in_different_orders():
    seen = indices(loader(n=12, steps=6))
    assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12))
    assert seen[:12] != seen[12:]


def test_a_step_across_the_border_of_an_epoch_loses_nothing():
    """10 samples, steps of 4: the third step takes 2 samples of each epoch."""
    seen = indices(loader(n=10, steps=5))
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


def test_the_length_is_that_of_the_whole_run_in_micro_batches():
    assert len(loader(steps=7)) == len(list(loader(steps=7))) == 14
    assert len(loader(steps=7, world_size=2)) == 7


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 5, 9])
def test_a_resumed_loader_yields_the_rest(workers, stop):
    """In micro-batches, two a step: stops within a step, which is then taken again, at and across an epoch's border."""
    expected = indices(loader(num_workers=0))
    first = loader(num_workers=workers)
    head = indices(islice(first, stop))
    second = loader(num_workers=workers)
    second.load_state_dict(first.state_dict())
    whole_steps = stop // 2 * 4
    assert head[:whole_steps] + indices(second) == expected


def test_a_resumed_loader_may_take_larger_steps():
    """Two steps of 4, then five of 10: the stream goes on where it was, and the run has as many steps as planned."""
    first = loader(n=100)
    head = indices(islice(first, 4))
    second = loader(n=100, global_batch_size=10, micro_batch_size=5)
    second.load_state_dict(first.state_dict())
    rest = list(second)
    assert len(rest) == 5 * 2
    assert head + indices(rest) == SampleStream(100, seed=5).read(0, 8 + 50).tolist()
    assert second.state_dict()["samples_consumed"] == 58


@given(
    n=st.integers(1, 40),
    ranks=st.sampled_from([1, 2, 4]),
    micro=st.sampled_from([1, 2, 4]),
    factor=st.integers(1, 3),
    stop=st.integers(0, 3),
    ranks_after=st.sampled_from([1, 2, 4]),
)
def test_every_step_holds_the_same_samples_whatever_the_ranks(n, ranks, micro, factor, stop, ranks_after):
    """Also after a resume on another number of ranks."""
    batch, steps = 16 * factor, 5
    settings = {"n": n, "steps": steps, "global_batch_size": batch}
    first = [loader(**settings, micro_batch_size=micro, rank=r, world_size=ranks) for r in range(ranks)]
    per_step = batch // (micro * ranks)
    seen = [indices(islice(each, stop * per_step)) for each in first]
    later = [loader(**settings, micro_batch_size=micro, rank=r, world_size=ranks_after) for r in range(ranks_after)]
    for each in later:
        each.load_state_dict(first[0].state_dict())
    rest = [indices(each) for each in later]

    stream = SampleStream(n, seed=5)
    for step in range(steps):
        parts, size, base = (seen, batch // ranks, 0) if step < stop else (rest, batch // ranks_after, stop)
        got = [index for part in parts for index in part[(step - base) * size : (step - base + 1) * size]]
        assert sorted(got) == sorted(stream.read(step * batch, (step + 1) * batch).tolist())


def test_every_batch_carries_the_targets_of_its_whole_step():
    parts = [list(loader(rank=rank, world_size=2, micro_batch_size=1)) for rank in range(2)]
    for step in range(7):
        batches = [batch for part in parts for batch in part[step * 2 : step * 2 + 2]]
        targets = sum(index % 3 + 1 for index in indices(batches))
        assert {batch["step_targets"] for batch in batches} == {targets}


def test_other_data_or_another_seed_is_refused_at_resume():
    state = loader(n=10).state_dict()
    with pytest.raises(UserError, match="n_samples 10, now it is 11"):
        loader(n=11).load_state_dict(state)
    with pytest.raises(UserError, match="seed 5, now it is 6"):
        loader(seed=6).load_state_dict(state)


def test_evaluation_keeps_its_workers_also_when_it_was_cut_short():
    evaluation = EvaluationLoader(Numbers(9), batch_size=2, num_workers=2)
    assert indices(islice(evaluation, 2)) == [0, 1, 2, 3]
    assert indices(evaluation) == indices(evaluation) == [*range(9), -1]


@given(n=st.integers(1, 30), batch=st.integers(1, 5), ranks=st.integers(1, 4))
def test_evaluation_reads_every_sample_once_and_all_ranks_run_equally_often(n, batch, ranks):
    parts = [list(EvaluationLoader(Numbers(n), batch_size=batch, rank=rank, world_size=ranks)) for rank in range(ranks)]
    assert {len(part) for part in parts} == {len(EvaluationLoader(Numbers(n), batch_size=batch, world_size=ranks))}
    real = [index for part in parts for index in indices(part) if index >= 0]
    assert sorted(real) == list(range(n))
