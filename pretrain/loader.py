"""Batches of a dataset: the training loader that resumes exactly, and the evaluation loader that reads all once."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pretrain.errors import UserError
from pretrain.order import SampleStream

PROBLEM = "_problem"  # the key of what is wrong, in a batch that could not be made


class WeightedDataset(Protocol):
    """A map-style dataset whose samples may hold different numbers of prediction targets.

    A dataset that also has `draw(index, position)` is asked for training samples through it: `position` is the sample's
    place in the endless stream, so that augmentation can be a pure function of it, other in every epoch.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    def n_targets(self, indices: np.ndarray, /) -> Any:
        """Return how many targets each sample has, without reading it, as an array."""
        ...


class TrainLoader:
    """Yield this rank's micro-batches of the sample stream, and resume at any optimizer step.

    One optimizer step consumes `global_batch_size` positions of the stream. Micro-batch j of rank r takes the positions
    from (j * world_size + r) * micro_batch_size within them, so that a step sees the same samples whatever the number
    of ranks. Every batch carries `step_targets`, the number of targets in the whole step over all ranks and
    micro-batches: the loss is divided by it, which makes gradients independent of how a step is cut.

    The state is the number of steps and of samples consumed, all ranks together: it can be loaded on any number of
    ranks, with another micro batch, and with another global batch. It moves when a step is complete.

    Args:
        dataset: a map-style dataset that knows `n_targets`; its samples are dictionaries of tensors.
        total_steps: length of the run in optimizer steps. `len()` counts the run's micro-batches from its very start,
            also after a resume: Lightning's own counters do so too.
    """

    def __init__(
        self,
        dataset: WeightedDataset,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        total_steps: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.stream = SampleStream(len(dataset), seed)
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.total_steps = total_steps
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.samples_consumed = 0
        self.steps_done = 0

    @property
    def samples_per_micro_step(self) -> int:
        return self.micro_batch_size * self.world_size

    def __len__(self) -> int:
        return self.total_steps * self.global_batch_size // self.samples_per_micro_step

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader: DataLoader = DataLoader(
            _WithStepTargets(self.dataset),
            batch_sampler=_MicroBatches(self, self.samples_consumed, self.total_steps - self.steps_done),
            num_workers=self.num_workers,
            collate_fn=_collate,
            pin_memory=self.pin_memory,
        )
        per_step = self.global_batch_size // self.samples_per_micro_step
        for number, batch in enumerate(loader, start=1):
            # Workers run ahead: only what was handed out counts as consumed.
            if number % per_step == 0:
                self.steps_done += 1
                self.samples_consumed += self.global_batch_size
            yield _told(batch)

    def state_dict(self) -> dict[str, int]:
        return {
            "samples_consumed": self.samples_consumed,
            "steps_done": self.steps_done,
            "n_samples": self.stream.n_samples,
            "seed": self.stream.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        check_same_data(state, n_samples=self.stream.n_samples, seed=self.stream.seed)
        self.samples_consumed = state["samples_consumed"]
        self.steps_done = state["steps_done"]


def check_same_data(state: dict[str, int], *, n_samples: int, seed: int) -> None:
    """Raise a UserError unless the state of a `TrainLoader` belongs to this data in this order."""
    for name, now in (("n_samples", n_samples), ("seed", seed)):
        if state[name] != now:
            raise UserError(
                f"the checkpoint was trained on data with {name} {state[name]}, now it is {now}: "
                "resume with the same data and seed, or start anew from its weights with --init_from"
            )


class _MicroBatches:
    """The batch sampler behind `TrainLoader`: for each micro-batch the samples and the targets of the whole step."""

    def __init__(self, loader: TrainLoader, start: int, steps: int) -> None:
        self.loader = loader
        self.start = start
        self.steps = steps

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        loader = self.loader
        per_step, per_rank = loader.global_batch_size, loader.micro_batch_size
        for step_start in range(self.start, self.start + self.steps * per_step, per_step):
            samples = loader.stream.read(step_start, step_start + per_step)
            step_targets = int(loader.dataset.n_targets(samples).sum())
            for micro_start in range(0, per_step, loader.samples_per_micro_step):
                first = micro_start + loader.rank * per_rank
                offsets = range(first, first + per_rank)
                yield [(int(samples[offset]), step_start + offset, step_targets) for offset in offsets]


class _WithStepTargets(Dataset):
    """Fetch a sample of the dataset together with the number that its batch has to carry."""

    def __init__(self, dataset: WeightedDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, item: tuple[int, int, int]) -> tuple[Any, int]:
        index, position, step_targets = item
        if hasattr(self.dataset, "draw"):
            return _outcome(self.dataset.draw, index, position), step_targets
        return _outcome(self.dataset.__getitem__, index), step_targets


class _WithOutcomes(Dataset):
    """Fetch samples, or what is wrong with them."""

    def __init__(self, dataset: WeightedDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return _outcome(self.dataset.__getitem__, index)


def _outcome(fetch: Callable[..., Any], *arguments: int) -> Any:
    """Return a sample, or the UserError in its place: out of a worker process it would come as a traceback."""
    try:
        return fetch(*arguments)
    except UserError as error:
        return error


def _collate_outcomes(samples: list[Any]) -> Any:
    error = next((sample for sample in samples if isinstance(sample, UserError)), None)
    return torch.utils.data.default_collate(samples) if error is None else {PROBLEM: str(error)}


def _collate(items: list[tuple[Any, int]]) -> dict[str, Any]:
    return {**_collate_outcomes([sample for sample, _ in items]), "step_targets": items[0][1]}


def _told(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch, or raise what was wrong with one of its samples."""
    if PROBLEM in batch:
        raise UserError(batch[PROBLEM])
    return batch


class EvaluationLoader:
    """Yield every sample once, in order, spread over the ranks; `-1` fills up so that all ranks run equally often.

    The dataset answers index -1 with a sample without targets.
    """

    def __init__(
        self,
        dataset: WeightedDataset,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self._loader: DataLoader | None = None

    def __len__(self) -> int:
        return -(-len(self.dataset) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if self._loader is None:
            self._loader = DataLoader(
                _WithOutcomes(self.dataset),
                batch_sampler=self._batches(),
                num_workers=self.num_workers,
                collate_fn=_collate_outcomes,
                pin_memory=self.pin_memory,
                persistent_workers=self.num_workers > 0,  # started once, not at every validation
            )
        return map(_told, self._loader)

    def _batches(self) -> list[list[int]]:
        stride = self.batch_size * self.world_size
        n_samples = len(self.dataset)
        return [
            [index if index < n_samples else -1 for index in range(first, first + self.batch_size)]
            for first in range(self.rank * self.batch_size, len(self) * stride, stride)
        ]
