"""Which checkpoint a run goes on from, whatever has befallen the others."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint import RESUMABLE, AtomicCheckpointIO
from pretrain.errors import UserError
from pretrain.recovery import intact_checkpoint, newest_intact, why_torn
from pretrain.saving import shift_checkpoints


def save(file: Path, step: int, size: int = 1000) -> None:
    checkpoint = dict.fromkeys(RESUMABLE) | {"global_step": step, "config": {"model": {}, "data": {}}}
    AtomicCheckpointIO().save_checkpoint(checkpoint | {"state_dict": {"a": torch.full((size,), float(step))}}, file)


def step_of(file: Path) -> int:
    """Return the step of a checkpoint whose weights agree with it."""
    content = torch.load(file, weights_only=True)
    assert torch.equal(content["state_dict"]["a"].unique(), torch.tensor([float(content["global_step"])]))
    return content["global_step"]


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[content.index(torch.full((4,), 3.0).numpy().tobytes()) + 8] ^= 1
    file.write_bytes(content)


def forget_the_optimizer(file: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(3)}, "global_step": 3}, file)


BEFALLS = [cut_short, flip_a_bit, forget_the_optimizer, lambda file: file.write_bytes(b"")]


@pytest.mark.parametrize("befall", BEFALLS, ids=["cut short", "flipped bit", "missing keys", "empty"])
def test_a_torn_checkpoint_is_passed_over(tmp_path, befall, capfd):
    folder = tmp_path / "TIME" / "checkpoints"
    for seconds, (name, step) in enumerate({"step_00000002.ckpt": 2, "best.ckpt": 1, "last.ckpt": 3}.items()):
        save(folder / name, step)
        os.utime(folder / name, (1000 + seconds, 1000 + seconds))
    assert step_of(intact_checkpoint(tmp_path / "TIME")) == step_of(newest_intact(tmp_path)) == 3
    assert capfd.readouterr().err == ""
    befall(folder / "last.ckpt")
    os.utime(folder / "last.ckpt", (1002, 1002))
    for find in (lambda: intact_checkpoint(tmp_path / "TIME"), lambda: newest_intact(tmp_path)):
        assert find() == folder / "best.ckpt"  # written after the other
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("warning: passed over: ")
        assert "last.ckpt" in line
    with pytest.raises(UserError, match=r"last\.ckpt"):  # named, so nothing else will do
        intact_checkpoint(folder / "last.ckpt")


def test_an_older_run_is_taken_where_the_newest_has_nothing_whole(tmp_path):
    for number, name in enumerate(("2026-01-01", "2026-01-02")):
        save(tmp_path / name / "checkpoints" / "last.ckpt", number)
        os.utime(tmp_path / name / "checkpoints" / "last.ckpt", (1000 + number, 1000 + number))
    assert step_of(newest_intact(tmp_path)) == 1
    cut_short(tmp_path / "2026-01-02" / "checkpoints" / "last.ckpt")
    assert step_of(newest_intact(tmp_path)) == 0
    assert newest_intact(tmp_path / "other") is None


def test_the_last_three_are_kept_under_their_steps(tmp_path):
    for step in range(1, 6):
        save(tmp_path / "next.ckpt", step)
        shift_checkpoints(tmp_path, keep=3)
    steps = {path.name: step_of(path) for path in tmp_path.iterdir()}
    assert steps == {"last.ckpt": 5, "step_00000004.ckpt": 4, "step_00000003.ckpt": 3}


def saved_since(folder: Path, before: set[int]) -> bool:
    """Return whether a `last.ckpt` has come that was written at none of these times."""
    try:
        return (folder / "last.ckpt").stat().st_mtime_ns not in before
    except FileNotFoundError:  # between two renames
        return False


def test_fifty_kills_while_saving_leave_a_whole_checkpoint_each(tmp_path):
    """A process that does nothing but save, killed at any moment; the next one goes on from what it finds."""
    folder, chance, step = tmp_path / "TIME" / "checkpoints", random.Random(0), 1
    save(folder / "last.ckpt", step, size=50_000)
    started = time.perf_counter()
    save(folder / "last.ckpt", step, size=50_000)
    seconds = time.perf_counter() - started
    for kill in range(50):
        before = {path.stat().st_mtime_ns for path in folder.glob("*.ckpt")}
        writer = os.fork()
        if writer == 0:
            while True:
                step += 1
                save(folder / "next.ckpt", step, size=50_000)
                shift_checkpoints(folder, keep=2)
        while kill % 5 == 0 and not saved_since(folder, before):  # some come to an end, however slow the machine is
            time.sleep(seconds / 10)
        time.sleep(chance.uniform(0, 4 * seconds))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        found = newest_intact(tmp_path)
        assert found is not None
        assert step_of(found) >= step
        step = step_of(found)
        assert all(why_torn(path) is None for path in folder.glob("[!.]*.ckpt"))
    assert step > 5
