"""A command that leaves what `lm.fit` leaves, in no time: for tests of how processes are started, stopped and counted.

Its settings under `fake`: `steps` of 0.05 s; `end`: finish, fail or diverge; `deaf`: do not listen to signals.
"""

import json
import signal
import sys
import time
from pathlib import Path

import yaml


def main() -> None:
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stop.append(received))
    if sys.argv[1] == "--resume":
        folder = Path(sys.argv[2])
    else:
        settings = yaml.safe_load(Path(sys.argv[2]).read_text())
        folder = Path(settings["runs_dir"]) / settings["name"] / "TIME"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    step, total = int((_last(folder).read_text() if _last(folder).is_file() else "") or 0), settings["fake"]["steps"]
    _summary(folder, "running", step, total)
    while step < total:
        time.sleep(0.05)
        step += 1
        _last(folder).write_text(str(step))
        with (folder / "visits.txt").open("a") as visits:
            visits.write(f"{step}\n")
        if stop and not settings["fake"].get("deaf"):
            _summary(folder, "interrupted", step, total)
            sys.exit(128 + stop[0])
    end = settings["fake"].get("end", "finish")
    if end == "fail":
        print("error: the disk is full")
        sys.exit(1)
    if end == "diverge":
        _summary(folder, "diverged", step, total, error="DivergedError: the loss is nan")
        sys.exit(2)
    loss = 3 + abs(settings["model"]["optimizer"]["lr"] - 2e-3) * 100 + settings["seed_everything"] / 1000
    (folder / "metrics.csv").write_text(f"step,val/loss\n{step},{loss}\n")
    _summary(folder, "finished", step, total, final={"step": step, "val/loss": loss})


def _last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def _summary(folder: Path, state: str, step: int, total: int, **more: object) -> None:
    plan = {"global_batch_size": 2, "units_per_sample": 8}
    facts = {"exit_state": state, "step": step, "total_steps": total, "seconds": 1.0, "tokens_seen": step * 16}
    facts |= {"plan": plan, "parameters": {"total": 1000, "activated": 1000}, "tokens_per_second": 10.0, "best": {}}
    facts |= {"versions": {"torch": "2"}, "precision": "32-true", "device": "cpu", "git_commit": None}
    (folder / "summary.json").write_text(json.dumps(facts | more))


if __name__ == "__main__":
    main()
