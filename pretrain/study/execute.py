"""The runs of a study as processes of this machine, some at a time; each may be killed at any moment."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pretrain.errors import UserError
from pretrain.study.grid import Run
from pretrain.study.progress import View
from pretrain.study.store import DIVERGED, FAILED, FINISHED, LOG, OPEN, Standing, Store

POLL_SECONDS = 0.25


@dataclass
class Child:
    """A run at work."""

    run: Run
    process: subprocess.Popen
    lock: int
    slot: int


class Stop:
    """Ctrl-C or SIGTERM stops the study: its runs save and end. A second one ends them at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.at_once = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: Any) -> None:
        self.at_once = self.signal is not None
        self.signal = self.signal or number


def command_line(store: Store, run: Run) -> list[str]:
    """Return the command that starts or resumes a run; its lock is to be held."""
    quiet = "--trainer.enable_progress_bar=false"
    return [sys.executable, "-m", store.command, *store.arguments(run), quiet]


def verdict(store: Store, run: Run, exit_code: int, stopping: bool = False) -> Standing:
    """Return how a run stands after its process has ended, and note a failure."""
    standing = store.settle(run)
    interrupted = stopping or exit_code in (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM)
    if standing.state != OPEN or interrupted:
        return standing
    if exit_code < 0:
        error = f"killed by {signal.Signals(-exit_code).name}"
    elif standing.summary.get("exit_state") == "stopped early":
        error = f"stopped at step {standing.summary['step']} of {standing.summary['total_steps']}"
    else:
        error = standing.summary.get("error") or store.last_words(run)
    store.record_failure(run, exit_code, error)
    return store.standing(run)


class Workers:
    """Work through runs, `jobs` at a time.

    Args:
        environments: of each slot: the variables that give its runs their devices and threads.
        view: is told what happens.
        keep_checkpoints: False deletes those of finished runs.
    """

    def __init__(
        self, store: Store, environments: list[dict[str, str]], view: View, stop: Stop, keep_checkpoints: bool
    ) -> None:
        self.store = store
        self.environments = environments
        self.view = view
        self.stop = stop
        self.keep_checkpoints = keep_checkpoints
        self.children: list[Child] = []

    def work(self, runs: list[Run]) -> None:
        """Return when every run is finished, diverged or failed, or when the study is to stop."""
        waiting = deque(runs)
        told = False
        try:
            while self.children or (waiting and self.stop.signal is None):
                if self.stop.signal is not None and not told:
                    told = True
                    self.view.say("stopping: the runs save their state (once more ends them at once)")
                    self._signal_children(
                        signal.SIGTERM
                    )  # SIGINT is ignored by what a shell has put into the background
                if self.stop.at_once:
                    self._signal_children(signal.SIGKILL)
                if self.stop.signal is None:
                    self._start_some(waiting)
                self._collect()
                self.view.refresh([(child.slot, child.run) for child in self.children])
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._signal_children(signal.SIGTERM)
            raise

    def _start_some(self, waiting: deque[Run]) -> None:
        """Start runs in the free slots; one that another process works on goes to the back of the queue."""
        free = sorted(set(range(len(self.environments))) - {child.slot for child in self.children})
        for _ in range(len(waiting)):
            if not free:
                return
            run = waiting.popleft()
            lock = self.store.lock(run)
            if lock is None:
                waiting.append(run)
                continue
            standing = self.store.settle(run)
            if standing.state != OPEN:  # another process has done it
                os.close(lock)
                self._settled(run, standing)
                continue
            self.children.append(self._start(run, lock, free.pop(0)))

    def _start(self, run: Run, lock: int, slot: int) -> Child:
        line = command_line(self.store, run)
        with (self.store.place(run) / LOG).open("ab") as log:
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environments[slot],
                pass_fds=[lock],  # held as long as one of us lives
                process_group=0,  # Ctrl-C is for the study, which passes it on once
            )
        self.view.started(run, slot, resumed="--resume" in line)
        return Child(run, process, lock, slot)

    def _collect(self) -> None:
        for child in [child for child in self.children if child.process.poll() is not None]:
            self.children.remove(child)
            standing = verdict(self.store, child.run, child.process.returncode, self.stop.signal is not None)
            os.close(child.lock)
            self._settled(child.run, standing)

    def _settled(self, run: Run, standing: Standing) -> None:
        if standing.state == FINISHED and not self.keep_checkpoints:
            self.store.drop_checkpoints(run)
        self.view.ended(run, standing)

    def _signal_children(self, number: int) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.process.send_signal(number)


def slots(jobs: int | None, devices_per_run: int, visible: Callable[[], list[str]]) -> list[dict[str, str]]:
    """Return the environment of every slot: its own GPUs, or its share of the processor's cores.

    Args:
        jobs: how many; None: as many as the GPUs suffice for, one without any.
        devices_per_run: GPUs that one run takes.
        visible: names the GPUs that there are.

    Raises:
        UserError: fewer GPUs than the jobs need.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = visible()
    jobs = jobs or max(1, len(gpus) // devices_per_run)
    if gpus and jobs * devices_per_run > len(gpus):
        raise UserError(
            f"{jobs} jobs of {devices_per_run} device(s) need {jobs * devices_per_run} GPUs, and there are {len(gpus)}"
            f": give --jobs {max(1, len(gpus) // devices_per_run)}, or set trainer.devices"
        )
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // jobs)))
    environments = []
    for slot in range(jobs):
        own = gpus[slot * devices_per_run : (slot + 1) * devices_per_run]
        environments.append({"OMP_NUM_THREADS": threads} | ({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}))
    return environments


def visible_gpus() -> list[str]:
    """Return the names by which CUDA_VISIBLE_DEVICES knows the GPUs of this machine."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()] if torch.cuda.is_available() else []
    return [str(index) for index in range(torch.cuda.device_count())]


def counted(standings: dict[str, Standing]) -> str:
    """Return how many runs ended how, in words."""
    numbers = {state: sum(s.state == state for s in standings.values()) for state in (FINISHED, DIVERGED, FAILED, OPEN)}
    return ", ".join(
        f"{number} {'to be done' if state == OPEN else state}" for state, number in numbers.items() if number
    )
