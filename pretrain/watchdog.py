"""A rank that hangs ends the job, and is named: otherwise the others wait for it without a word."""

import json
import os
import platform
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from pretrain.run import SUMMARY, write_json

EXIT_CODE = 124  # of `timeout`, a program whose time is up
MARGIN = timedelta(minutes=5)  # torch ends a collective too, without names: it is to be the later one
FAREWELL_SECONDS = 10.0


class HangWatch(L.Callback):
    """End all processes with exit code 124 and one line if the training makes no progress for some minutes.

    `summary.json` then says `hung`.

    Each rank counts what it has got through (batches, backward passes, steps) and a thread publishes the count in the
    store that the ranks found each other by. All of them come to stand behind a rank that hangs, and that one has the
    lowest count. A thread, since the main one is then inside a collective, or inside a wait for the device, and since
    torch's own time-outs do not tell which rank is missing.

    Args:
        folder: the run folder.
        minutes: without progress; None switches it off.
    """

    def __init__(self, folder: Path, minutes: float | None) -> None:
        self.folder = folder
        self.minutes = minutes
        self._count = 0
        self._since = 0.0  # of the last progress, by time.monotonic
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self.minutes is None or trainer.world_size == 1 or not torch.distributed.is_initialized():
            return
        # A connection of its own: a call of the main thread may be waiting on the other one.
        store = torch.distributed.distributed_c10d._get_default_store().clone()
        store.set(f"watch/host/{trainer.global_rank}", platform.node())
        store.set(f"watch/count/{trainer.global_rank}", "0")
        trainer.strategy.barrier()
        self._progress()
        self._over.clear()
        watch = (store, trainer.global_rank, trainer.world_size, 60 * self.minutes, trainer.strategy.launcher)
        self._thread = threading.Thread(target=self._watch, args=watch, daemon=True, name="hang watch")
        self._thread.start()

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self._over.set()

    def on_exception(self, *_: Any) -> None:
        self._over.set()  # the way out has its own end

    def _progress(self, *_: Any, **__: Any) -> None:
        self._count, self._since = self._count + 1, time.monotonic()

    on_train_batch_start = on_before_backward = on_before_optimizer_step = on_train_batch_end = _progress
    on_validation_start = on_validation_batch_start = on_validation_batch_end = on_validation_end = _progress
    on_save_checkpoint = on_train_end = _progress

    def _watch(self, store: Any, rank: int, world_size: int, patience: float, launcher: Any) -> None:
        period = min(patience / 10, 5.0)
        try:
            while not self._over.wait(period):
                store.set(f"watch/count/{rank}", str(self._count))
                if time.monotonic() - self._since > patience or store.check(["watch/hang"]):
                    store.set("watch/hang", "")
                    time.sleep(2 * period)  # all publish where they stand
                    if not self._over.is_set():
                        self._end(store, rank, world_size, patience, launcher)
        except RuntimeError:  # the store went with the process that held it, whose end the main thread will notice
            return

    def _end(self, store: Any, rank: int, world_size: int, patience: float, launcher: Any) -> None:
        counts = [int(store.get(f"watch/count/{r}")) for r in range(world_size)]
        missing = [r for r in range(world_size) if counts[r] == min(counts)]
        present = [r for r in range(world_size) if r not in missing]
        if rank == (present or missing)[0]:
            names = ", ".join(f"rank {r} on {store.get(f'watch/host/{r}').decode()}" for r in missing)
            who = f"{names} did not arrive where the others wait" if present else "no rank goes on"
            line = f"error: no progress for {patience / 60:g} minutes, and {who}: look there; go on with --resume auto"
            sys.stderr.flush()
            os.write(2, f"{line}\n".encode())
        if rank == 0:
            with suppress(OSError, ValueError):  # the line above says more
                summary = json.loads((self.folder / SUMMARY).read_text(encoding="utf-8"))
                write_json(self.folder / SUMMARY, summary | {"exit_state": "hung"})
        # Together, so that none has the time to complain that another has left.
        store.add("watch/leaving", 1)
        deadline = time.monotonic() + FAREWELL_SECONDS
        while int(store.add("watch/leaving", 0)) < max(1, len(present)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for child in getattr(launcher, "procs", []):  # those that this process has started
            child.kill()
        os._exit(EXIT_CODE)


def set_collective_timeout(strategy: Any, minutes: float | None) -> None:
    """Let torch's own time-out come after the watch's, unless the strategy was given one of its own."""
    if minutes is not None and getattr(strategy, "_timeout", None) == default_pg_timeout:
        strategy._timeout = timedelta(minutes=minutes) + MARGIN
