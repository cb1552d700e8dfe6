"""A study on a cluster: one job for each run, through submitit, here on its local executor."""

import builtins
import os
import subprocess
from pathlib import Path

import pytest

from pretrain.errors import UserError
from pretrain.study.slurm import RunJob, make_executor, submit
from tests.pretrain.test_study_run import fake_run, store, visits  # noqa: F401


def test_without_submitit_the_way_to_it_is_told(tmp_path, monkeypatch):
    def without(name, *args, **kwargs):
        if name == "submitit":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'moa-pretrain\[slurm\]'"):
        make_executor(tmp_path, {})


def test_runs_become_jobs_and_none_is_queued_twice(store, tmp_path):  # noqa: F811
    pytest.importorskip("submitit")
    runs = [fake_run(0, steps=20), fake_run(1, end="fail")]
    executor = make_executor(tmp_path / "jobs", {"timeout_min": 30}, "local")
    jobs, queued = submit(store, runs, executor, keep_checkpoints=False)
    assert (len(jobs), queued) == (2, 0)
    assert submit(store, runs[:1], executor, keep_checkpoints=False) == ([], 1)
    assert [job.result() for job in jobs] == ["finished", "failed"]
    assert visits(store, runs[0]) == list(range(1, 21))
    assert not (store.place(runs[0]) / "TIME" / "checkpoints").exists()


def test_a_parameter_that_submitit_does_not_know_is_refused(tmp_path):
    pytest.importorskip("submitit")
    with pytest.raises(UserError, match="gpu_count"):
        make_executor(tmp_path, {"gpu_count": 1}, "local")


def test_a_job_leaves_a_run_to_whoever_works_on_it(store):  # noqa: F811
    run = fake_run()
    lock = store.lock(run)
    assert RunJob(store, run, True)() == "another process works on it"
    os.close(lock)
    assert RunJob(store, run, True)() == "finished"
    assert RunJob(store, run, True)() == "finished"
    assert visits(store, run) == [1, 2]


def test_the_batch_file_for_training_is_a_shell_script():
    subprocess.run(["bash", "-n", Path(__file__).parents[2] / "configs/slurm/train.sbatch"], check=True)
