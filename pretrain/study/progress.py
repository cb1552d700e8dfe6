"""What a person sees while a study runs: a bar for the study, one for each run at work, a line for each that ends."""

import sys
import time

from tqdm.auto import tqdm

from pretrain.run import read_curve
from pretrain.study.grid import Run
from pretrain.study.store import DIVERGED, FINISHED, OPEN, Standing, Store

REFRESH_SECONDS = 2.0


class View:
    """Bars on a terminal, lines in a file.

    Args:
        store: where the runs lie, whose metrics.csv says how far they are.
        total_steps: optimizer steps of a run, by (size, method).
        n_runs: how many runs the study has by now, and how many of them are done.
    """

    def __init__(self, store: Store, total_steps: dict[tuple[str, str], int], n_runs: int, n_done: int) -> None:
        self.store = store
        self.total_steps = total_steps
        self.n_runs, self.n_done = n_runs, n_done
        self.hidden = not sys.stderr.isatty()
        self.whole = tqdm(
            total=n_runs, initial=n_done, desc="study", unit="run", disable=self.hidden, dynamic_ncols=True
        )
        self.bars: dict[int, tqdm] = {}
        self._refreshed = 0.0

    def say(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)

    def started(self, run: Run, slot: int, resumed: bool) -> None:
        if self.hidden:
            self.say(f"{'goes on' if resumed else 'starts'}  {run.label}")
        self.bars[slot] = tqdm(
            total=self.total_steps[run.size, run.method],
            desc=f"  {run.label}",
            unit="step",
            position=slot + 1,
            leave=False,
            disable=self.hidden,
            dynamic_ncols=True,
        )

    def refresh(self, at_work: list[tuple[int, Run]]) -> None:
        """Show how far the runs at work are."""
        for slot in self.bars.keys() - {slot for slot, _ in at_work}:
            self.bars.pop(slot).close()
        if self.hidden or time.monotonic() - self._refreshed < REFRESH_SECONDS:
            return
        self._refreshed = time.monotonic()
        for slot, run in at_work:
            folder = self.store.standing(run).folder
            rows = read_curve(folder) if folder is not None else []
            if not rows:
                continue
            bar = self.bars[slot]
            losses = {name: row[name] for row in rows for name in ("train/loss", "val/loss") if name in row}
            bar.set_postfix({name: f"{loss:.3f}" for name, loss in losses.items()}, refresh=False)
            bar.n = int(rows[-1]["step"])
            bar.refresh()

    def ended(self, run: Run, standing: Standing) -> None:
        if standing.state == FINISHED and standing.loss is not None:
            word = f"val/loss {standing.loss:.4f} after {standing.summary['seconds']:,.0f} s"
        else:
            word = {DIVERGED: "diverged", OPEN: "to be gone on with"}.get(standing.state, standing.state)
            word += f": {standing.error}" if standing.error else ""
        if standing.state != OPEN:
            self.n_done += 1
            self.whole.update()
        self.say(f"[{self.n_done}/{self.n_runs}] {run.label}  {word}")

    def close(self) -> None:
        for bar in (*self.bars.values(), self.whole):
            bar.close()
