"""The two stages of a study: runs that select the learning rates, then the seeds at the selected ones."""

import sys
from typing import Any

from pretrain.study.cost import Cost, devices
from pretrain.study.execute import Stop, Workers, slots, visible_gpus
from pretrain.study.file import Study
from pretrain.study.grid import Run, seed_runs, select, selection_runs
from pretrain.study.progress import View
from pretrain.study.slurm import JOB_FILES, make_executor, submit
from pretrain.study.store import OPEN, Store


def stages(study: Study, store: Store) -> list[list[Run]]:
    """Return the runs of the first stage and, once all of those have ended, of the second."""
    first = selection_runs(study)
    if any(store.standing(run).state == OPEN for run in first):
        return [first]
    selections = select(study, lambda run: store.standing(run).loss)
    return [first, seed_runs(study, selections)]


def known_runs(study: Study, store: Store) -> list[Run]:
    """Return every run that is known by now, each once."""
    return list({run.key: run for stage in stages(study, store) for run in stage}.values())


def work(study: Study, store: Store, costs: list[Cost], stop: Stop, jobs: int | None) -> bool:
    """Run both stages on this machine, `jobs` runs at a time; return whether nothing is left to do."""
    environments = slots(jobs, max(devices(point.settings) for point in study.points), visible_gpus)
    steps = {(cost.point.size, cost.point.method): cost.plan.total_steps for cost in costs}
    for number in range(2):
        known = known_runs(study, store)
        left = [run for run in known if store.standing(run).state == OPEN]
        if not left:
            continue
        view = View(store, steps, len(known), len(known) - len(left))
        try:
            Workers(store, environments, view, stop, study.keep_checkpoints).work(left)
        finally:
            view.close()
        if stop.signal is not None or len(stages(study, store)) == 1:
            return False
        if number == 0:
            for selection in select(study, lambda run: store.standing(run).loss).values():
                if selection.warning:
                    print(f"warning: {selection.warning}", file=sys.stderr)
    return all(store.standing(run).state != OPEN for run in known_runs(study, store))


def queue(study: Study, store: Store, parameters: dict[str, Any]) -> bool:
    """Submit what can be run by now to the cluster; return whether nothing is left to do."""
    cluster = parameters.pop("cluster", None)
    executor = make_executor(store.root / JOB_FILES, parameters, cluster)
    left = [run for run in known_runs(study, store) if store.standing(run).state == OPEN]
    if left:
        jobs, queued = submit(store, left, executor, study.keep_checkpoints)
        print(f"submitted {len(jobs)} jobs" + (f" ({jobs[0].job_id} ..)" if jobs else "") + f", {queued} were queued")
    return not left
