"""The processes of a run: who they are, what they hold, and whether any is left."""

import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.soak.memory import MEMORY, held_bytes

MARK = "SOAK_LIFE"
"""The variable of the environment that every process of a life inherits."""


@dataclass
class Life:
    """One start of a run, until it ends or is killed.

    Attributes:
        strategy: of Lightning's, and ours.
        ranks: how many processes it trains with.
        mark: by which its processes are found, those that have lost their parent included.
        notes: where its first rank writes, after each micro-batch, the bytes it holds.
        files: most open files of a process.
        peak_bytes: most bytes that a process has held, also while it started and read its checkpoint.
    """

    process: subprocess.Popen
    strategy: str
    ranks: int
    mark: str
    notes: Path
    started: float = field(default_factory=time.monotonic)
    files: int = 0
    peak_bytes: int = 0

    def trainers(self) -> list[psutil.Process]:
        """The ranks at work, the first one first; fewer while it starts."""
        mine = [process for process in marked(self.mark) if "tests.soak.train" in " ".join(_line(process))]
        return sorted(mine, key=lambda process: process.pid)

    def observe(self) -> None:
        """Look at memory and open files of the ranks."""
        for process in self.trainers():
            try:
                self.peak_bytes = max(self.peak_bytes, held_bytes(process.pid))
                self.files = max(self.files, process.num_fds())
            except (psutil.Error, OSError):  # it has just ended
                continue

    def memory(self, quarter: int) -> list[int]:
        """The bytes its first rank held, over a quarter (0 to 3) of the micro-batches that it has trained."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        held = [int(line) for line in lines]
        return held[quarter * len(held) // 4 : (quarter + 1) * len(held) // 4]


def start(line: list[str], strategy: str, ranks: int, mark: str, log: Path, notes: Path, **variables: str) -> Life:
    """Start a life, in a session of its own."""
    environment = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1", MEMORY: str(notes)} | variables
    with log.open("ab") as output:
        process = subprocess.Popen(
            line, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return Life(process, strategy, ranks, mark, notes)


def marked(mark: str) -> list[psutil.Process]:
    """Every process alive that has inherited a mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # ended, or of another user
            continue
    return found


def left_over(mark: str, patience: float = 20.0) -> list[psutil.Process]:
    """The processes that outlive their life by more than some seconds; they are killed then."""
    until = time.monotonic() + patience
    while (alive := marked(mark)) and time.monotonic() < until:
        time.sleep(0.2)
    for process in alive:
        process.kill()
    return alive


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
