"""The runs of a study as processes: some at a time, stopped and killed at any moment, each done once."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from lm.fit import run as fit
from pretrain.cli import config_folder
from pretrain.errors import UserError
from pretrain.study.__main__ import main
from pretrain.study.execute import Stop, Workers, slots
from pretrain.study.file import read_study
from pretrain.study.grid import Run, selection_runs
from pretrain.study.progress import View
from pretrain.study.settings import fingerprint
from pretrain.study.store import Store
from tests.lm.runs import SMALL
from tests.runs import COMMON, logged

FAKE = "tests.pretrain.fake_fit"
ROOT = Path(__file__).parent.parent.parent


def fake_run(number: int = 0, lr: float = 1e-3, **fake) -> Run:
    settings = {"seed_everything": number, "model.optimizer.lr": lr}
    settings |= {f"fake.{name}": value for name, value in ({"steps": 2} | fake).items()}
    return Run("", "moa", lr, number, settings, fingerprint(FAKE, settings))


@pytest.fixture
def store(tmp_path, monkeypatch) -> Store:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return Store(tmp_path / "runs", FAKE)


def work(store: Store, runs: list[Run], jobs: int = 2, stop: Stop | None = None, keep: bool = True) -> None:
    stop, view = stop or Stop(), View(store, {("", "moa"): 2}, len(runs), 0)
    with stop.listening():
        Workers(store, [{"SLOT": str(slot)} for slot in range(jobs)], view, stop, keep).work(runs)
    view.close()


def kill_once_at_work(store: Store, runs: list[Run], *numbers: int) -> None:
    """Send signals to this process, half a second apart, when all of some runs have taken a step."""

    def wait_and_kill() -> None:
        while not all((store.place(run) / "TIME" / "visits.txt").is_file() for run in runs):
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    threading.Thread(target=wait_and_kill, daemon=True).start()


def visits(store: Store, run: Run) -> list[int]:
    """Return the steps that a run has taken, in all its lives."""
    return [int(line) for line in (store.place(run) / "TIME" / "visits.txt").read_text().split()]


def test_a_failed_and_a_diverged_run_are_recorded_and_the_rest_goes_on(store, capsys):
    runs = [fake_run(0, end="fail"), fake_run(1, end="diverge"), fake_run(2), fake_run(3)]
    work(store, runs)
    standings = [store.standing(run) for run in runs]
    assert [s.state for s in standings] == ["failed", "diverged", "finished", "finished"]
    assert standings[0].error == "the disk is full"
    assert standings[1].error == "DivergedError: the loss is nan"
    assert standings[2].loss == pytest.approx(3.102)
    assert "[4/4]" in capsys.readouterr().err
    work(store, runs)  # none of them is done again
    assert [visits(store, run) for run in runs] == [[1, 2]] * 4


def test_a_failed_run_is_tried_again_only_when_asked(store):
    run = fake_run(end="fail")
    work(store, [run])
    store.forget_failure(run)
    assert store.standing(run).state == "open"


def test_a_run_that_another_process_works_on_is_waited_for(store):
    """As after a kill of the study alone, whose runs go on."""
    run = fake_run(steps=10)
    lock = store.lock(run)
    line = [sys.executable, "-m", FAKE, *store.arguments(run)]
    orphan = subprocess.Popen(line, pass_fds=[lock])
    os.close(lock)
    work(store, [run])
    assert orphan.wait() == 0
    assert store.standing(run).state == "finished"
    assert visits(store, run) == list(range(1, 11))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on_once_and_the_next_start_goes_on(store, number):
    runs, stop = [fake_run(seed, steps=40) for seed in range(3)], Stop()
    kill_once_at_work(store, runs[:2], number)
    work(store, runs, stop=stop)
    assert stop.signal == number
    assert [store.standing(run).state for run in runs] == ["open"] * 3
    assert json.loads((store.place(runs[0]) / "TIME" / "summary.json").read_text())["exit_state"] == "interrupted"
    assert not store.place(runs[2]).exists()  # it had not started
    work(store, runs, jobs=3)
    assert [store.standing(run).state for run in runs] == ["finished"] * 3
    assert visits(store, runs[0]) == list(range(1, 41))


def test_a_second_stop_ends_runs_that_do_not_listen(store):
    run, stop = fake_run(deaf=True, steps=1000), Stop()
    kill_once_at_work(store, [run], signal.SIGTERM, signal.SIGTERM)
    work(store, [run], stop=stop)
    assert store.standing(run).state == "open"


def test_a_run_without_a_checkpoint_starts_anew_and_leaves_no_rest(store):
    run = fake_run()
    rest = store.place(run) / "EARLIER"
    rest.mkdir(parents=True)
    (rest / "summary.json").write_text('{"exit_state": "running"}')
    work(store, [run])
    assert not rest.exists()
    assert store.standing(run).state == "finished"


def test_checkpoints_of_finished_runs_go_where_they_are_not_kept(store):
    runs = [fake_run(0), fake_run(1, end="fail")]
    work(store, runs, keep=False)
    assert [(store.place(run) / "TIME" / "checkpoints").exists() for run in runs] == [False, True]


def test_each_slot_has_devices_and_threads_of_its_own(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    environments = slots(None, 2, lambda: ["0", "1", "2", "5"])
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["0,1", "2,5"]
    assert slots(4, 1, list) == [{"OMP_NUM_THREADS": "2"}] * 4
    assert len(slots(None, 1, list)) == 1
    with pytest.raises(UserError, match=r"3 jobs of 2 device.* need 6 GPUs, and there are 4: give --jobs 2"):
        slots(3, 2, lambda: ["0", "1", "2", "5"])


# One real study, killed.


def write_study(folder: Path) -> Path:
    settings = {name: value for name, value in (COMMON | SMALL).items() if name != "name"}
    changes = {"trainer.max_steps": 60, "trainer.val_check_interval": 20, "checkpoint_every_n_steps": 5}
    study = {
        "command": "lm.fit",
        "config": str(config_folder() / "lm_tiny.yaml"),
        "overrides": settings | changes,
        "methods": {"swiglu": {"model.ffn.kind": "swiglu"}, "moa": {"model.ffn.kind": "moa"}},
        "lr": [1e-2, 1e30],
    }
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(study))
    return file


def table(report: Path) -> list[dict[str, str]]:
    """Return the rows of comparisons.csv without the time, which no two runs share."""
    with (report / "comparisons.csv").open() as file:
        return [{k: v for k, v in row.items() if k != "time_overhead"} for row in csv.DictReader(file)]


def kill_all(study: subprocess.Popen) -> None:
    """Kill the study and every run at work, without a warning."""
    children = Path(f"/proc/{study.pid}/task/{study.pid}/children").read_text().split()
    study.kill()
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    study.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the runs to kill in Linux' /proc")
def test_a_study_killed_in_the_middle_ends_with_the_table_of_one_that_ran_through(tmp_path, capsys):
    file = write_study(tmp_path)
    line = [sys.executable, "-m", "pretrain.study", str(file), "--jobs", "2", "--output", str(tmp_path / "killed")]
    study = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not (saved := list(tmp_path.glob("killed/study/*/*/checkpoints/last.ckpt"))):
        assert study.poll() is None
        time.sleep(0.02)
    kill_all(study)
    unfinished = saved[0].parent.parent
    assert json.loads((unfinished / "summary.json").read_text())["exit_state"] == "running"
    main([str(file), "--jobs", "2", "--output", str(tmp_path / "killed")])
    assert "diverged" in capsys.readouterr().err

    # The same runs without a study around them, in this process.
    whole = Store(tmp_path / "whole" / "study", "lm.fit")
    for run in selection_runs(read_study(file)):
        whole.place(run).mkdir(parents=True)
        try:
            fit([*whole.arguments(run), "--trainer.enable_progress_bar=false"])
        except UserError:
            assert run.lr == 1e30
    main([str(file), "--report", "--output", str(tmp_path / "whole")])
    assert table(tmp_path / "killed/study/report") == table(tmp_path / "whole/study/report")
    assert list(logged(unfinished)) == list(range(5, 61, 5))

    # A run that was killed between its last checkpoint and its last word gets that word, and is not done again.
    summary = json.loads((unfinished / "summary.json").read_text())
    (unfinished / "summary.json").write_text(json.dumps(summary | {"exit_state": "running", "final": {}}))
    main([str(file), "--output", str(tmp_path / "killed")])
    assert table(tmp_path / "killed/study/report") == table(tmp_path / "whole/study/report")
