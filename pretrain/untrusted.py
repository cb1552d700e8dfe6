"""What a checkpoint from anybody may hold, checked before anything is made of it.

`torch.load(weights_only=True)` builds tensors and plain values only, but a tensor may claim any size, with one number
that stands for all. Nested lists and dictionaries may contain each other.
"""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

MAX_VALUES = 20_000  # of a configuration, which has some hundred
MAX_DEPTH = 50
PLAIN = (str, int, float, bool, type(None))


def check_archive(file: str | Path) -> None:
    """Raise ValueError unless the parts of a checkpoint file lie in it as they are, each in its own place."""
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
    if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
        raise ValueError("it is compressed, and could become of any size")
    if sum(part.file_size for part in parts) > os.path.getsize(file):
        raise ValueError("its parts are together larger than the file")


def check_content(checkpoint: Any) -> None:
    """Raise ValueError for tensors without their numbers, weights that are none, and settings without an end."""
    _check_tensors(checkpoint)
    if not isinstance(checkpoint, dict):
        return
    weights = checkpoint.get("state_dict", {})
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in weights.items()
    ):
        raise ValueError("its state_dict holds something else than named tensors")
    step = checkpoint.get("global_step", 0)
    if type(step) is not int or step < 0:
        raise ValueError(f"its global_step is {step!r}")
    if "config" in checkpoint:
        _check_configuration(checkpoint["config"])


def _check_tensors(content: Any) -> None:
    waiting, seen = [content], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            is_plain = value.layout == torch.strided and value.device.type == "cpu"
            if not is_plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
                raise ValueError(f"a tensor of the shape {tuple(value.shape)} has not as many numbers")
        elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value


def _check_configuration(config: Any) -> None:
    if not isinstance(config, dict) or not all(isinstance(config.get(part), dict) for part in ("model", "data")):
        raise ValueError("its configuration has no model and no data")
    waiting, visited = [(config, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        visited += 1
        if visited > MAX_VALUES or depth > MAX_DEPTH:
            raise ValueError("its configuration has no end")
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            waiting += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(child, depth + 1) for child in value]
        elif not isinstance(value, PLAIN):
            raise ValueError(f"its configuration holds a {type(value).__name__}")
