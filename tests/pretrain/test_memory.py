"""What is freed is there for the next tensor, without the system's help."""

import ctypes
import resource
import subprocess
import sys

import pytest
import torch

from pretrain.memory import keep_freed_memory


def pages_of_a_tensor() -> int:
    """How many pages the system hands out for a tensor of 64 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="of glibc")
def test_freed_memory_is_kept_for_the_next_tensor():
    """In a process of its own, since there is no way back."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, check=True)
    again_and_again, kept = map(int, done.stdout.split())
    assert again_and_again >= 2**26 / 2**21  # pages may be as large as 2 MiB
    assert kept < again_and_again / 10


if __name__ == "__main__":
    without = min(pages_of_a_tensor() for _ in range(3))
    keep_freed_memory()
    print(without, [pages_of_a_tensor() for _ in range(20)][-1])  # the first ones have to find a place that fits
