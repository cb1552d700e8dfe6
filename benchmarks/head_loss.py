"""Time and memory of head and cross-entropy, forward and backward: plain, in our chunks and in torch's.

    python -m benchmarks.head_loss [--tokens 8192] [--precision float32] [--json result.json]

All run in turn, and a ratio is the median of the ratios of neighbours, so that a machine that slows down slows all. The
peak is measured in a process for each: what it holds at most for the weight (V, D), its gradient, the hidden states and
the loss. `relative_error` is that of the loss against float64.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.arguments import result_file
from lm.head import cross_entropy_sum

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_TD, weight_VD).float(), targets_T, reduction="sum")


def torchs(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    device = hidden_TD.device.type
    if torch.is_autocast_enabled(device):  # which it does not heed
        dtype = torch.get_autocast_dtype(device)
        hidden_TD, weight_VD = hidden_TD.to(dtype), weight_VD.to(dtype)
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden_TD, weight_VD, targets_T, reduction="sum", options=options)


LOSSES: dict[str, Loss] = {"plain": plain, "chunked": cross_entropy_sum}
if hasattr(F, "linear_cross_entropy"):
    LOSSES["torch"] = torchs


class Problem:
    """Random hidden states (T, D), a weight (V, D) of their size and targets; a step leaves the gradients behind."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device, self.is_mixed = torch.device(args.device), args.precision == "bfloat16"
        self.hidden = torch.randn(args.tokens, args.d_model, device=self.device, requires_grad=True)
        self.weight = torch.empty(args.vocab, args.d_model, device=self.device).normal_(std=0.02).requires_grad_()
        self.targets = torch.randint(args.vocab, (args.tokens,), device=self.device)

    def step(self, loss: Loss) -> Tensor:
        self.hidden.grad = self.weight.grad = None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_mixed):
            value = loss(self.hidden, self.weight, self.targets)
        value.backward()
        return value.detach()

    def seconds(self, loss: Loss) -> float:
        self.wait()
        start = time.perf_counter()
        self.step(loss)
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.no_grad()
    def exact(self) -> float:
        chunks = zip(self.hidden.split(512), self.targets.split(512), strict=True)
        weight = self.weight.double()
        return sum(F.cross_entropy(h.double() @ weight.T, t, reduction="sum").item() for h, t in chunks)


def peak_bytes(name: str, args: argparse.Namespace) -> int:
    """Measure in this process, a fresh one, what a step adds to it at most, the weight and hidden states included."""
    if args.device == "cuda":
        problem = Problem(args)
        problem.step(LOSSES[name])
        return torch.cuda.max_memory_allocated()
    small = argparse.Namespace(**vars(args) | {"tokens": 8, "vocab": 64})
    Problem(small).step(LOSSES[name])  # what the library itself allocates once
    before = peak_resident_bytes()
    Problem(args).step(LOSSES[name])
    return peak_resident_bytes() - before


def peak_resident_bytes() -> int:
    """Return the most memory this process has held."""
    if platform.system() == "Darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not `getrusage`, which on Linux begins with the memory of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def peak_in_a_process(name: str) -> int:
    command = [sys.executable, "-m", "benchmarks.head_loss", *sys.argv[1:], "--peak_of", name]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each loss."""
    problem = Problem(args)
    exact = problem.exact()
    errors = {name: abs(problem.step(loss).item() / exact - 1) for name, loss in LOSSES.items()}  # and warmed up
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    for _ in range(args.rounds):
        for name, loss in LOSSES.items():
            seconds[name].append(problem.seconds(loss))
    return [
        {
            "loss": name,
            "tokens": args.tokens,
            "vocab": args.vocab,
            "d_model": args.d_model,
            "precision": args.precision,
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "ms": 1e3 * statistics.median(seconds[name]),
            "ratio_to_plain": statistics.median(a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)),
            "peak_megabytes": peak_in_a_process(name) / 1e6,
            "relative_error": errors[name],
            "rounds": args.rounds,
            "torch": torch.__version__,
        }
        for name in LOSSES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=50_304)
    parser.add_argument("--d_model", type=int, default=768)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="bfloat16: autocast")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=result_file, help="file for the rows")
    parser.add_argument("--peak_of", choices=LOSSES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak_of:
        print(peak_bytes(args.peak_of, args))
        return

    rows = measure(args)
    print(f"{'loss':<10}{'ms':>10}{'ratio':>8}{'peak MB':>10}{'error':>10}")
    for row in rows:
        print(
            f"{row['loss']:<10}{row['ms']:>10.1f}{row['ratio_to_plain']:>8.2f}{row['peak_megabytes']:>10.0f}"
            f"{row['relative_error']:>10.1e}"
        )
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
