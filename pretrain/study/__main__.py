"""Run a study and report on it: `python -m pretrain.study FILE.yaml [--dry_run | --report]`."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

from pretrain.errors import UserError, command
from pretrain.study.cost import cost_table, study_costs
from pretrain.study.execute import Stop, counted
from pretrain.study.file import KEYS, Study, read_study
from pretrain.study.report import write_report
from pretrain.study.results import RESULTS, gather, read_results, write_results
from pretrain.study.settings import parse_value
from pretrain.study.stages import known_runs, queue, work
from pretrain.study.store import FAILED, Store

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
    parser.add_argument("--report_dir", type=Path, help="where the report goes (default: NAME/report in --output)")
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
        complete = (
            work(study, store, costs, stop, chosen.jobs)
            if chosen.slurm is None
            else queue(study, store, pairs(chosen.slurm))
        )
    if stop.signal is not None:
        print(f"stopped: go on with `{PROG} {shlex.join(sys.argv[1:] if args is None else args)}`")
        sys.exit(128 + stop.signal)
    report(study, store, chosen)
    standings = {run.key: store.standing(run) for run in known_runs(study, store)}
    if not complete:
        print(f"{counted(standings)}: start again to go on")
    if any(standing.state == FAILED for standing in standings.values()):
        print(f"{counted(standings)}: --retry tries the failed ones again", file=sys.stderr)
        sys.exit(1)


def report(study: Study, store: Store, chosen: argparse.Namespace) -> None:
    """Write the report of what there is, and the results that it comes from unless they are a file already."""
    folder = chosen.report_dir or chosen.output / study.name / "report"
    results = read_results(chosen.results) if chosen.results else gather(store, known_runs(study, store))
    print(f"report  {write_report(study, results, folder)}")
    if not chosen.results:
        write_results(folder / RESULTS, results)


if __name__ == "__main__":
    main()
