"""What every benchmark shares: sides that take turns, ratios with their spread, and a record of where they ran.

A ratio of two times means something only if both were taken under the same conditions. So all sides of a comparison
live in one process and take turns, round after round, and a ratio is formed within each round. Its median over the
rounds is reported with two pairs of numbers: the quartiles tell how much single rounds differ, the 95% confidence
interval how well the median is known.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tqdm.auto import tqdm

from pretrain.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PACKAGES = ("torch", "triton", "numpy", "lightning", "timm", "transformers", "litgpt")
BASELINE = "swiglu"  # the kind that every other is measured against
WARM_UP = 2  # calls of each side before the first round: compilation, allocators, optimizer state
SHORTEST_MEASUREMENT = 0.02  # seconds; on a GPU a shorter step is called several times in each measurement
MOST_CALLS = 100
RATIO_HEAD = f"{'ratio (95% interval) [quartiles]':<40}"  # of a column of `format_ratio`
COMPILED_VARIANTS = 64  # of one function; every kind of layer runs through the same `forward`

Step = Callable[[], object]


# ---------------------------------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------------------------------


def alternate(
    sides: Mapping[str, Step], rounds: int, device: torch.device, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Return the seconds of one call of each side, in each of `rounds` rounds in which every side has its turn.

    The order within a round is turned round each time, so that a machine that slows down slows no side more.
    """
    for step in sides.values():
        for _ in range(warm_up):
            step()
    calls = max(_calls_per_measurement(step, device) for step in sides.values())
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in tqdm(range(rounds), desc=", ".join(sides), unit="round", disable=None, leave=False):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            seconds[name].append(seconds_of(sides[name], calls, device))
    return seconds


def seconds_of(step: Step, calls: int, device: torch.device) -> float:
    """Return the seconds of one of `calls` calls: by CUDA events on a GPU, by the clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - start) / calls
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    first.record()
    for _ in range(calls):
        step()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3 / calls


def _calls_per_measurement(step: Step, device: torch.device) -> int:
    if device.type != "cuda":  # the clock is exact enough for one call of anything measured here
        return 1
    return min(MOST_CALLS, math.ceil(SHORTEST_MEASUREMENT / max(seconds_of(step, 1, device), 1e-9)))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return {"median", "iqr": [lower quartile, upper quartile], "ci95": see `median_interval`, "rounds"}."""
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    median, interval = statistics.median(values), median_interval(values)
    return {"median": median, "iqr": [lower, upper], "ci95": interval, "rounds": len(values)}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> list[float] | None:
    """Return the k-th smallest and k-th largest value, k as large as keeps the true median between them so probably.

    Of any distribution: the median lies below the k-th smallest of n independent values if fewer than k lie below it,
    and each does so with probability 1/2. None for values too few to tell: at 95%, below six. Not scipy's
    `quantile_test`, which gives the same: `device.sh` asks for no scipy.
    """
    n, ordered = len(values), sorted(values)
    fewer_than = accumulate(math.comb(n, below) / 2**n for below in range(n))  # 1, 2, 3 .. of them
    k = sum(2 * probability <= 1 - confidence for probability in fewer_than)
    return [ordered[k - 1], ordered[n - k]] if k else None


def ratio(seconds: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Return the `spread` of the ratio within each round."""
    return spread([a / b for a, b in zip(seconds, baseline, strict=True)])


def format_ratio(found: dict[str, Any]) -> str:
    """Return the median, its confidence interval, and [quartiles]: "1.012 (1.004 to 1.020) [0.995, 1.031]"."""
    (low, high), interval = found["iqr"], found["ci95"]
    known = "" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})"
    return f"{found['median']:.3f}{known} [{low:.3f}, {high:.3f}]".ljust(len(RATIO_HEAD))


def allow_many_variants() -> None:
    """Let torch.compile keep a variant of each kind; by default it gives up after eight of one function."""
    torch._dynamo.config.recompile_limit = max(COMPILED_VARIANTS, torch._dynamo.config.recompile_limit)


# ---------------------------------------------------------------------------------------------------------------------
# The record
# ---------------------------------------------------------------------------------------------------------------------


def environment(device: torch.device) -> dict[str, Any]:
    """Return what a result depends on beside its arguments: hardware, versions, and how busy the machine was."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "device_memory": torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **_package_versions()},
        "commit": _commit(),
    }


def _package_versions() -> dict[str, str | None]:
    def find(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: find(package) for package in PACKAGES}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def warn_if_busy() -> None:
    """Say so on stderr if other processes are at work: they make times longer and ratios less certain."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > max(0.5, 0.1 * cores):
        print(f"the machine is busy (load {load:.1f} on {cores} cores): measure when it is quiet", file=sys.stderr)


class Report:
    """The results of one benchmark, in a JSON file that is whole after every row, so that a time limit loses nothing.

    {"benchmark", "arguments", "environment", "rows": [..], "notes": [..], "complete"}; `complete` is true once the
    `with` block has ended without an error.

    Args:
        benchmark: its name.
        arguments: those of the command line.
        file: where to write; None: nowhere.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, benchmark: str, arguments: argparse.Namespace, device: torch.device, file: Path | None) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._head = {
            "benchmark": benchmark,
            "arguments": vars(arguments),
            "environment": environment(device),
        }

    def __enter__(self) -> "Report":
        warn_if_busy()
        self._write(complete=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._write(complete=True)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self._write(complete=False)

    def note(self, line: str) -> None:
        """Keep, and print, what a reader of the numbers has to know."""
        print(line)
        self.notes.append(line)

    def _write(self, complete: bool) -> None:
        if self.file is None:
            return
        content = {**self._head, "rows": self.rows, "notes": self.notes, "complete": complete}
        unfinished = self.file.with_name(self.file.name + ".tmp")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(_plain(content), indent=2) + "\n")
            os.replace(unfinished, self.file)
        except OSError as error:
            raise UserError(f"--json {self.file} cannot be written: {error.strerror}") from error


def _plain(value: Any) -> Any:
    """Return nested data with text for paths, and null for what is no number."""
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
