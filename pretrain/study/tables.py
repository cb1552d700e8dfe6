"""The tables of a report: Markdown for readers, CSV for programs."""

import csv
import io
import math
from typing import Any

from pretrain.study.compare import Comparison, Comparisons, mode_name
from pretrain.study.results import Results
from pretrain.study.statistics import ScalingLaw


def markdown(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns are words, the others numbers."""
    rule = ["---" if column < left else "---:" for column in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def loss_table(comparisons: list[Comparison]) -> str:
    """Terminal losses, relative to the baseline: one size, one mode."""
    header = ["method", "lr", "val/loss", "relative", "95% interval", "p", "seeds", "parameters"]
    timed = any(c.time_overhead is not None for c in comparisons)
    rows = []
    for c in comparisons:
        versus = c.versus
        rows.append(
            [
                c.point.method,
                _number(c.lr, "g"),
                _with_spread(c.mean, c.spread),
                "baseline" if c.is_baseline else _with_spread(versus.mean, versus.spread, "+") if versus else "-",
                f"{versus.low:+.4f} to {versus.high:+.4f}" if versus and versus.low is not None else "",
                "" if versus is None or versus.p is None else f"{versus.p:.3f}".replace("0.000", "<0.001"),
                f"{len(c.runs)}" if len(c.runs) == c.n_seeds else f"{len(c.runs)} of {c.n_seeds}",
                _overhead(c.parameters, c.parameter_overhead, c.is_baseline),
                *(["-" if c.time_overhead is None else f"{1 + c.time_overhead:.2f}x"] if timed else []),
            ]
        )
    return markdown(header + ["time"] * timed, rows)


def rate_table(compared: Comparisons, size: str) -> str:
    """Terminal losses of the selection, by learning rate, the best in bold."""
    chosen = {method: s for (of_size, method), s in compared.selections.items() if of_size == size}
    rates = sorted({lr for selection in chosen.values() for lr in selection.losses})
    rows = []
    for method, selection in chosen.items():
        cells = []
        for lr in rates:
            loss = selection.losses.get(lr)
            text = "" if loss is None else "-" if math.isinf(loss) else f"{loss:.4f}"
            cells.append(f"**{text}**" if lr == selection.best else text)
        rows.append([method, *cells, _number(selection.best, "g")])
    return markdown(["method", *(f"{lr:g}" for lr in rates), "best"], rows)


def downstream_table(comparisons: list[Comparison]) -> str | None:
    """Accuracies of tasks in percent, mean over the runs that were evaluated; None if none was."""
    tasks = list(dict.fromkeys(task for c in comparisons for run in c.runs for task in run.downstream))
    if not tasks:
        return None
    rows = []
    for c in comparisons:
        scores = [[run.downstream[task] for run in c.runs if task in run.downstream] for task in tasks]
        rows.append([c.point.method, *(f"{sum(s) / len(s):.2f}" if s else "" for s in scores)])
    return markdown(["method", *tasks], rows)


def scaling_table(laws: dict[str, ScalingLaw]) -> str:
    """The estimates of L(N) = L0 + a (N / reference)^-b, with confidence intervals."""
    rows = []
    for method, law in laws.items():
        cells = []
        for name in ("floor", "scale", "exponent"):
            estimate = f"{getattr(law, name):.4f}"
            if law.covariance is not None:
                low, high = law.interval(name)
                estimate += f" ({low:.4f} to {high:.4f})"
            cells.append(estimate)
        rows.append([method, *cells, f"{law.reference:,.0f}"])
    return markdown(["method", "L0", "a", "b", "reference N"], rows)


def comparisons_csv(compared: Comparisons) -> str:
    """All comparisons of all modes, one a row, in full precision."""
    rows: list[dict[str, Any]] = []
    for mode, comparisons in compared.by_mode.items():
        for c in comparisons:
            versus = {"n": c.versus.n, **vars(c.versus)} if c.versus else {}
            rows.append(
                {"mode": mode_name(mode), "size": c.point.size, "method": c.point.method, "baseline": c.baseline}
                | {"lr": c.lr, "seeds": len(c.runs), "loss_mean": c.mean, "loss_spread": c.spread}
                | {f"relative_{name}": versus.get(name) for name in ("n", "mean", "spread", "low", "high", "p")}
                | {"parameters": c.parameters, "activated": c.activated}
                | {"parameter_overhead": c.parameter_overhead, "time_overhead": c.time_overhead}
            )
    return _csv(rows)


def runs_csv(results: Results) -> str:
    """Every run, one a row."""
    rows = []
    for r in results.all:
        final, best, counts = (r.summary.get(name, {}) for name in ("final", "best", "parameters"))
        rows.append(
            {"size": r.size, "method": r.method, "lr": r.lr, "seed": r.seed, "state": r.state, "error": r.error}
            | {"step": r.summary.get("step"), "total_steps": r.summary.get("total_steps")}
            | {"val/loss": final.get("val/loss"), "best val/loss": best.get("val/loss")}
            | {"val/bpb": final.get("val/bpb"), "train/loss": final.get("train/loss")}
            | {"parameters": counts.get("total"), "activated": counts.get("activated")}
            | {"seconds": r.summary.get("seconds"), "peak_memory_bytes": r.summary.get("peak_memory_bytes")}
        )
    return _csv(rows)


def _csv(rows: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _with_spread(mean: float | None, spread: float | None, sign: str = "") -> str:
    return "-" if mean is None else f"{mean:{sign}.4f}" + ("" if spread is None else f" ± {spread:.4f}")


def _overhead(parameters: int | None, overhead: float | None, is_baseline: bool) -> str:
    if parameters is None:
        return "-"
    return f"{parameters:,}" + ("" if is_baseline or overhead is None else f" ({100 * overhead:+.2f}%)")
