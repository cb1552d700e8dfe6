"""The settings of a run as one flat dictionary of dotted keys: read, overridden, known by a hash."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pretrain.errors import UserError
from pretrain.preflight import flat
from pretrain.yaml_file import check_yaml

EACH = "each"  # the key that makes a value an axis: `{each: [..]}`
# Where a run lies and how it is told apart: they decide nothing that it computes.
OF_THE_RUN_FOLDER = ("name", "runs_dir", "resume")
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

Settings = dict[str, Any]


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the content of a YAML file whose keys are all different.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    check_yaml(file)
    return _with_exponents(yaml.safe_load(file.read_text(encoding="utf-8")))


def parse_value(text: str) -> Any:
    """Return the value that a word of the command line stands for, as in YAML."""
    try:
        return _with_exponents(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise UserError(f"{text!r} is no YAML value") from error


def _with_exponents(value: Any) -> Any:
    """Read 1e-3 as a number, which YAML 1.1 takes for a word."""
    if isinstance(value, dict):
        return {str(key): _with_exponents(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_with_exponents(child) for child in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def override(settings: Settings, changes: dict[str, Any]) -> Settings:
    """Return flat settings with others in their place; a key also replaces all below it, and null above it."""
    changed = dict(settings)
    for key, value in (flat(changes) if changes else {}).items():
        parts = key.split(".")
        above = {".".join(parts[:n]) for n in range(1, len(parts))}
        changed = {k: v for k, v in changed.items() if k not in above and not k.startswith(f"{key}.")}
        changed[key] = value
    return changed


def nested(settings: Settings) -> dict[str, Any]:
    """Undo `flat`."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *path, last = key.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def variants(label: str, changes: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (label, changes) once for every combination of values that stand in `{each: [..]}`.

    Raises:
        UserError: `each` without a list of values.
    """
    axes = {key: value[EACH] for key, value in changes.items() if isinstance(value, dict) and EACH in value}
    for key, values in axes.items():
        if not isinstance(values, list) or not values or changes[key].keys() != {EACH}:
            raise UserError(f"{label}, {key}: `each` stands alone, with a list of values")
    for chosen in itertools.product(*axes.values()):
        words = ("+".join(map(str, v)) if isinstance(v, list) else str(v) for v in chosen)
        yield " ".join([label, *words]), changes | dict(zip(axes, chosen, strict=True))


def fingerprint(command: str, settings: Settings) -> str:
    """Return what a run is known by: a hash of all that decides what it computes."""
    deciding = {key: value for key, value in settings.items() if key not in OF_THE_RUN_FOLDER}
    text = json.dumps([command, deciding], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]
