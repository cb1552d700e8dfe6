"""Two processes that train together, each started once for many runs: starting costs more than training here."""

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from pretrain import optim
from pretrain.errors import INTERRUPTED_EXIT_CODE

ROOT = Path(__file__).parent.parent
N_RANKS = 2


def run_on_two_ranks(jobs: list[tuple[str, list[str]]], timeout: float = 900) -> None:
    """Call `MODULE.run(ARGUMENTS)` for each job, one after the other, on two ranks that are launched as by torchrun.

    Newton-Schulz computes in float32, see `pretrain.optim.NEWTON_SCHULZ_TYPE`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(N_RANKS),
        "LOCAL_WORLD_SIZE": str(N_RANKS),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.ranks", json.dumps(jobs)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(N_RANKS)
    ]
    try:
        shown = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * N_RANKS, "\n".join(shown)[-6000:]


def main() -> None:
    optim.NEWTON_SCHULZ_TYPE = torch.float32
    for module, arguments in json.loads(sys.argv[1]):
        try:
            importlib.import_module(module).run(arguments)
        except SystemExit as stop:  # of a run that is asked to stop
            if stop.code != INTERRUPTED_EXIT_CODE:
                raise


if __name__ == "__main__":
    main()
