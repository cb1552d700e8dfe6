"""One campaign of the soak: a run undisturbed, the same run under kills, and what may not differ."""

import json
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tqdm.auto import tqdm

from pretrain.cli import config_folder
from tests.runs import logged
from tests.soak.processes import Life, left_over, start
from tests.soak.train import NAN_STEPS

LOSS_TOLERANCE = 1e-5  # equal to the last bit on one process; two add up in another order
GROWTH = 0.05
WAYS = (("auto", 1), ("ddp", 2), ("fsdp2", 2))  # strategies and the processes each life trains with
PATIENCE = 180.0  # seconds in which a life has to end after a signal, or else it hangs
NAN_AT = (7, 8, 31)
SETTINGS = {
    "resume": "auto",
    "name": "soak",
    "checkpoint_every_n_steps": 5,
    "trainer.max_steps": 60,
    "trainer.val_check_interval": 20,
    "trainer.log_every_n_steps": 5,
    "trainer.enable_progress_bar": "false",
    "trainer.accelerator": "cpu",
}
TEXT: dict[str, Any] = {"data.sequence_length": 64, "data.global_batch_size": 8, "data.micro_batch_size": 2}
TEXT |= {"data.source": "demo:val", "data.val_source": "null", "data.val_fraction": 0.02}
RATE = {"model.optimizer.lr": 3e-4}  # at those of the demos, last bits grow to 1e-3 within 60 steps
# What drawing pictures keeps, up to a tenth of the memory, has to be complete in the first quarter.
PICTURES: dict[str, Any] = {"data.global_batch_size": 16, "data.micro_batch_size": 4, "trainer.max_steps": 400}


@dataclass(frozen=True)
class Campaign:
    """What is trained: a command, a shipped configuration, and what differs from it."""

    name: str
    command: str
    config: str
    settings: dict[str, Any]


CAMPAIGNS = (
    Campaign("dense", "lm.fit", "lm_tiny.yaml", TEXT | RATE),
    Campaign("moe", "lm.fit", "lm_moe_tiny.yaml", TEXT | RATE),
    Campaign("mae", "vision_mae.fit", "mae_tiny.yaml", PICTURES | RATE),
)


@dataclass
class Outcome:
    """What a campaign has shown."""

    campaign: Campaign
    undisturbed: dict[int, dict[str, float]]
    disturbed: dict[int, dict[str, float]]
    skipped: tuple[int, int]  # steps, of either run
    calm: Life
    lives: list[Life]
    ends: Counter[str] = field(default_factory=Counter)  # how lives ended
    left: list[str] = field(default_factory=list)  # processes and files that should not be there

    @property
    def difference(self) -> float:
        """The largest difference of a loss, of training or validation, at the same step."""
        pairs = [
            abs(row[name] - self.disturbed.get(step, {}).get(name, float("inf")))
            for step, row in self.undisturbed.items()
            for name in ("train/loss", "val/loss")
            if name in row
        ]
        return max(pairs)

    @property
    def memory_growth(self) -> float:
        """How much more memory the undisturbed run holds in the last quarter of its steps than in the second.

        Of the median and of the peak, the larger growth. Not than in the first quarter, when libraries come in.
        """
        second, last = self.calm.memory(1), self.calm.memory(3)
        return max(statistics.median(last) / statistics.median(second), max(last) / max(second)) - 1

    @property
    def growth_by_resuming(self) -> float:
        """How much more any life on one process holds in the last quarter of its steps than the undisturbed run."""
        ends = [life.memory(3) for life in self.lives if life.ranks == 1]
        own = statistics.median(self.calm.memory(3))
        return max((statistics.median(held) / own - 1 for held in ends if held), default=0.0)

    @property
    def peak_growth(self) -> float:
        """How much more memory any life on one process has held at any time than the undisturbed run."""
        return max((life.peak_bytes / self.calm.peak_bytes - 1 for life in self.lives if life.ranks == 1), default=0.0)

    def faults(self) -> list[str]:
        """What is wrong, in words."""
        found = [f"{self.campaign.name}: {what} is left" for what in self.left]
        if not self.difference <= LOSS_TOLERANCE:
            found.append(f"{self.campaign.name}: a loss differs by {self.difference:.2g}")
        if self.skipped != (len(NAN_AT), len(NAN_AT)):
            found.append(f"{self.campaign.name}: {self.skipped} steps were skipped instead of {len(NAN_AT)}")
        growths = {"while it trained": self.memory_growth, "by resuming": self.growth_by_resuming}
        growths |= {"at its peak": self.peak_growth}
        for when, growth in growths.items():
            if growth > GROWTH:
                found.append(f"{self.campaign.name}: memory grew by {growth:.1%} {when}")
        return found + [f"{self.campaign.name}: a life hung" for _ in range(self.ends["hung"])]

    def line(self) -> str:
        ends = ", ".join(f"{n} {how}" for how, n in sorted(self.ends.items()))
        return f"{self.campaign.name}: {len(self.lives)} lives ({ends}), largest difference {self.difference:.1e}"

    def record(self) -> dict[str, Any]:
        return {
            "name": self.campaign.name,
            "lives": len(self.lives),
            "ends": dict(self.ends),
            "ways": dict(Counter(f"{life.strategy} on {life.ranks}" for life in self.lives)),
            "largest_difference": self.difference,
            "skipped_steps": self.skipped[1],
            "memory_growth": round(self.memory_growth, 4),
            "growth_by_resuming": round(self.growth_by_resuming, 4),
            "peak_growth": round(self.peak_growth, 4),
            "most_open_files": [self.calm.files, max(life.files for life in self.lives)],
            "left": self.left,
        }


