"""The study file: what may stand in it, and the grid that it spans."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import UserError
from pretrain.study.settings import Settings, override, read_yaml, variants

COMMANDS = ("lm.fit", "vision_mae.fit")
LR = "model.optimizer.lr"
SEED = "seed_everything"
BEST, COMMON = "best", "common"
KEYS = {
    "title": "what the study shows, the headline of its report",
    "command": f"{' or '.join(COMMANDS)}",
    "config": "the configuration that all runs start from, beside the study file",
    "overrides": "{dotted key: value} for all runs",
    "sizes": "{label: {dotted key: value}}; may also hold config, lr and samples of its own",
    "methods": "{label: {dotted key: value}}, compared with each other at every size; may hold an lr of its own",
    "baseline": "the method that the others are compared with, or {baseline: [methods]}; default: the first",
    "lr": "the grid of peak learning rates",
    "select": "{seed: 0, methods: [..]}: the runs that the learning rate is selected by; default: every method",
    "then": "{seeds: [..], lr: [best, common, NUMBER]}: the runs at the selected learning rates",
    "epochs": "how often a budget may read its source; default 1",
    "samples": "training samples of a source that is not at hand when the study is planned",
    "runs": "folder of the runs, shared by studies that name the same one; default: the study's name",
    "keep_checkpoints": "false deletes those of finished runs",
    "timed": "false leaves times out of the report: the runs shared their machine",
}
OF_A_SIZE = ("config", "lr", "samples")


@dataclass(frozen=True)
class Point:
    """A size and a method: all settings but learning rate and seed."""

    size: str
    method: str
    settings: Settings
    lrs: tuple[float, ...]
    samples: int | None

    @property
    def label(self) -> str:
        return f"{self.size} {self.method}".strip()


@dataclass(frozen=True)
class Study:
    """A study file, read and checked. `points` has every method of a size in turn, in the file's order."""

    name: str
    title: str
    command: str
    points: tuple[Point, ...]
    baselines: dict[str, str]  # of every method; a baseline is its own
    select_seed: int
    select_methods: tuple[str, ...]
    then_seeds: tuple[int, ...]
    then_lrs: tuple[str | float, ...]
    epochs: float
    runs: str
    keep_checkpoints: bool
    timed: bool

    @property
    def sizes(self) -> list[str]:
        return list(dict.fromkeys(point.size for point in self.points))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(point.method for point in self.points))


def read_study(file: Path, changes: dict[str, Any] | None = None) -> Study:
    """Read a study file.

    Args:
        changes: {dotted key: value} for all runs, over everything that the file says.

    Raises:
        UserError: an unknown key, a value that makes no sense, or a file that does not exist.
    """
    text = _checked(f"{file}", read_yaml(file), KEYS)
    points = _points(file, text, changes or {})
    methods = list(dict.fromkeys(point.method for point in points))
    select = _checked(f"{file}, select", text.get("select") or {}, ("seed", "methods"))
    then = _checked(f"{file}, then", text.get("then") or {}, ("seeds", "lr"))
    study = Study(
        name=file.stem,
        title=str(text.get("title", file.stem)),
        command=str(text.get("command")),
        points=tuple(points),
        baselines=_baselines(file, text.get("baseline", methods[0]), methods),
        select_seed=_whole(file, "select.seed", select.get("seed", 0)),
        select_methods=tuple(map(str, _list(file, "select.methods", select.get("methods", methods)))),
        then_seeds=tuple(_whole(file, "then.seeds", seed) for seed in _list(file, "then.seeds", then.get("seeds", []))),
        then_lrs=tuple(_then_lr(file, lr) for lr in _list(file, "then.lr", then.get("lr", [BEST]))),
        epochs=_number(file, "epochs", text.get("epochs", 1)),
        runs=str(text.get("runs", file.stem)),
        keep_checkpoints=bool(text.get("keep_checkpoints", True)),
        timed=bool(text.get("timed", True)),
    )
    _check(file, study)
    return study


