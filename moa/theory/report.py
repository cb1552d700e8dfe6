"""What the search found, as a table for people and as JSON."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from moa.theory.constructions import Construction, exact
from moa.theory.networks import GROUPS, candidates
from moa.theory.search import Effort, Fit, measure
from moa.theory.sobolev import GRID, ONE_SIDED, Distance
from moa.theory.targets import LAMBDA, TARGETS


def measured(target: int) -> list[tuple[Construction, Distance]]:
    """The exact constructions of a target, with what rounding leaves of their distance to it."""
    return [(it, measure(TARGETS[target], it.network, it.theta)) for it in exact(TARGETS[target])]


def nearest(fits: Iterable[Fit], target: int, group: str, width: int) -> Fit:
    """The nearest network of a class, which contains the narrower ones too: neurons of weight 0 make them as wide."""
    those = [it for it in fits if (it.target, it.network.group) == (target, group) and it.network.width <= width]
    return min(those, key=lambda it: it.distance.total)


def table(fits: list[Fit], widths: list[int]) -> str:
    """One block for each target: the distance of the nearest network of each class and width, and of what is exact."""
    lines = ["Distance to the target in W^{1,inf}, max |f - T| + max |grad f - grad T| on [-1, 1]^d; nearest found"]
    for index, target in enumerate(TARGETS):
        lines += ["", f"{target.formula:<30}" + "".join(f"{f'width {width}':>22}" for width in widths)]
        for group in GROUPS:
            n = sum(network.group == group for network in candidates(target, 1))
            title = f"{group}, best of {n}" if n > 1 else f"{group}, fitted"
            found = [nearest(fits, index, group, width) for width in widths]
            lines.append(f"  {title:<28}" + "".join(f"{_cell(fit, n > 1):>22}" for fit in found))
            bounds = [target.bound(group, width) for width in widths]
            if any(bounds):
                lines.append(f"  {f'  {group}, at least':<28}" + "".join(f"{bound:>22.3f}" for bound in bounds))
        lines += [f"  {construction.label}: {distance.total:.1e}" for construction, distance in measured(index)]
    return "\n".join(lines)


def _cell(fit: Fit, named: bool) -> str:
    total = fit.distance.total
    return (f"{fit.network.label} " if named else "") + (f"{total:.3f}" if total >= 1e-2 else f"{total:.1e}")


def record(fits: list[Fit], widths: list[int], effort: Effort) -> dict[str, Any]:
    """All numbers, as plain values for JSON: the same for the same arguments, machine and torch."""
    return {
        "norm": "max |f - T| + max ||grad f - grad T||_2 on a grid of [-1, 1]^d",
        "points_per_axis": {str(d): n for d, n in GRID.items()},
        "beside_kinks": ONE_SIDED,
        "lambda": LAMBDA,
        "widths": widths,
        "effort": asdict(effort),
        "torch": torch.__version__,
        "targets": [_record_target(fits, widths, index) for index in range(len(TARGETS))],
    }


def _record_target(fits: list[Fit], widths: list[int], index: int) -> dict[str, Any]:
    target = TARGETS[index]
    exact_ones = [
        {"label": it.label, "group": it.network.group, "kind": it.network.kind, "width": 1, **_numbers(distance)}
        for it, distance in measured(index)
    ]
    found = [
        {
            "label": fit.network.label,
            "group": fit.network.group,
            "width": fit.network.width,
            "closed_form": fit.closed_form,
            **_numbers(fit.distance),
        }
        for fit in fits
        if fit.target == index
    ]
    bounds = {group: [target.bound(group, width) for width in widths] for group in GROUPS}
    return {"name": target.name, "formula": target.formula, "exact": exact_ones, "found": found, "at_least": bounds}


def _numbers(distance: Distance) -> dict[str, float]:
    return {"value": distance.value, "gradient": distance.gradient, "total": distance.total}
