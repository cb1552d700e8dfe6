"""How far is the mixing of activations from what memory allows? Forward and backward pass beside copying as many bytes.

    python -m benchmarks.floor [--kinds qd-moa] [--tokens 32768] [--width 3413] [--dtypes bf16] [--json FILE]

The forward pass reads y, z and the gates, and writes h. The backward pass reads them and the upstream gradient, and
writes the gradients of y, z and the gates. A copy of a large tensor takes turns with both.
"""

import argparse
import statistics
from itertools import product
from typing import Any

import torch
from torch import Tensor

import moa
from benchmarks.arguments import comma_list, dtype_list, find_device, kind_list, new_parser, positive
from benchmarks.check import build, mixing_inputs
from benchmarks.harness import DTYPES, RATIO_HEAD, Report, alternate, format_ratio, ratio, spread
from pretrain.errors import command


def floor_rows(
    kind: str, implementation: str, dtype: str, args: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Return the rows of the forward and the backward pass."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": DTYPES[dtype]}
    layer = build(kind, 16, args.width, implementation, **options)
    random_inputs = mixing_inputs(layer, (args.tokens, args.width), **options)
    inputs = {name: value.requires_grad_() for name, value in random_inputs.items()}
    weights = {name: value for name, value in inputs.items() if name in ("pi", "rho")}
    upstream = torch.randn(args.tokens, args.width, **options)
    source = torch.randn(args.copy_bytes // upstream.element_size(), **options)
    target = torch.empty_like(source)

    def forward() -> Tensor:
        return layer.mix(inputs["y"], inputs.get("z"), weights)

    h = forward()
    steps = {
        "copy": lambda: target.copy_(source),
        "forward": forward,
        "backward": lambda: torch.autograd.grad(h, list(inputs.values()), upstream, retain_graph=True),
    }
    seconds = alternate(steps, args.rounds, device)
    read = sum(value.nbytes for value in inputs.values())
    moved = {"forward": read + h.nbytes, "backward": 2 * read + h.nbytes}
    copied = [2 * source.nbytes / second for second in seconds["copy"]]  # bytes a second, each read and written
    rows = []
    for name, number in moved.items():
        floors = [number / rate for rate in copied]
        rows.append(
            {
                "kind": kind,
                "implementation": implementation,
                "dtype": dtype,
                "pass": name,
                "bytes": number,
                "copy_bytes_per_second": statistics.median(copied),
                "seconds": spread(seconds[name]),
                "floor_seconds": spread(floors),
                "ratio": ratio(seconds[name], floors),
            }
        )
    return rows


def format_row(row: dict[str, Any]) -> str:
    time, floor = (1e6 * row[name]["median"] for name in ("seconds", "floor_seconds"))
    return (
        f"{row['kind']:<12}{row['implementation']:<16}{row['dtype']:<7}{row['pass']:<10}{time:>9.1f}{floor:>9.1f}  "
        f"{format_ratio(row['ratio'])}{row['copy_bytes_per_second'] / 1e9:>9.0f}"
    )


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = new_parser("benchmarks.floor", __doc__, rounds=10)
    parser.add_argument("--kinds", type=kind_list, default=moa.kinds(), help="kinds of moa.kinds() (default: all)")
    parser.add_argument("--implementations", type=comma_list, default=["auto"], help="default: auto")
    parser.add_argument("--dtypes", type=dtype_list, default=["bf16"], help="default: bf16")
    parser.add_argument("--tokens", type=positive, default=32768, help="rows (default: 32768)")
    parser.add_argument("--width", type=positive, default=3413, help="D (default: 3413, that of the 0.5B model)")
    parser.add_argument("--copy_bytes", type=positive, default=2**29, help="size of the copy (default: 512 MiB)")
    return parser.parse_args(args)


@command
def main(args: list[str] | None = None) -> None:
    chosen = parse(args)
    device = find_device(chosen.device)
    with Report("floor", chosen, device, chosen.json) as report:
        print(f"{chosen.tokens} x {chosen.width}; microseconds; the ratio is of time to floor")
        print(f"{'kind':<12}{'implementation':<16}{'dtype':<7}{'pass':<10}{'time':>9}{'floor':>9}  ", end="")
        print(f"{RATIO_HEAD}{'copy GB/s':>9}")
        for implementation, dtype, kind in product(chosen.implementations, chosen.dtypes, chosen.kinds):
            for row in floor_rows(kind, implementation, dtype, chosen, device):
                report.add(row)
                print(format_row(row), flush=True)


if __name__ == "__main__":
    main()
