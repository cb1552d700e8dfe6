"""Time and memory of a feed-forward layer of every kind beside `swiglu`, forward and backward.

    python -m benchmarks.ffn [--kinds one-moa,bi-moa,qd-moa] [--modes eager,compiled] [--dtype bf16] [--json FILE]

Each kind has the hidden width of `moa.hidden_features`, so that all have the same parameters in their projections and
do the same multiplications. The two sides take turns; `swiglu` against itself shows how much of a ratio is noise.
"""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch

import moa
from benchmarks.arguments import (
    add_layer_arguments,
    comma_list,
    find_device,
    kind_list,
    layer_implementation,
    new_parser,
    positive,
)
from benchmarks.harness import (
    BASELINE,
    DTYPES,
    RATIO_HEAD,
    Report,
    allow_many_variants,
    alternate,
    format_ratio,
    ratio,
    spread,
)
from benchmarks.memory import in_child, peak_growth, saved_bytes
from pretrain.errors import command

MODES = ("eager", "compiled")


@dataclass(frozen=True)
class Problem:
    """What all layers of a run are given: plain data, for the process that measures memory."""

    d: int
    tokens: int
    dtype: str
    device: str
    implementation: str


class Side:
    """A layer with an input and an upstream gradient."""

    def __init__(self, kind: str, mode: str, problem: Problem) -> None:
        torch.manual_seed(0)
        factory: dict[str, Any] = {"device": problem.device, "dtype": DTYPES[problem.dtype]}
        width, implementation = moa.hidden_features(kind, problem.d), layer_implementation(kind, problem.implementation)
        self.layer = moa.build_ffn(kind, problem.d, width, implementation=implementation, **factory)
        if mode == "compiled":
            self.layer.compile()
        self.x = torch.randn(problem.tokens, problem.d, **factory, requires_grad=True)
        self.upstream = torch.randn(problem.tokens, problem.d, **factory)
        self.parameters = list(self.layer.parameters())

    def forward(self) -> torch.Tensor:
        return self.layer(self.x)

    def step(self) -> None:
        torch.autograd.grad(self.forward(), [self.x, *self.parameters], self.upstream)

    def gate_bytes(self) -> int:
        """Bytes of the gates of all tokens; 0 for a layer without gates."""
        with torch.no_grad():
            return sum(gate.numel() * gate.element_size() for gate in self.layer.gates(self.x).values())


def peak_bytes(problem: Problem, sides: list[tuple[str, str]]) -> list[int | None]:
    """Return the peak of a forward and backward pass beyond weights and input, for each (kind, mode)."""
    allow_many_variants()
    device, found = torch.device(problem.device), []
    for kind, mode in sides:
        side = Side(kind, mode, problem)
        side.step()  # compilation, and what libraries allocate once
        found.append(peak_growth(side.step, device))
    return found


def measure(kind: str, mode: str, baseline: Side, problem: Problem, rounds: int) -> dict[str, Any]:
    """Return the row of one kind, without its peak memory."""
    side = Side(kind, mode, problem)
    kept = saved_bytes(side.forward, side.parameters)
    seconds = alternate({"kind": side.step, "baseline": baseline.step}, rounds, torch.device(problem.device))
    return {
        "kind": kind,
        "mode": mode,
        "hidden_features": side.layer.hidden_features,
        "seconds": spread(seconds["kind"]),
        "baseline_seconds": spread(seconds["baseline"]),
        "ratio": ratio(seconds["kind"], seconds["baseline"]),
        "saved_bytes": kept,  # gates included
        "gate_bytes": side.gate_bytes(),
        "baseline_saved_bytes": saved_bytes(baseline.forward, baseline.parameters),
    }


def run(args: argparse.Namespace) -> Report:
    """Measure every kind in every mode, and print a line for each."""
    device = find_device(args.device)
    problem = Problem(args.d, args.tokens, args.dtype, str(device), args.implementation)
    allow_many_variants()
    with Report("ffn", args, device, args.json) as report:
        sides = [(kind, mode) for mode in args.modes for kind in dict.fromkeys([BASELINE, *args.kinds])]
        peaks: dict[tuple[str, str], int | None] = dict.fromkeys(sides)
        if args.memory:
            measured = peak_bytes(problem, sides) if device.type == "cuda" else in_child(peak_bytes, problem, sides)
            peaks = dict(zip(sides, measured, strict=True))
        print(f"{asdict(problem)}, medians of {args.rounds} rounds; memory in MB")
        print(f"{'kind':<12}{'mode':<10}{'ms':>9}{BASELINE:>9}  {RATIO_HEAD}{'peak':>8}{BASELINE:>8}", end="")
        print(f"{'saved':>8}{'gates':>8}{BASELINE:>8}")
        for mode in args.modes:
            baseline = Side(BASELINE, mode, problem)
            for kind in args.kinds:
                row = measure(kind, mode, baseline, problem, args.rounds)
                row |= {"peak_bytes": peaks[kind, mode], "baseline_peak_bytes": peaks[BASELINE, mode]}
                report.add(row)
                print(format_row(row), flush=True)
    return report


def format_row(row: dict[str, Any]) -> str:
    times = [1e3 * row[name]["median"] for name in ("seconds", "baseline_seconds")]
    sizes = ("peak_bytes", "baseline_peak_bytes", "saved_bytes", "gate_bytes", "baseline_saved_bytes")
    megabytes = ["?" if row[name] is None else f"{row[name] / 1e6:.1f}" for name in sizes]
    return (
        f"{row['kind']:<12}{row['mode']:<10}{times[0]:>9.2f}{times[1]:>9.2f}  {format_ratio(row['ratio'])}"
        + "".join(f"{number:>8}" for number in megabytes)
    )


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = new_parser("benchmarks.ffn", __doc__, rounds=7)
    parser.add_argument("--kinds", type=kind_list, default=moa.kinds(), help="kinds of moa.kinds() (default: all)")
    parser.add_argument("--d", type=positive, default=768, help="model width (default: 768)")
    parser.add_argument("--tokens", type=positive, default=4096, help="rows of the input (default: 4096)")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="of weights and input (default: fp32)")
    parser.add_argument("--modes", type=comma_list, default=list(MODES), help="eager, compiled (default: both)")
    add_layer_arguments(parser)
    chosen = parser.parse_args(args)
    unknown = [mode for mode in chosen.modes if mode not in MODES]
    if unknown:
        parser.error(f"--modes {','.join(unknown)}: give eager, compiled or both")
    return chosen


@command
def main(args: list[str] | None = None) -> None:
    run(parse(args))


if __name__ == "__main__":
    main()
