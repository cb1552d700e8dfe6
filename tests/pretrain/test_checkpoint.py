"""Checkpoints on disk: whole or as they were before."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint import AtomicCheckpointIO, find_checkpoint, read_checkpoint
from pretrain.errors import UserError


def test_a_failed_write_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    """As on a full disk: the bytes are refused in the middle."""
    file = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"state_dict": {"a": torch.ones(3)}}, file)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"last\.ckpt cannot be written .*No space left"):
        io.save_checkpoint({"state_dict": {"a": torch.zeros(3)}}, file)
    assert torch.equal(read_checkpoint(file)["state_dict"]["a"], torch.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


WRITER = """
import sys, torch
from pretrain.checkpoint import AtomicCheckpointIO
weights = torch.ones(4_000_000)
print("ready", flush=True)
while True:
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"a": weights}}, sys.argv[1])
"""


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.029, 0.041])
def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path, delay):
    file = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"a": torch.zeros(4_000_000)}}, file)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE, cwd=Path.cwd())
    assert writer.stdout is not None
    writer.stdout.readline()
    time.sleep(delay)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    weights = read_checkpoint(file)["state_dict"]["a"]
    assert weights.shape == (4_000_000,)
    assert weights.unique().numel() == 1


def test_a_run_folder_stands_for_its_last_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"holds no checkpoints/last\.ckpt"):
        find_checkpoint(tmp_path)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.touch()
    assert find_checkpoint(tmp_path) == find_checkpoint(last) == last
    with pytest.raises(UserError, match="does not exist"):
        find_checkpoint(tmp_path / "other")


def test_a_folder_of_runs_stands_for_the_run_that_has_saved_last(tmp_path):
    for name, saved in {"2026-01-01": 30, "2026-01-02": 20, "2026-01-03": None, "notes": None}.items():
        folder = tmp_path / "runs" / name / "checkpoints"
        folder.mkdir(parents=True)
        if saved is not None:
            (folder / "last.ckpt").touch()
            os.utime(folder / "last.ckpt", (saved, saved))
    assert find_checkpoint(tmp_path / "runs") == tmp_path / "runs" / "2026-01-01" / "checkpoints" / "last.ckpt"
    with pytest.raises(UserError, match=r"holds no checkpoints/last\.ckpt, nor does a folder in it"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut short"])
def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path, content):
    file = tmp_path / "torn.ckpt"
    file.write_bytes(content)
    with pytest.raises(UserError, match="no readable checkpoint") as error:
        read_checkpoint(file)
    assert "\n" not in str(error.value)