def _points(file: Path, text: dict[str, Any], changes: dict[str, Any]) -> list[Point]:
    if not text.get("methods"):
        raise UserError(f"{file} names no methods to compare: give methods: {{label: {{key: value}}}}")
    points = []
    for size, of_size in _labelled(file, "sizes", text.get("sizes", {"": {}})):
        config = of_size.get("config", text.get("config"))
        if config is None:
            raise UserError(f"{file} names no config: give the configuration that the runs start from")
        base = override({}, read_yaml(file.parent / str(config)))
        base = override(base, _mapping(file, "overrides", text.get("overrides")))
        base = override(base, {key: value for key, value in of_size.items() if key not in OF_A_SIZE})
        samples = of_size.get("samples", text.get("samples"))
        for method, of_method in _labelled(file, "methods", text["methods"]):
            grid = of_method.pop("lr", of_size.get("lr", text.get("lr")))
            settings = override(override(base, of_method), changes)
            lrs = _list(file, "lr", [settings.get(LR)] if grid is None else grid)
            points.append(
                Point(
                    size=size,
                    method=method,
                    settings=settings,
                    lrs=tuple(sorted({_number(file, "lr", lr) for lr in lrs})),
                    samples=None if samples is None else _whole(file, "samples", samples),
                )
            )
    return points


def _labelled(file: Path, what: str, entries: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the (label, changes) of `sizes` or `methods`, with `each` written out."""
    found = [
        pair
        for label, changes in _mapping(file, what, entries).items()
        for pair in variants(label, _mapping(file, f"{what}, {label}", changes))
    ]
    labels = [label for label, _ in found]
    if len(set(labels)) < len(labels):
        raise UserError(f"{file}, {what}: two are called the same")
    return found


def _checked(where: str, entries: Any, keys: Any) -> dict[str, Any]:
    if not isinstance(entries, dict):
        raise UserError(f"{where} holds {entries!r}: keys and values are needed ({', '.join(keys)})")
    for key in entries:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(keys)}"
            raise UserError(f"{where}: {key!r} is no key here: {hint}")
    return entries


def _check(file: Path, study: Study) -> None:
    if study.command not in COMMANDS:
        raise UserError(f"{file}, command: {study.command} cannot be studied, only {' and '.join(COMMANDS)}")
    _check_methods(file, "select.methods", study.select_methods, study.methods)
    if Path(study.runs).name != study.runs:
        raise UserError(f"{file}, runs: {study.runs!r} has to be the name of one folder")
    if COMMON in study.then_lrs and not set(study.baselines.values()) <= set(study.select_methods):
        raise UserError(f"{file}: the common learning rate is the baseline's best, so select.methods has to have it")
    for method in study.methods:
        if method not in study.select_methods and not study.then_seeds:
            raise UserError(f"{file}: {method} is not among select.methods, and `then` has no seeds for it")


def _baselines(file: Path, value: Any, methods: list[str]) -> dict[str, str]:
    """Return the baseline of every method; one that no group names is compared with the first baseline."""
    groups = value if isinstance(value, dict) else {str(value): []}
    groups = {baseline: _list(file, f"baseline, {baseline}", group or []) for baseline, group in groups.items()}
    _check_methods(file, "baseline", [*groups, *(method for group in groups.values() for method in group)], methods)
    found = dict.fromkeys(methods, next(iter(groups)))
    for baseline, group in groups.items():
        found |= dict.fromkeys([baseline, *group], baseline)
    return found


def _check_methods(file: Path, what: str, named: Any, methods: list[str]) -> None:
    for method in named:
        if method not in methods:
            raise UserError(f"{file}, {what}: {method!r} is none of the methods {', '.join(methods)}")


def _then_lr(file: Path, value: Any) -> str | float:
    return value if value in (BEST, COMMON) else _number(file, "then.lr", value)


def _list(file: Path, what: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{file}, {what}: {value!r} has to be a list")
    return value


def _mapping(file: Path, what: str, value: Any) -> dict[str, Any]:
    """Return keys and values; an empty place has none."""
    if not isinstance(value, dict | None):
        raise UserError(f"{file}, {what}: {value!r} has to be keys and values")
    return value or {}


def _number(file: Path, what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UserError(f"{file}, {what}: {value!r} has to be a number above 0")
    return float(value)


def _whole(file: Path, what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{file}, {what}: {value!r} has to be a whole number, 0 or more")
    return value