def run_campaign(campaign: Campaign, folder: Path, chance: random.Random, until: float, bar: tqdm) -> Outcome:
    """Train undisturbed, then under kills until a moment; from there on the run is let alone."""
    folder.mkdir(parents=True)
    calm = _begin(campaign, folder / "calm", "auto", 1, "calm")
    _wait(calm, float("inf"))
    undisturbed_seconds = time.monotonic() - calm.started  # a kill may come at any moment of a run
    lives: list[Life] = []
    ends: Counter[str] = Counter()
    left: list[str] = []
    while not lives or lives[-1].process.returncode != 0:
        mark = f"{campaign.name} {len(lives)} {time.time_ns()}"
        life = _begin(campaign, folder / "killed", *chance.choice(WAYS), mark)
        lives.append(life)
        seconds = chance.uniform(0, undisturbed_seconds) if time.monotonic() < until else float("inf")
        end = "ended" if _wait(life, seconds) else _kill(life, chance)
        ends[end] += 1
        left += [f"process {process.pid}" for process in left_over(mark)]
        bar.update()
        if end == "ended" and life.process.returncode != 0:
            raise RuntimeError(f"a life ended by itself with {life.process.returncode}: see {folder / 'killed.log'}")
    calm_folder, killed_folder = (_only_run(folder / name) for name in ("calm", "killed"))
    left += sorted(_files(killed_folder) - _files(calm_folder))
    skipped = tuple(_skipped(run) for run in (calm_folder, killed_folder))
    return Outcome(campaign, logged(calm_folder), logged(killed_folder), skipped, calm, lives, ends, left)  # type: ignore[arg-type]


def _begin(campaign: Campaign, runs_dir: Path, strategy: str, ranks: int, mark: str) -> Life:
    settings = SETTINGS | campaign.settings | {"runs_dir": runs_dir}
    settings |= {"trainer.devices": ranks, "trainer.strategy": strategy}
    line = [sys.executable, "-m", "tests.soak.train", campaign.command]
    line += [
        "--config",
        str(config_folder() / campaign.config),
        *(f"--{key}={value}" for key, value in settings.items()),
    ]
    log, notes = runs_dir.with_suffix(".log"), runs_dir.with_name(f"memory of {mark}")
    return start(line, strategy, ranks, mark, log, notes, **{NAN_STEPS: ",".join(map(str, NAN_AT))})


def _wait(life: Life, seconds: float) -> bool:
    """Watch a life for some seconds; return whether it has ended by itself."""
    until = time.monotonic() + seconds
    while life.process.poll() is None:
        if time.monotonic() > until:
            return False
        life.observe()
        time.sleep(0.1)
    return True


def _kill(life: Life, chance: random.Random) -> str:
    """Send a signal to one rank, or to all, and wait for the end; return what was done."""
    number = chance.choice((signal.SIGKILL, signal.SIGTERM))
    ranks = life.trainers() or [psutil.Process(life.process.pid)]
    targets = ranks if chance.random() < 0.3 else [chance.choice(ranks)]
    for target in targets:
        try:
            target.send_signal(number)
        except psutil.Error:  # it has just ended
            continue
    if not _wait(life, PATIENCE):
        life.process.kill()
        life.process.wait()
        return "hung"
    return signal.Signals(number).name


def _only_run(runs_dir: Path) -> Path:
    """Return the folder of the only run; lives that were killed before their first save may have left another."""
    runs = [path.parent for path in runs_dir.glob("*/*/checkpoints")]
    (run,) = runs
    return run


def _files(run: Path) -> set[str]:
    """Return what lies in the folder of a run, but for the events, of which every life writes a file.

    A sharded checkpoint, a folder, counts as one of a single file.
    """
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return {re.sub(r"\.ckpt/.*", ".ckpt", name) for name in names if "events.out.tfevents" not in name}


def _skipped(run: Path) -> int:
    return json.loads((run / "summary.json").read_text())["skipped_steps"]
