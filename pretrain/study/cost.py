"""What a study will take, worked out by the command's own parts before anything runs."""

import contextlib
import importlib
import io
import tempfile
from dataclasses import dataclass
from typing import Any

import yaml

from pretrain.cli import PretrainCLI, quieten_libraries
from pretrain.errors import UserError
from pretrain.plan import Plan, accumulation_steps, make_plan
from pretrain.preflight import check_run
from pretrain.study.file import Point, Study
from pretrain.study.grid import most_seed_runs
from pretrain.study.settings import nested, override

# Samples of a source that nobody has counted: more than any run reads.
UNCOUNTED = 10**15
# Weights and the two moments of AdamW in 32 bits; Muon keeps one, so this is the most.
BYTES_PER_PARAMETER = 12
CHECKPOINTS_PER_RUN = 2  # last.ckpt and best.ckpt
# A study is planned on any machine, whatever its runs will need.
ANYWHERE = {
    "trainer.accelerator": "cpu", "trainer.devices": 1, "trainer.num_nodes": 1, "trainer.strategy": "auto",
    "trainer.precision": "32-true", "trainer.enable_progress_bar": False, "trainer.logger": False,
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """What one run of a point takes, and how many there are."""

    point: Point
    plan: Plan
    unit: str  # tokens or images
    parameters: int
    activated: int
    flops: float
    selection_runs: int
    seed_runs: int  # at most

    @property
    def units(self) -> int:
        return self.plan.total_steps * self.plan.units_per_step

    @property
    def epochs(self) -> float | None:
        """How often the run reads its source; None if nobody knows the source's size."""
        return None if self.plan.n_samples == UNCOUNTED else self.plan.epochs

    @property
    def runs(self) -> int:
        return self.selection_runs + self.seed_runs

    @property
    def checkpoint_bytes(self) -> int:
        return CHECKPOINTS_PER_RUN * BYTES_PER_PARAMETER * self.parameters


def study_costs(study: Study, prepare: bool) -> list[Cost]:
    """Check every point of a study with its command's own parser, and work out what it takes.

    Args:
        prepare: read the sources (and tokenize into the cache what is not there yet), so that everything is checked as
            a run would. Otherwise nothing is written, and the size of a source is what a prepared folder, `max_tokens`
            or the study's `samples` says.

    Raises:
        UserError: settings that no run accepts, or a budget that its source cannot fill.
    """
    quieten_libraries()
    costs = []
    for point in study.points:
        try:
            costs.append(_cost(study, point, prepare))
        except UserError as error:
            raise UserError(f"{study.name}, {point.label}: {error}") from error
    for cost in costs:
        check_budget(study, cost)
    return costs


def check_budget(study: Study, cost: Cost) -> None:
    """Raise a UserError if a run reads its source more often than the study says.

    A limit in epochs says so itself.
    """
    if cost.epochs is None or cost.plan.limit == "trainer.max_epochs":
        return
    if cost.epochs > study.epochs:
        have = cost.plan.n_samples * cost.plan.units_per_sample
        raise UserError(
            f"{study.name}, {cost.point.label}: {cost.units:,} {cost.unit} ({cost.plan.limit}) read "
            f"the source's {have:,} {cost.epochs:.2f} times, and the study allows {study.epochs:g}: set `epochs` to "
            "that number if the source may repeat, or give a larger source"
        )


def _cost(study: Study, point: Point, prepare: bool) -> Cost:
    cli = _parts(study.command, override(point.settings, ANYWHERE))
    module, data = cli.model, cli.datamodule
    if prepare:
        data.prepare_data()
        data.setup("fit")
        check_run(cli)
    else:
        module.plan = _plan_unread(cli, point)
    accumulation_steps(data.global_batch_size, data.micro_batch_size, devices(point.settings))
    counts = module.parameter_counts()
    return Cost(
        point=point,
        plan=module.plan,
        unit=module.unit,
        parameters=counts["total"],
        activated=counts["activated"],
        flops=module.flops_per_unit() * module.plan.total_steps * module.plan.units_per_step,
        selection_runs=len(point.lrs) if point.method in study.select_methods else 0,
        seed_runs=most_seed_runs(study, point),
    )


def _plan_unread(cli: PretrainCLI, point: Point) -> Plan:
    """Return the plan of a run whose source is not read now."""
    module, data = cli.model, cli.datamodule
    plan = make_plan(
        cli.trainer,
        n_samples=data.known_samples() or point.samples or UNCOUNTED,
        global_batch_size=data.global_batch_size,
        micro_batch_size=data.micro_batch_size,
        units_per_sample=data.units_per_sample,
        units_budget=module.units_budget(),
    )
    if plan.n_samples == UNCOUNTED and plan.limit == "trainer.max_epochs":
        raise UserError("the run ends by trainer.max_epochs, and the source is not at hand: say its size as `samples`")
    return plan


def devices(settings: dict[str, Any]) -> int:
    """Return how many devices a run asks for: `trainer.devices` where it is a number, else one."""
    number = settings.get("trainer.devices")
    return number * settings.get("trainer.num_nodes", 1) if isinstance(number, int) and number > 0 else 1


def _parts(command: str, settings: dict[str, Any]) -> PretrainCLI:
    """Return model, data and trainer of a run as its command builds them."""
    domain = importlib.import_module(command)
    said = io.StringIO()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config, contextlib.redirect_stderr(said):
        yaml.safe_dump(nested(settings), config, sort_keys=False)
        config.flush()
        try:
            return PretrainCLI(
                domain.MODULE_CLASS,
                domain.DATA_CLASS,
                prog=domain.PROG,
                description=domain.DESCRIPTION,
                args=["--config", config.name],
            )
        except SystemExit as error:
            raise UserError(said.getvalue().strip().removeprefix("error: ")) from error


def cost_table(study: Study, costs: list[Cost]) -> str:
    """Return the plan and what it takes as a table, one line for each size and method, and a line of totals."""
    unit = costs[0].unit
    rows = [["size", "method", "parameters", "activated", "steps", f"{unit} a run", "epochs", "FLOPs a run", "runs"]]
    for cost in costs:
        runs = f"{cost.selection_runs}" + (f" + {cost.seed_runs}" if cost.seed_runs else "")
        epochs = "?" if cost.epochs is None else f"{cost.epochs:.2f}"
        counts = (cost.parameters, cost.activated, cost.plan.total_steps, cost.units)
        words = (cost.point.size, cost.point.method, *(f"{count:,}" for count in counts))
        rows.append([*words, epochs, f"{cost.flops:.2e}", runs])
    keep = [i for i, name in enumerate(rows[0]) if name not in ("size", "activated") or _tells(rows, i, name)]
    widths = [max(len(row[i]) for row in rows) for i in keep]
    words = ("size", "method")
    lines = [
        "  ".join(
            row[i].ljust(w) if rows[0][i] in words else row[i].rjust(w) for i, w in zip(keep, widths, strict=True)
        )
        for row in rows
    ]
    return "\n".join([study.title, *lines, totals(study, costs)])


def _tells(rows: list[list[str]], column: int, name: str) -> bool:
    """Whether a column says anything: sizes have names, or some parameters are not activated."""
    return any(row[column] != (row[2] if name == "activated" else "") for row in rows[1:])


def totals(study: Study, costs: list[Cost]) -> str:
    """Return the line below the table."""
    most = " at most" if any(cost.seed_runs for cost in costs) else ""
    if study.keep_checkpoints:
        disk = f"checkpoints up to {sum(c.runs * c.checkpoint_bytes for c in costs) / 1e9:,.1f} GB"
    else:
        largest = max(cost.checkpoint_bytes for cost in costs)
        disk = f"checkpoints up to {largest / 1e6:,.0f} MB for each run at work, deleted when it has finished"
    return (
        f"{sum(c.runs for c in costs):,} runs{most}: {sum(c.runs * c.units for c in costs):,} {costs[0].unit}, "
        f"{sum(c.runs * c.flops for c in costs):.2e} FLOPs; {disk}"
    )
