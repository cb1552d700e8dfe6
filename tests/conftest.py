"""What the tests share."""

import os
import signal

import pytest
import torch

# Small tensors on few cores: more threads only get in each other's way, also in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# A shell lets what it starts in the background ignore Ctrl-C, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Keep prepared text out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
