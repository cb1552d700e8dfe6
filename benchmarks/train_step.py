"""Time, throughput and memory of an optimizer step of a configuration, beside `swiglu` and beside other libraries.

    python -m benchmarks.train_step --config configs/lm_0.12b.yaml --kinds one-moa,bi-moa,qd-moa --batch 2 [--json FILE]

A step is forward, backward, clipping and the optimizer, on random batches that lie in memory. All sides stay in one
process, with weights and optimizer state of their own, and take turns; ratios are to `swiglu`. On a CPU the memory of
each side is measured before, in a process of its own.
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.arguments import add_layer_arguments, comma_list, find_device, new_parser, positive
from benchmarks.harness import BASELINE, RATIO_HEAD, Report, allow_many_variants, alternate, format_ratio, ratio, spread
from benchmarks.memory import in_child
from benchmarks.peers import build_peer, import_peer, peer_names
from benchmarks.sides import PRECISIONS, Setting, Side, Task
from pretrain.errors import UserError, command
from pretrain.metrics import peak_flops

FILL = 0.85  # of the device's memory; the rest is for fragments and for libraries' own work space
BATCH_MULTIPLE = 8

Memory = dict[str, int | None]


def build(name: str, task: Task) -> Side:
    """Return a side: a kind of feed-forward layer, or a peer."""
    return build_peer(name, task) if name in peer_names(task) else task.build(name)


def memory_of(name: str, setting: Setting) -> Memory:
    """Return the memory of one side, built for this alone."""
    allow_many_variants()
    return build(name, Task(setting)).memory()


def choose_sides(args: argparse.Namespace, task: Task) -> tuple[list[str], list[str]]:
    """Return the sides to measure, the baseline first, and a line for each peer that cannot be.

    Raises:
        UserError: an unknown kind or peer.
    """
    kinds = list(dict.fromkeys([BASELINE, task.configured_kind, *args.kinds]))
    for kind in kinds:
        task.module(kind)
    known, peers, notes = peer_names(task), [], []
    for peer in known if args.peers is None else args.peers:
        if peer not in known:
            raise UserError(f"--peers {peer}: {args.config} has {', '.join(known) or 'no peers'}; or give none")
        try:
            import_peer(peer)
            peers.append(peer)
        except ImportError as error:
            notes.append(f"{peer} is left out: {error}")
    return kinds + peers, notes


def choose_batch(args: argparse.Namespace, device: torch.device, n_sides: int) -> int:
    """Return `--batch`, or what fills the card.

    That is found without compilation, which would compile anew for every size, and needs less memory than it is here.

    Raises:
        UserError: asked to fill a CPU.
    """
    if args.batch != "fill":
        return args.batch
    if device.type != "cuda":
        raise UserError("--batch fill is for a CUDA device: give a number")

    def memory_at(batch: int) -> Memory:
        found = memory_of(BASELINE, new_setting(args, device, batch, compiled=False))
        gc.collect()
        torch.cuda.empty_cache()
        return found

    return filling_batch(memory_at, n_sides, torch.cuda.get_device_properties(device).total_memory)


def filling_batch(memory_at: Callable[[int], Memory], n_sides: int, capacity: int) -> int:
    """Return the batch with which `n_sides` models in one process fill the share `FILL` of a memory.

    Two small batches tell what a step needs for each sample, and besides. A multiple of 8 where there is room for one.
    """
    small, large = memory_at(2), memory_at(4)
    assert small["step"] is not None
    assert large["step"] is not None
    assert small["state"] is not None
    each = max((large["step"] - small["step"]) / 2, 1)
    besides = small["step"] - 2 * each
    batch = int((FILL * capacity - n_sides * small["state"] - besides) / each)
    return max(batch // BATCH_MULTIPLE * BATCH_MULTIPLE or batch, 1)


def new_setting(args: argparse.Namespace, device: torch.device, batch: int, compiled: bool) -> Setting:
    return Setting(args.config, batch, args.length, args.dtype, compiled, str(device), args.implementation)


def run(args: argparse.Namespace) -> Report:
    """Measure all sides, and print a line for each."""
    device = find_device(args.device)
    allow_many_variants()
    names, notes = choose_sides(args, Task(new_setting(args, device, 1, compiled=False)))
    setting = new_setting(args, device, choose_batch(args, device, len(names)), args.compile)
    with Report("train_step", args, device, args.json) as report:
        for line in notes:
            report.note(line)
        mode = "compiled" if args.compile else "eager"
        report.note(f"{args.config.name}: batch {setting.batch}, {args.dtype}, {mode}")
        memory: dict[str, Memory] = {}
        if args.memory and device.type != "cuda":
            memory = {name: in_child(memory_of, name, setting) for name in names}
        task = Task(setting)
        sides = {name: build(name, task) for name in names}
        if args.memory and device.type == "cuda":
            memory = {name: side.memory() for name, side in sides.items()}
        seconds = alternate({name: side.step for name, side in sides.items()}, args.rounds, device)
        peak = peak_flops(task.trainer)
        print(f"{'side':<14}{'ms':>9}  {RATIO_HEAD}{task.unit + '/s':>12}{'MFU':>7}{'MB':>10}{'ratio':>8}{'loss':>9}")
        for name, side in sides.items():
            row = side_row(name, side, seconds, memory, peak)
            report.add(row)
            print(format_row(row), flush=True)
    return report


def side_row(
    name: str, side: Side, seconds: dict[str, list[float]], memory: dict[str, Memory], peak: float
) -> dict[str, Any]:
    task = side.task
    rate = task.units_per_step / statistics.median(seconds[name])
    flops = task.flops_per_unit(BASELINE if name in peer_names(task) else name)
    held, baseline = (memory.get(which, {}).get("total") for which in (name, BASELINE))
    return {
        "side": name,
        "batch": task.setting.batch,
        "compiled": task.setting.compile,
        "parameters": side.n_parameters(),
        "seconds": spread(seconds[name]),
        "ratio": ratio(seconds[name], seconds[BASELINE]),
        f"{task.unit}_per_second": rate,
        "flops_per_unit": flops,
        "peak_flops": peak,
        "mfu": rate * flops / peak,
        "memory_bytes": memory.get(name),
        "memory_ratio": None if held is None or baseline is None else held / baseline,
        "loss": float(side.loss),
    }


def format_row(row: dict[str, Any]) -> str:
    rate = next(value for name, value in row.items() if name.endswith("_per_second"))
    held = (row["memory_bytes"] or {}).get("total")
    megabytes = "?" if held is None else f"{held / 1e6:.0f}"
    memory_ratio = "?" if row["memory_ratio"] is None else f"{row['memory_ratio']:.3f}"
    return (
        f"{row['side']:<14}{1e3 * row['seconds']['median']:>9.1f}  {format_ratio(row['ratio'])}{rate:>12,.1f}"
        f"{row['mfu']:>7.1%}{megabytes:>10}{memory_ratio:>8}{row['loss']:>9.4f}"
    )


def batch_size(text: str) -> int | str:
    """Argument type: a whole number above 0, or `fill`."""
    return text if text == "fill" else positive(text)


def peer_list(text: str) -> list[str]:
    """Argument type: names with commas between them, or `none`."""
    return [] if text == "none" else comma_list(text)


def parse(args: list[str] | None) -> argparse.Namespace:
    parser = new_parser("benchmarks.train_step", __doc__, rounds=7)
    parser.add_argument("--config", type=Path, required=True, help="a file of configs/")
    parser.add_argument("--kinds", type=comma_list, default=[], help="kinds to measure besides the configured one")
    parser.add_argument("--peers", type=peer_list, help="transformers,litgpt or plain; none (default: all installed)")
    parser.add_argument("--batch", type=batch_size, default=2, help="samples, or fill: what a GPU holds (default: 2)")
    parser.add_argument("--length", type=positive, default=1024, help="tokens of a sequence (default: 1024)")
    parser.add_argument("--dtype", choices=list(PRECISIONS), default="fp32", help="bf16: mixed, as bf16-mixed of a run")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile")
    add_layer_arguments(parser)
    return parser.parse_args(args)


@command
def main(args: list[str] | None = None) -> None:
    run(parse(args))


if __name__ == "__main__":
    main()
