"""Is every implementation of the mixing right? Outputs and every gradient, beside the reference in float64.

    python -m benchmarks.check [--kinds qd-moa] [--implementations triton] [--dtypes bf16] [--device cuda] [--json FILE]

On fresh random inputs: the mixing alone, over odd sizes and strided inputs, and a whole layer. The exit code is 1 if
anything is wrong.
"""

import argparse
import math
import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

import moa
from benchmarks.arguments import comma_list, dtype_list, find_device, kind_list, layer_implementation, new_parser
from benchmarks.harness import DTYPES, Report
from pretrain.errors import command

IMPLEMENTATIONS = ("triton", "torch", "inductor", "reference")
TOLERANCES = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 4e-3}  # of |result - reference| / |reference|
SIZES = [(1, 1), (3, 7), (5, 129), (257, 1000), (2, 3, 65), (64, 3413), (0, 16), (4, 0, 8)]  # (.., D)
LAYER = (48, 131, 66)  # tokens, d, D of the whole layer

Gradients = dict[str, Tensor]


def check_one(kind: str, implementation: str, dtype: str, device: str, seed: int) -> dict[str, Any]:
    """Return a row: the relative error of each result, and whether all are within tolerance.

    The error is taken over all cases together: that of a single number, the gradient of one constant say, can be large
    where terms cancel. One wrong number in the smallest case is still far outside the tolerance of fp32.
    """
    torch.manual_seed(seed)
    squares: dict[str, list[float]] = {}
    problem = None
    try:
        for found, expected in _cases(kind, implementation, dtype, device):
            for name in expected:
                error, size = squared_error(found[name], expected[name])
                earlier = squares.get(name, [0.0, 0.0])
                squares[name] = [earlier[0] + error, earlier[1] + size]
    except Exception as error:  # one that fails must not keep the others from being checked
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
    errors = {name: math.sqrt(error / size) if size else error for name, (error, size) in squares.items()}
    return {
        "kind": kind,
        "implementation": implementation,
        "dtype": dtype,
        "seed": seed,
        "errors": errors,
        "tolerance": TOLERANCES[dtype],
        "problem": problem,
        "passed": problem is None and all(error <= TOLERANCES[dtype] for error in errors.values()),
    }


def squared_error(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """(|found - expected|^2, |expected|^2); an infinite error where a shape differs or a number is none."""
    size = float(expected.square().sum())
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return math.inf, size
    return float((found.double() - expected).square().sum()), size


def _cases(kind: str, implementation: str, dtype: str, device: str) -> Iterator[tuple[Gradients, Gradients]]:
    options: dict[str, Any] = {"device": device, "dtype": DTYPES[dtype]}
    layer = build(kind, LAYER[1], LAYER[2], implementation, **options)
    reference = build(kind, LAYER[1], LAYER[2], "reference", device=device, dtype=torch.float64)
    for size in SIZES:
        inputs = mixing_inputs(layer, size, **options)
        # The halves of one tensor, as a projection of both at once would give them.
        strided = torch.cat([inputs[name] for name in ("y", "z") if name in inputs], dim=-1)
        halves = dict(zip(("y", "z"), strided.split(size[-1], dim=-1), strict=False))
        for given in (inputs, inputs | halves):
            upstream = torch.randn(size, **options)
            exact = {name: value.double() for name, value in given.items()}
            yield mix(layer, given, upstream), mix(reference, exact, upstream.double())
    reference.load_state_dict(layer.state_dict())
    x, upstream = (torch.randn(LAYER[0], LAYER[1], **options) for _ in range(2))
    yield whole(layer, x, upstream), whole(reference, x.double(), upstream.double())


def implementations(device: torch.device) -> list[str]:
    """Return what can be checked here. Triton without a GPU needs its interpreter, TRITON_INTERPRET=1."""
    runs_triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return [name for name in IMPLEMENTATIONS if name != "triton" or runs_triton]


def build(kind: str, d: int, width: int, implementation: str, **options: Any) -> moa.FeedForward:
    """Return a layer of an implementation."""
    layer = moa.build_ffn(kind, d, width, implementation=implementation, **options)
    layer.reset_parameters(std=d**-0.5)  # so that y, z and the gates' logits are of the order of 1
    return layer


def mixing_inputs(layer: moa.FeedForward, size: tuple[int, ...], **options: Any) -> Gradients:
    """Return random y, z (..., D), and weights "pi", "rho": gates (..., rows) or constants (rows,)."""
    branches = ("y",) if layer.w3 is None else ("y", "z")
    inputs = {name: torch.randn(size, **options) for name in branches}
    labels = layer.gate_labels() or dict(zip(("pi", "rho"), layer.coefficient_labels().values(), strict=False))
    lead = size[:-1] if layer.gate is not None else ()
    return inputs | {slot: torch.rand(*lead, len(names), **options) for slot, names in labels.items()}


def mix(layer: moa.FeedForward, inputs: Gradients, upstream: Tensor) -> Gradients:
    """Return the hidden activation "h", and the gradient of every input."""
    leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    weights = {name: value for name, value in leaves.items() if name in ("pi", "rho")}
    h = layer.mix(leaves["y"], leaves.get("z"), weights)
    return {"h": h.detach(), **dict(zip(leaves, torch.autograd.grad(h, list(leaves.values()), upstream), strict=True))}


def whole(layer: moa.FeedForward, x: Tensor, upstream: Tensor) -> Gradients:
    """Return the output of a layer, and the gradient of its input and of every parameter."""
    leaves = {"x": x.detach().requires_grad_(), **dict(layer.named_parameters())}
    out = layer(leaves["x"])
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def check(args: argparse.Namespace, device: torch.device, report: Report) -> bool:
    """Check everything, in `--workers` processes; return whether all is right."""
    chosen = args.implementations or implementations(device)
    tasks = [
        (kind, implementation, dtype, str(device), args.seed + number)
        for number, (implementation, dtype, kind) in enumerate(product(chosen, args.dtypes, args.kinds))
        if layer_implementation(kind, implementation) == implementation
    ]
    print(f"seed {args.seed}: {len(tasks)} combinations of kind, implementation and dtype")
    if args.workers:
        with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(check_one, *task) for task in tasks]):
                add_check(report, done.result())
    else:
        for task in tasks:
            add_check(report, check_one(*task))
    failed = sum(not row["passed"] for row in report.rows)
    print(f"{len(report.rows) - failed} right, {failed} wrong")
    return failed == 0


def add_check(report: Report, row: dict[str, Any]) -> None:
    report.add(row)
    if not row["passed"]:
        errors = "  ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
        print(f"WRONG {row['kind']} {row['implementation']} {row['dtype']}: {row['problem'] or errors}", flush=True)


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = new_parser("benchmarks.check", __doc__)
    parser.add_argument("--kinds", type=kind_list, default=moa.kinds(), help="kinds of moa.kinds() (default: all)")
    parser.add_argument("--implementations", type=comma_list, help="default: all that run here")
    parser.add_argument("--dtypes", type=dtype_list, default=list(DTYPES), help="default: fp32,bf16,fp16")
    parser.add_argument("--seed", type=int, help="of the random inputs (default: another one every time)")
    parser.add_argument("--workers", type=int, default=0, help="processes that share the work; 0 (default): this one")
    return parser.parse_args(args)


@command
def main(args: list[str] | None = None) -> None:
    chosen = parse(args)
    device = find_device(chosen.device)
    chosen.seed = random.SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    with Report("check", chosen, device, chosen.json) as report:
        passed = check(chosen, device, report)
    if not passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
