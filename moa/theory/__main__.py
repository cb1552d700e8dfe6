"""Make the theorems visible: `python -m moa.theory`. A table on stdout, a figure, and its numbers as JSON beside it."""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moa.theory import figure, report
from moa.theory.pool import run
from moa.theory.search import Effort

FORMATS = (".png", ".svg", ".pdf")
QUICK = Effort(starts=4, scout=6, finalists=2, least_squares=25, minimax=5)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser()
    options = parser.parse_args(arguments)
    base = QUICK if options.quick else Effort()
    effort = replace(base, seed=options.seed, starts=options.starts or base.starts)
    widths = sorted(set(options.widths or ((1, 2) if options.quick else (1, 2, 4, 8))))
    check(parser, options.output)
    try:
        fits = run(widths, effort, options.processes or usable_cores())
        picture = figure.draw(fits, widths, options.output.suffix[1:])
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        sys.exit(130)
    numbers = options.output.with_suffix(".json")
    print(report.table(fits, widths))
    try:
        write(options.output, picture)
        write(numbers, (json.dumps(report.record(fits, widths, effort), indent=1) + "\n").encode())
    except OSError as error:
        parser.error(f"--output {options.output}: cannot be written: {error}")
    print(f"\nfigure: {options.output}\nnumbers: {numbers}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moa.theory",
        description="Fits networks with fixed activations, LA and MoA networks of equal width to the functions that "
        "separate them (theorems 4.1 and 4.2), and shows the networks that equal these functions. Minutes on 2 cores.",
        allow_abbrev=False,
    )
    positive: dict[str, Any] = {"type": positive_integer, "metavar": "N"}
    output = f"the figure, {', '.join(FORMATS)} (default theory.png); the numbers go beside it, as .json"
    parser.add_argument("--output", type=Path, default=Path("theory.png"), help=output)
    parser.add_argument("--seed", type=int, default=0, help="of the starts and of the points to fit (default 0)")
    parser.add_argument("--starts", **positive, help="starts of each network (default 16, quick 4)")
    parser.add_argument("--widths", **positive, nargs="+", help="hidden neurons (default 1 2 4 8, quick 1 2)")
    parser.add_argument("--processes", **positive, help="that share the work (default: one for each core)")
    parser.add_argument("--quick", action="store_true", help="a first look, with fewer starts, steps and widths")
    return parser


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def positive_integer(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def check(parser: argparse.ArgumentParser, output: Path) -> None:
    """Ends with an error now where the end of the run would."""
    if output.suffix not in FORMATS:
        parser.error(f"--output {output}: name a file that ends in {', '.join(FORMATS)}")
    if not output.parent.is_dir():
        parser.error(f"--output {output}: there is no folder {output.parent}: make it first")
    if not os.access(output.parent, os.W_OK) or output.is_dir():
        parser.error(f"--output {output}: cannot be written")
    missing = [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def write(path: Path, content: bytes) -> None:
    """A file that appears whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
