"""Bytes: what a step needs at its peak, and what its forward pass keeps for the backward pass."""

import ctypes
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

# With these, glibc takes every large block from the system and gives it back when it is freed: resident memory is then
# the memory in use, not what the allocator has kept from earlier steps.
RETURN_MEMORY_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


def saved_bytes(forward: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes that `forward` keeps for the backward pass, apart from the parameters.

    A storage counts once, however many tensors share it.
    """
    apart = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage  # held, so that no later tensor takes its address
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _output = forward()
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in apart)


def peak_growth(step: Callable[[], Any], device: torch.device) -> int | None:
    """Return how many bytes beyond those held now are in use at the worst moment of `step`.

    On CUDA as the allocator counts them. On a CPU the growth of resident memory, which says as much in a process made
    by `in_child`; None where the system does not tell it.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        before = _resident("VmRSS")
        RESET.write_text("5")  # sets the peak, VmHWM, to what is resident now
        step()
        return max(_resident("VmHWM") - before, 0)
    except (OSError, AttributeError, KeyError):
        return None


def _resident(field: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return 1024 * int(lines[field].split()[0])


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module in a fresh process whose resident memory is its memory in use; return the result."""
    with _environment(RETURN_MEMORY_AT_ONCE), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    earlier = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in earlier.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
