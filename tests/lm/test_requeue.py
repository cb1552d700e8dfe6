"""One and the same command line starts a run and goes on with it, whatever has ended it."""

import json
import os

import pytest

from lm.fit import main
from tests.lm.faulty import Signal
from tests.lm.runs import arguments, train
from tests.runs import assert_identical, run_folder, state_of

TINY = {"model__vocab_size": 320, "trainer__limit_val_batches": 1, "trainer__max_steps": 12}
TERMINATED = 143


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    return state_of(train(tmp_path_factory.mktemp("whole"), **TINY).folder / "checkpoints/last.ckpt")


def test_the_same_command_line_goes_on_after_a_signal_and_past_a_torn_checkpoint(undisturbed, tmp_path, capfd):
    signal = [f"--trainer.callbacks+={Signal.__module__}.Signal", "--trainer.callbacks.number=SIGUSR1"]
    command = [*arguments(tmp_path, keep_last_checkpoints=2, **TINY), "--resume=auto", *signal]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--trainer.callbacks.step=7"])
    assert stop.value.code == TERMINATED
    assert "nothing to resume below" in capfd.readouterr().out
    folder = run_folder(tmp_path)
    checkpoints = folder / "checkpoints"
    assert {path.name: state_of(path)["step"] for path in checkpoints.iterdir()} == {
        "last.ckpt": 7,
        "step_00000005.ckpt": 5,
    }
    os.truncate(checkpoints / "last.ckpt", 1000)
    main([*command, "--trainer.callbacks.step=7", "--trainer.callbacks.number=SIGCONT"])
    shown = capfd.readouterr()
    assert shown.err.count("warning: passed over: ") == 1
    assert f"going on from {checkpoints / 'step_00000005.ckpt'}" in shown.out
    assert run_folder(tmp_path) == folder  # the only one
    assert json.loads((folder / "summary.json").read_text())["exit_state"] == "finished"
    assert_identical(state_of(checkpoints / "last.ckpt"), undisturbed)


def test_another_setting_is_refused_as_in_any_resume(tmp_path, capfd):
    command = [*arguments(tmp_path, **TINY), "--resume", "auto"]
    main([*command, "--trainer.max_steps=2"])
    with pytest.raises(SystemExit) as stop:
        main([*command, "--model.optimizer.lr=0.1"])
    assert stop.value.code == 2
    assert "model.optimizer.lr was" in capfd.readouterr().err


def test_saves_go_by_the_clock(tmp_path):
    """An interval that every step exceeds saves every step; no interval saves at the end alone."""
    changes = TINY | {"trainer__max_steps": 4, "trainer__limit_val_batches": 0, "checkpoint_every_n_steps": None}
    by_clock = train(tmp_path / "a", checkpoint_every_n_minutes=1e-9, keep_last_checkpoints=10, **changes).folder
    saved = sorted(state_of(path)["step"] for path in (by_clock / "checkpoints").iterdir())
    assert saved == [1, 2, 3, 4]
    none = train(tmp_path / "b", keep_last_checkpoints=10, **changes).folder
    assert [path.name for path in (none / "checkpoints").iterdir()] == ["last.ckpt"]
