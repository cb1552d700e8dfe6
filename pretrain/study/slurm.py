"""Runs of a study as jobs of a SLURM cluster, one each, through `submitit`: the queueing is the cluster's."""

import json
import os
import subprocess
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.atomic import write_atomically
from pretrain.errors import UserError
from pretrain.study.execute import command_line, verdict
from pretrain.study.grid import Run
from pretrain.study.store import FINISHED, LOG, OPEN, Standing, Store

JOB, JOB_FILES = "job.json", ".submitit"


@dataclass
class RunJob:
    """What a job does: start or resume one run. After a time limit or a pre-emption, the cluster calls it again."""

    store: Store
    run: Run
    keep_checkpoints: bool

    def __call__(self) -> str:
        lock = self.store.lock(self.run)
        if lock is None:
            return "another process works on it"
        try:
            standing = self.store.settle(self.run)
            if standing.state == OPEN:
                standing = self._train(lock)
            if standing.state == FINISHED and not self.keep_checkpoints:
                self.store.drop_checkpoints(self.run)
            return standing.state
        finally:
            os.close(lock)

    def _train(self, lock: int) -> Standing:
        line = command_line(self.store, self.run)
        with (self.store.place(self.run) / LOG).open("ab") as log:
            done = subprocess.run(
                line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[lock],
                check=False,
                # Lightning would take the cluster's variables for a training over the whole allocation.
                env={name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            )
        return verdict(self.store, self.run, done.returncode)

    def checkpoint(self) -> Any:
        """Say what to queue when the job's time is over: itself, which resumes."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


def make_executor(folder: Path, parameters: dict[str, Any], cluster: str | None = None) -> Any:
    """Return submitit's executor.

    Args:
        folder: where it keeps its own files.
        parameters: its names for what a job needs, such as timeout_min, gpus_per_node, slurm_partition.
        cluster: slurm; None: whatever it finds on this machine; local: processes here, for trying it out.

    Raises:
        UserError: submitit is not installed, or there is no cluster, or it does not know a parameter.
    """
    try:
        import submitit
    except ImportError as error:
        raise UserError("--slurm needs submitit: pip install 'moa-pretrain[slurm]'") from error
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**{"name": "study", **parameters})
    except (RuntimeError, NameError, TypeError, ValueError, AssertionError) as error:
        raise UserError(f"submitit refuses --slurm: {error}") from error
    return executor


def submit(store: Store, runs: list[Run], executor: Any, keep_checkpoints: bool) -> tuple[list[Any], int]:
    """Submit the runs that are not queued yet as one array; return the new jobs, and how many others are queued."""
    fresh = [run for run in runs if not _is_queued(store, run)]
    jobs: list[Any] = []
    with executor.batch() if fresh else nullcontext():
        for run in fresh:
            store.place(run).mkdir(parents=True, exist_ok=True)
            jobs.append(executor.submit(RunJob(store, run, keep_checkpoints)))
    for run, job in zip(fresh, jobs, strict=True):
        record = {"job_id": job.job_id, "folder": str(job.paths.folder), "cluster": executor.cluster}
        write_atomically(store.place(run) / JOB, json.dumps(record) + "\n")
    return jobs, len(runs) - len(fresh)


def _is_queued(store: Store, run: Run) -> bool:
    """Whether a job of this run waits or works, as far as the cluster knows."""
    import submitit

    file = store.place(run) / JOB
    if not file.is_file():
        return False
    record = json.loads(file.read_text())
    if record["cluster"] == "slurm":
        return not submitit.SlurmJob(folder=record["folder"], job_id=record["job_id"]).done(force_check=True)
    job: Any = submitit.LocalJob(folder=record["folder"], job_id=record["job_id"])
    return not job.paths.result_pickle.exists() and _is_alive(int(job.job_id))


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except OSError:
        return False
    return True
