"""What is broken never reaches the weights; a run that cannot go on ends in one line, with its checkpoint whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lm.fit import main, run
from pretrain.checkpoint import read_checkpoint
from pretrain.metrics import DivergedError
from pretrain.order import SampleStream
from pretrain.watchdog import EXIT_CODE
from tests.lm.runs import arguments, train
from tests.runs import assert_identical, logged, run_folder, state_of

ROOT = Path(__file__).parent.parent.parent
BREAK, LEAVE_OUT = "tests.lm.faulty.Break", "tests.lm.faulty.LeaveOut"
SHORT = {"trainer__max_steps": 8, "trainer__log_every_n_steps": 4, "trainer__val_check_interval": 8}
TINY = {"model__vocab_size": 320, "trainer__limit_val_batches": 1}
MOE_MUON = {
    "model__moe": "{n_experts: 4, top_k: 2, bias_update_rate: 0.001}",
    "model__optimizer__name": "muon_adamw",
    "model__ffn__kind": "one-moa",
}


def callback(name: str, **settings) -> list[str]:
    return [f"--trainer.callbacks+={name}", *(f"--trainer.callbacks.{k}={v}" for k, v in settings.items())]


def faults(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("settings", "gradient"),
    [({"trainer__gradient_clip_val": 1.0}, False), (MOE_MUON, True), ({"model__optimizer__fused": False}, True)],
    ids=["adamw", "muon_adamw", "decided on the host"],
)
def test_a_broken_step_is_left_out_to_the_last_bit(tmp_path, settings, gradient, capfd):
    """`Break` compares the state before and after the step; the steps after it are those of a run without it."""
    settings = SHORT | TINY | settings
    broken = train(tmp_path / "broken", *callback(BREAK, steps="[6]", gradient=gradient), **settings)
    without = train(tmp_path / "without", *callback(LEAVE_OUT, steps="[6]"), **settings)
    assert_identical(*(state_of(run.folder / "checkpoints/last.ckpt") for run in (broken, without)))

    (fault,) = faults(broken.folder)
    samples = SampleStream(len(broken.data.train_dataset), broken.data.order_seed).read(20, 24).tolist()
    assert (fault["kind"], fault["step"], fault["positions"], fault["samples"]) == (
        "skipped_step",
        6,
        [20, 24],
        samples,
    )
    reason = f"the {'gradient' if gradient else 'loss'} is not finite"
    warnings = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: step 6 left out")]
    assert len(warnings) == 1
    assert f"{reason}; samples {', '.join(map(str, samples))}" in warnings[0]
    assert [logged(broken.folder)[step]["faults/skipped_steps"] for step in (4, 8)] == [0, 1]
    assert json.loads((broken.folder / "summary.json").read_text())["skipped_steps"] == 1


@pytest.mark.parametrize("kind", ["adamw", "muon_adamw"])
def test_one_pass_over_the_gradients_serves_guard_clipping_and_log(tmp_path, monkeypatch, kind):
    taken, take = [], torch.nn.utils.get_total_norm
    monkeypatch.setattr(
        torch.nn.utils, "get_total_norm", lambda *args, **kw: taken.append(take(*args, **kw)) or taken[-1]
    )
    settings = TINY | SHORT | {"trainer__gradient_clip_val": 0.01, "model__optimizer__name": kind}
    run = train(tmp_path, *callback("tests.lm.faulty.NormOfStep"), **settings)
    (seen,) = (recorder.norms for recorder in run.trainer.callbacks if hasattr(recorder, "norms"))
    assert seen == pytest.approx([0.01] * 8, rel=1e-3)
    assert len(taken) == 8
    assert [logged(run.folder)[step]["optim/grad_norm"] for step in (4, 8)] == [float(taken[3]), float(taken[7])]


@pytest.mark.slow
def test_a_loss_that_is_broken_on_one_rank_is_left_out_on_all(tmp_path):
    """Every rank compares its own state; an assertion that fails there ends the run with 1."""
    settings = SHORT | TINY | MOE_MUON | {"data__micro_batch_size": 1}
    command = [sys.executable, "-m", "lm.fit", *arguments(tmp_path, **settings), *callback(BREAK, steps="[3,4]")]
    command += ["--trainer.devices=2", "--trainer.strategy=ddp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    assert [fault["step"] for fault in faults(run_folder(tmp_path))] == [3, 4]


def test_the_gradient_scaler_may_look_for_its_scale(tmp_path):
    """From 2^40 it overflows in the first steps, which is no fault; a loss that is nan is one, and counted once."""
    settings = SHORT | TINY | {"trainer__max_steps": 40, "trainer__val_check_interval": 40}
    precision = ["--trainer.plugins+=lightning.pytorch.plugins.precision.MixedPrecision"]
    precision += [f"--trainer.plugins.{k}={v}" for k, v in {"precision": "16-mixed", "device": "cpu"}.items()]
    scaler = {"class_path": "torch.amp.GradScaler", "init_args": {"device": "cpu", "init_scale": 2.0**40}}
    precision += [f"--trainer.plugins.scaler={json.dumps(scaler)}"]
    finished = train(tmp_path, *precision, *callback(BREAK, steps="[36]"), **settings)
    assert finished.trainer.precision_plugin.scaler.get_scale() < 2.0**40
    assert [fault["step"] for fault in faults(finished.folder)] == [36]


@pytest.mark.parametrize("lost", [0, 9], ids=["whole", "cut short"])
def test_a_resumed_run_tells_of_a_fault_once(tmp_path, lost):
    """Step 7 is taken again; its line was the last one, which a kill may have cut short."""
    settings = SHORT | TINY | {"checkpoint_every_n_steps": 4, "keep_last_checkpoints": 2}
    folder = train(tmp_path, *callback(BREAK, steps="[3,7]"), **settings).folder
    file = folder / "faults.jsonl"
    os.truncate(file, file.stat().st_size - lost)
    run(["--resume", str(folder / "checkpoints/step_00000004.ckpt")])
    assert [fault["step"] for fault in faults(folder)] == [3, 7]


@pytest.mark.parametrize(("allowed", "end"), [(0, 7), (2, 9)])
def test_too_many_broken_steps_in_a_row_end_the_run(tmp_path, allowed, end):
    """Step 3 alone does not count towards them; the checkpoint of step 6 would be due at 8, but waits."""
    with pytest.raises(DivergedError, match=rf"at step {end}, the last of {allowed + 1} in a row: .* checkpoint is "):
        train(
            tmp_path,
            *callback(BREAK, steps=f"[{'' if allowed == 0 else '3,'}7,8,9,10,11,12]"),
            max_skipped_steps=allowed,
            checkpoint_every_n_steps=2,
            **TINY | {"trainer__log_every_n_steps": 1},
        )
    folder = run_folder(tmp_path)
    assert state_of(folder / "checkpoints/last.ckpt")["step"] == 6
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["exit_state"], summary["skipped_steps"]) == ("diverged", end - 6 + (allowed > 0))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job_by_its_name(tmp_path):
    command = [sys.executable, "-m", "lm.fit", *arguments(tmp_path, **TINY), *callback("tests.lm.faulty.Hang")]
    command += ["--trainer.devices=2", "--trainer.strategy=ddp", "--hang_timeout_minutes=0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == EXIT_CODE
    (line,) = (line for line in done.stderr.splitlines() if "error" in line.lower())
    assert f"no progress for 0.1 minutes, and rank 1 on {os.uname().nodename} did not arrive" in line
    assert json.loads((run_folder(tmp_path) / "summary.json").read_text())["exit_state"] == "hung"


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("file systems cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("what", ["checkpoint", "records", "faults"])
def test_a_full_disk_ends_the_run_in_one_line_with_its_checkpoint_whole(small_disk, what, capfd):
    """Full from step 7 on: then a checkpoint is saved at 10, or only records are, or a step is left out."""
    settings = TINY | {"trainer__max_steps": 12, "trainer__val_check_interval": 100}
    settings |= {"checkpoint_every_n_steps": 5 if what == "checkpoint" else 6}
    settings |= {"trainer__log_every_n_steps": 100 if what == "checkpoint" else 2}
    filling = callback("tests.lm.faulty.FillDisk", step=7, file=small_disk / "filling")
    breaking = callback(BREAK, steps="[8]") if what == "faults" else []
    with pytest.raises(SystemExit) as stop:
        main([*arguments(small_disk, **settings), *filling, *breaking])
    assert stop.value.code == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("error: ")
    assert "No space left on device" in line
    assert "make room" in line
    last = run_folder(small_disk) / "checkpoints/last.ckpt"
    assert read_checkpoint(last, resumable=True)["global_step"] == (5 if what == "checkpoint" else 6)
