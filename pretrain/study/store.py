"""Where the runs of a study lie, and how each of them stands.

RUNS/LABEL-KEY/       one folder for a run, found by its key
  config.yaml         the settings that it was started with
  output.log          what it said
  TIME/               the run folder of its command: summary.json, metrics.csv, checkpoints/
  outcome.json        written when it failed
  .lock               held by whoever works on it, and by the run itself
"""

import fcntl
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from pretrain.atomic import settled, write_atomically
from pretrain.checkpoint import LAST, is_checkpoint
from pretrain.errors import UserError
from pretrain.recovery import completed_summary
from pretrain.run import CONFIG, LOCK, SUMMARY
from pretrain.study.grid import Run
from pretrain.study.settings import nested

OUTCOME, LOG = "outcome.json", "output.log"
FINISHED, DIVERGED, FAILED, OPEN = "finished", "diverged", "failed", "open"


@dataclass(frozen=True)
class Standing:
    """How a run stands: finished, diverged, failed, or open (to be started or resumed)."""

    state: str
    folder: Path | None = None  # the run folder of its command
    summary: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def loss(self) -> float | None:
        """The terminal validation loss of a finished run."""
        return self.summary.get("final", {}).get("val/loss") if self.state == FINISHED else None


class Store:
    """The folder of all runs of a study, perhaps shared with other studies."""

    def __init__(self, root: Path, command: str) -> None:
        self.root = root
        self.command = command

    def place(self, run: Run) -> Path:
        """Return the folder of a run; it keeps the name that it was made with."""
        earlier = sorted(self.root.glob(f"*-{run.key}"))
        return earlier[0] if earlier else self.root / run.folder_name

    def lock(self, run: Run) -> int | None:
        """Return an open file that holds the run for its owner and the processes that inherit it, or None.

        The system lets go of it when the last of them has ended, however that came about.
        """
        place = self.place(run)
        try:
            place.mkdir(parents=True, exist_ok=True)
            lock = os.open(place / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{place} cannot be written ({error.strerror}): choose another --output") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return lock

    def standing(self, run: Run) -> Standing:
        """Return how a run stands, by what it has left."""
        place = self.place(run)
        folders = sorted(path.parent for path in place.glob(f"*/{SUMMARY}"))
        read = [(folder, _read_json(folder / SUMMARY)) for folder in folders]
        for done, summary in read:
            if summary.get("exit_state") == FINISHED:
                return Standing(FINISHED, done, summary)
        folder, summary = read[-1] if read else (None, {})
        if summary.get("exit_state") == DIVERGED:
            return Standing(DIVERGED, folder, summary, summary.get("error"))
        if (place / OUTCOME).is_file():
            return Standing(FAILED, folder, summary, _read_json(place / OUTCOME).get("error"))
        return Standing(OPEN, folder, summary)

    def arguments(self, run: Run) -> list[str]:
        """Return the arguments of its command that start or resume a run whose lock is held; clears what is of no use.

        A checkpoint is all that a run can be resumed from.
        """
        place, standing = self.place(run), self.standing(run)
        for folder in (path for path in place.iterdir() if path.is_dir()):
            if folder != standing.folder or not is_checkpoint(settled(folder / "checkpoints" / LAST)):
                shutil.rmtree(folder)
        if standing.folder is not None and standing.folder.is_dir():
            return ["--resume", str(standing.folder)]
        settings = run.settings | {"name": place.name, "runs_dir": str(self.root)}
        write_atomically(place / CONFIG, yaml.safe_dump(nested(settings), sort_keys=False))
        return ["--config", str(place / CONFIG)]

    def settle(self, run: Run) -> Standing:
        """Return how a run stands, after giving its last word to one that was killed between its end and that word."""
        standing = self.standing(run)
        if standing.state == OPEN and standing.folder is not None:
            summary = completed_summary(standing.folder, standing.summary)
            if summary is not None:
                write_atomically(standing.folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
                return Standing(FINISHED, standing.folder, summary)
        return standing

    def record_failure(self, run: Run, exit_code: int, error: str) -> None:
        """Note that a run has failed, so that it is not tried again and again."""
        outcome = {"state": FAILED, "exit_code": exit_code, "error": error}
        write_atomically(self.place(run) / OUTCOME, json.dumps(outcome, indent=2) + "\n")

    def forget_failure(self, run: Run) -> None:
        """Let a failed run be tried again."""
        (self.place(run) / OUTCOME).unlink(missing_ok=True)

    def drop_checkpoints(self, run: Run) -> None:
        """Delete the checkpoints of a finished run."""
        standing = self.standing(run)
        if standing.state == FINISHED and standing.folder is not None:
            shutil.rmtree(standing.folder / "checkpoints", ignore_errors=True)

    def last_words(self, run: Run) -> str:
        """Return the last line that a run has printed."""
        log = self.place(run) / LOG
        lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
        return next((line.strip().removeprefix("error: ") for line in reversed(lines) if line.strip()), "no word")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): delete its folder, and the run is done again") from error
