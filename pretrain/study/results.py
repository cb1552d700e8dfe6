"""What the runs of a study have left, gathered: from their folders, or from one compressed file of them all."""

import gzip
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretrain.errors import UserError
from pretrain.run import read_curve
from pretrain.study.grid import Run
from pretrain.study.store import FINISHED, Store

FORMAT = 1
RESULTS = "results.json.gz"
EVALUATION = "evaluation_tasks.json"
# What reports draw: the other columns of a metrics.csv stay where they are.
CURVES = ("step", "train/loss", "val/loss", "val/bpb", "val/relative_loss")


@dataclass
class Result:
    """What one run has left."""

    size: str
    method: str
    lr: float
    seed: int
    state: str
    error: str | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)
    downstream: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """The terminal validation loss; None if the run did not finish."""
        return self.summary.get("final", {}).get("val/loss") if self.state == FINISHED else None


class Results:
    """The results of a study, by what a study file calls them."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.all = list(results)
        self._by_name = {(r.size, r.method, f"{r.lr:g}", r.seed): r for r in self.all}

    def find(self, size: str, method: str, lr: float, seed: int) -> Result | None:
        return self._by_name.get((size, method, f"{lr:g}", seed))

    def loss_of(self, run: Run) -> float | None:
        """Return the terminal validation loss of a run; None if it has none."""
        result = self.find(run.size, run.method, run.lr, run.seed)
        return None if result is None else result.loss

    def finished(self, size: str, method: str, lr: float | None, seeds: Iterable[int]) -> list[Result]:
        """Return the finished runs among some seeds."""
        found = [self.find(size, method, lr, seed) for seed in seeds] if lr is not None else []
        return [result for result in found if result is not None and result.loss is not None]


def gather(store: Store, runs: Iterable[Run]) -> Results:
    """Return the results of runs from their folders, the runs that have left nothing included."""
    results = []
    for run in runs:
        standing = store.standing(run)
        # Where the checkpoints lay is of no use to whoever reads the results elsewhere.
        summary = {key: value for key, value in standing.summary.items() if key != "checkpoints"}
        result = Result(run.size, run.method, run.lr, run.seed, standing.state, standing.error, summary)
        if standing.folder is not None:
            # A diverged run has logged what JSON has no numbers for.
            rows = (
                {k: row[k] for k in CURVES if math.isfinite(row.get(k, math.nan))}
                for row in read_curve(standing.folder)
            )
            result.curve = [row for row in rows if len(row) > 1]
            result.downstream = _downstream(standing.folder)
        results.append(result)
    return Results(results)


def write_results(file: Path, results: Results) -> None:
    """Write all results into one file, from which the report can be made again; the same bytes for the same results."""
    text = json.dumps({"format": FORMAT, "results": [asdict(result) for result in results.all]}, allow_nan=False)
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_bytes(gzip.compress(text.encode(), mtime=0))
    unfinished.replace(file)


def read_results(file: Path) -> Results:
    """Read what `write_results` wrote.

    Raises:
        UserError: no such file, or another one.
    """
    try:
        data = json.loads(gzip.decompress(file.read_bytes()))
        if data["format"] != FORMAT:
            raise UserError(
                f"{file} has format {data['format']}, this version reads {FORMAT}: gather the results again"
            )
        return Results(Result(**result) for result in data["results"])
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} holds no results of a study ({error}): give the {RESULTS} of a report") from error


def _downstream(folder: Path) -> dict[str, float]:
    """Return accuracy by task, in percent, from what `lm.evaluate --tasks` leaves in the folder of a run."""
    file = folder / EVALUATION
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
        if found.get("table_3"):  # the paper's tasks, each with the paper's metric
            return {task: float(value) for task, value in found["table_3"].items()}
        scores = {
            task: metrics.get("acc_norm,none", metrics.get("acc,none")) for task, metrics in found["results"].items()
        }
        return {task: 100 * float(score) for task, score in scores.items() if score is not None}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}): evaluate the run again") from error
