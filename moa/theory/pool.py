"""Does the work of `search` in several processes, with a progress bar. Needs tqdm."""

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from moa.theory.networks import GROUPS
from moa.theory.search import Effort, Fit, finalists, first_round, refine, scout, staircases
from moa.theory.targets import TARGETS

Map = Callable[[Callable[[Any], Any], list], Iterator[Any]]


def run(widths: list[int], effort: Effort, processes: int) -> list[Fit]:
    """The nearest networks of all classes that were tried to the end; the same for any number of processes."""
    from tqdm import tqdm

    works = first_round(widths, effort)
    total = len(works) + len(TARGETS) * len(widths) * (len(GROUPS) - 1 + effort.finalists)
    with spread(processes) as each, tqdm(total=total, desc="moa.theory", unit="fit", disable=None) as bar:

        def watched(function: Callable[[Any], Any], works: list) -> list:
            results = []
            for result in each(function, works):
                results.append(result)
                bar.update()
            return results

        scouted = watched(scout, works)
        return [*watched(refine, list(finalists(scouted, effort))), *staircases(widths)]


@contextmanager
def spread(processes: int) -> Iterator[Map]:
    """A `map`, in order, over processes of one thread each; they end with the context, however it is left."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small operations, and sums in an order that does not depend on the machine
    try:
        if processes == 1:
            yield map
            return
        # Spawned, not forked: torch's threads do not survive a fork.
        with multiprocessing.get_context("spawn").Pool(processes, _begin) as pool:
            yield lambda function, works: map(
                pickle.loads, pool.imap(partial(_packed, function), map(pickle.dumps, works))
            )
    finally:
        torch.set_num_threads(threads)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends these
    torch.set_num_threads(1)


def _packed(function: Callable[[Any], Any], work: bytes) -> bytes:
    # As bytes: sent as they are, tensors would go through shared memory, a file descriptor each.
    return pickle.dumps(function(pickle.loads(work)))
