"""Run a study and report on it: `python -m pretrain.study FILE.yaml [--dry_run | --report]`."""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from pretrain.errors import UserError, command
from pretrain.study.cost import Cost, cost_table, devices, study_costs
from pretrain.study.execute import Stop, Workers, counted, slots, visible_gpus
from pretrain.study.file import KEYS, Study, read_study
from pretrain.study.grid import Run, seed_runs, select, selection_runs
from pretrain.study.progress import View
from pretrain.study.report import write_report
from pretrain.study.results import Results, gather, read_results
from pretrain.study.settings import parse_value
from pretrain.study.slurm import JOB_FILES, make_executor, submit
from pretrain.study.store import FAILED, OPEN, Store

PROG = "python -m pretrain.study"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({PROG} --help lists the options)")


def parse(args: list[str] | None) -> argparse.Namespace:
    keys = "\n".join(f"  {key:<17} {meaning}" for key, meaning in KEYS.items())
    parser = _Parser(
        prog=PROG,
        description=__doc__.split(":")[0] + "." if __doc__ else "",
        epilog=f"keys of a study file:\n{keys}\n  A value {{each: [..]}} in sizes or methods makes one of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, help="the study file")
    parser.add_argument("--dry_run", action="store_true", help="show the runs and what they take, and do nothing")
    parser.add_argument("--report", action="store_true", help="make the report from what there is, and run nothing")
    parser.add_argument("--results", type=Path, help="with --report: a results.json.gz in the place of the runs")
    parser.add_argument("--jobs", type=int, help="runs at a time, each on devices of its own (default: one a GPU)")
    parser.add_argument("--output", type=Path, default=Path("runs/studies"), help="where runs and reports go")
    parser.add_argument("--retry", action="store_true", help="try the runs again that have failed")
    parser.add_argument("--slurm", nargs="*", metavar="KEY=VALUE", help="submit to SLURM, e.g. timeout_min=720")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="settings of all runs"
    )
    chosen = parser.parse_args(args)
    if chosen.jobs is not None and chosen.jobs < 1:
        raise UserError(f"--jobs is {chosen.jobs}: it has to be at least 1")
    if chosen.results is not None and not chosen.report:
        raise UserError("--results goes with --report")
    return chosen


def pairs(words: list[str]) -> dict[str, Any]:
    """Return KEY=VALUE words as a dictionary."""
    for word in words:
        if "=" not in word:
            raise UserError(f"{word!r} has to be KEY=VALUE")
    return {key: parse_value(value) for key, value in (word.split("=", 1) for word in words)}


@command
def main(args: list[str] | None = None) -> None:
    chosen = parse(args)
    study = read_study(chosen.file, pairs(chosen.set))
    store = Store(chosen.output / study.runs, study.command)
    if chosen.report:
        report(study, store, chosen)
        return
    costs = study_costs(study, prepare=not chosen.dry_run)
    print(cost_table(study, costs), flush=True)
    if chosen.dry_run:
        return
    if chosen.retry:
        for run in known_runs(study, store):
            store.forget_failure(run)
    stop = Stop()
    with stop.listening():
        complete = queue(study, store, chosen) if chosen.slurm is not None else work(study, store, costs, stop, chosen)
    if stop.signal is not None:
        print(f"stopped: go on with `{PROG} {chosen.file}`")
        sys.exit(128 + stop.signal)
    report(study, store, chosen)
    standings = {run.key: store.standing(run) for run in known_runs(study, store)}
    if not complete:
        print(f"{counted(standings)}: start again to go on")
    if any(standing.state == FAILED for standing in standings.values()):
        print(f"{counted(standings)}: --retry tries the failed ones again", file=sys.stderr)
        sys.exit(1)


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


def work(study: Study, store: Store, costs: list[Cost], stop: Stop, chosen: argparse.Namespace) -> bool:
    """Run both stages on this machine; return whether nothing is left to do."""
    environments = slots(chosen.jobs, max(devices(point.settings) for point in study.points), visible_gpus)
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


def queue(study: Study, store: Store, chosen: argparse.Namespace) -> bool:
    """Submit what can be run by now to the cluster; return whether nothing is left to do."""
    parameters = pairs(chosen.slurm)
    executor = make_executor(store.root / JOB_FILES, parameters, parameters.pop("cluster", None))
    left = [run for run in known_runs(study, store) if store.standing(run).state == OPEN]
    if left:
        jobs, queued = submit(store, left, executor, study.keep_checkpoints)
        print(f"submitted {len(jobs)} jobs" + (f" ({jobs[0].job_id} ..)" if jobs else "") + f", {queued} were queued")
    return not left


def report(study: Study, store: Store, chosen: argparse.Namespace) -> None:
    """Write the report of what there is."""
    results: Results = read_results(chosen.results) if chosen.results else gather(store, known_runs(study, store))
    print(f"report  {write_report(study, results, chosen.output / study.name / 'report')}")


if __name__ == "__main__":
    main()
