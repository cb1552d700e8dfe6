"""Which checkpoint of a run to go on from: the newest one that is whole."""

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from pretrain.atomic import settled
from pretrain.checkpoint import BEST, LAST, NEXT, find_checkpoint, is_checkpoint, read_checkpoint
from pretrain.errors import UserError
from pretrain.run import SUMMARY, RunRecord, read_curve, write_json
from pretrain.shards import STATE, damaged_slice, is_shard_folder


def checkpoints_of(run: Path) -> list[Path]:
    """Return the checkpoints of a run folder, files or folders, the one that was written last first."""
    folder = run / "checkpoints"
    found = {*folder.glob("[!.]*.ckpt"), *(settled(folder / name) for name in (LAST, NEXT, BEST))}
    there = [path for path in found if path.exists()]
    return sorted(there, key=lambda path: (-path.stat().st_mtime_ns, path.name))


def why_torn(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint that a run could not go on from, in one line; None: it is whole.

    Every byte is read, once in the life of a job, as the resume itself does next: a checkpoint holds a checksum
    (CRC-32) of each tensor, torch's own in a file and ours in a folder of shards. It covers holes and flipped bits, not
    only a file cut short, and needs no record beside the files that could be lost or be older than they are.
    """
    try:
        read_checkpoint(checkpoint, resumable=True, lazy=True)
        is_folder = is_shard_folder(checkpoint)
        with zipfile.ZipFile(checkpoint / STATE if is_folder else checkpoint) as archive:
            broken = archive.testzip()
        if broken is None and is_folder:
            broken = damaged_slice(checkpoint)
    except UserError as error:
        return str(error)
    except Exception as error:  # zipfile's and safetensors' own, and whatever a damaged header leads to
        return f"{checkpoint} cannot be read ({error})"
    return None if broken is None else f"{checkpoint} is damaged: the checksum of its part {broken} is wrong"


def intact_checkpoint(run_or_file: str | Path) -> Path:
    """Return the checkpoint that `--resume RUN` goes on from: the last one, or the newest intact one in its place.

    Raises:
        UserError: there is none, or the checkpoint that was named is torn.
    """
    chosen = find_checkpoint(run_or_file)
    torn = why_torn(chosen)
    if torn is None:
        return chosen
    if chosen == Path(run_or_file).expanduser():
        raise UserError(f"{torn}; --resume RUN takes the newest intact checkpoint of a run")
    _warn(torn)
    others = [path for path in checkpoints_of(chosen.parent.parent) if path != chosen]
    found = next(_intact(others), None)
    if found is None:
        raise UserError(f"{chosen.parent} holds no intact checkpoint: start anew")
    return _told(found)


def newest_intact(runs: Path) -> Path | None:
    """Return the newest intact checkpoint of the newest run below `runs` that has one; None: there is none.

    The checkpoints that are passed over are named, one line each.
    """
    folders = [path.parent for path in runs.glob("*/checkpoints") if checkpoints_of(path.parent)]
    folders.sort(key=lambda folder: checkpoints_of(folder)[0].stat().st_mtime_ns, reverse=True)
    found = next(_intact([path for folder in folders for path in checkpoints_of(folder)]), None)
    return None if found is None else _told(found)


def _intact(checkpoints: list[Path]) -> Iterator[Path]:
    for checkpoint in checkpoints:
        torn = why_torn(checkpoint)
        if torn is None:
            yield checkpoint
        else:
            _warn(torn)


@rank_zero_only
def _warn(torn: str) -> None:
    print(f"warning: passed over: {torn}", file=sys.stderr)


def _told(checkpoint: Path) -> Path:
    say(f"going on from {checkpoint}")
    return checkpoint


@rank_zero_only
def say(text: str) -> None:
    """Tell the user, once however many ranks there are."""
    print(text, flush=True)


def completed_summary(folder: Path, summary: dict[str, Any]) -> dict[str, Any] | None:
    """Return the summary of a run whose last checkpoint is of its last step; None if it has steps to go."""
    last = settled(folder / "checkpoints" / LAST)
    if not is_checkpoint(last):
        return None
    try:
        checkpoint = read_checkpoint(last, resumable=True, lazy=True)
    except UserError:  # the run itself will say what is wrong with it
        return None
    record = checkpoint["callbacks"].get(RunRecord.__qualname__, {})
    step = checkpoint["global_step"]
    if step < summary["total_steps"] or record.get("final", {}).get("step") != step:
        return None
    plan = summary["plan"]
    samples = step * plan["global_batch_size"]
    unit = next((key for key in summary if key.endswith("_seen")), None)
    seen = {unit: samples * plan["units_per_sample"]} if unit else {}
    trained = {k: v for row in read_curve(folder)[-1:] for k, v in row.items() if k.startswith("train/")}
    return (
        summary
        | seen
        | {
            "exit_state": "finished",
            "step": step,
            "final": record["final"] | trained,
            "best": record["best"],
        }
    )


def settle(run: Path) -> None:
    """Give a run its last word that was killed between its last checkpoint and that word."""
    file = run / SUMMARY
    summary = completed_summary(run, json.loads(file.read_text())) if file.is_file() else None
    if summary is not None:
        write_json(file, summary)
