"""The command line that the benchmarks share."""

import argparse
from pathlib import Path

import torch

import moa
from benchmarks.harness import DTYPES
from moa import fused
from pretrain.errors import UserError


def new_parser(module: str, doc: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes: `--device`, `--json` and, where time is taken, `--rounds`."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").partition("\n")[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=positive, default=rounds, help=f"turns of each side (default: {rounds})")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ..; auto (default): cuda if there is one")
    parser.add_argument("--json", type=result_file, help="file for the results")
    return parser


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every benchmark of layers in training takes: `--memory`, `--implementation`."""
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure peak memory too")
    parser.add_argument(
        "--implementation",
        choices=fused.IMPLEMENTATIONS,
        default="auto",
        help="how mixtures are computed, see moa.fused; fixed kinds have the reference alone (default: auto)",
    )


def layer_implementation(kind: str, implementation: str) -> str:
    """Return the implementation for a layer of `kind`: fixed kinds have no other than the reference."""
    return "reference" if moa.find_kind(kind).family == "fixed" else implementation


def positive(text: str) -> int:
    """Argument type: a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} has to be at least 1")
    return number


def comma_list(text: str) -> list[str]:
    """Argument type: names with commas between them, one at least."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: give names with commas between them")
    return names


def result_file(text: str) -> Path:
    """Argument type: the path of a file to write."""
    file = Path(text)
    if not file.name:
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file: give one for the results")
    return file


def kind_list(text: str) -> list[str]:
    """Argument type: kinds of feed-forward layers with commas between them."""
    names = comma_list(text)
    for name in names:
        try:
            moa.find_kind(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


def dtype_list(text: str) -> list[str]:
    """Argument type: some of `DTYPES` with commas between them."""
    names = comma_list(text)
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"unknown {name!r}; choose from {', '.join(DTYPES)}")
    return names


def find_device(name: str) -> torch.device:
    """Return the device of that name, made the current one.

    Raises:
        UserError: there is no such device here.
    """
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise UserError(f"--device {name} is no device: give cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name} cannot be measured: give cpu, cuda or cuda:N")
    if device.type == "cuda":
        n_devices = torch.cuda.device_count()
        if (device.index or 0) >= n_devices:
            raise UserError(f"--device {name}: this machine has {n_devices} CUDA devices; give --device cpu")
        torch.cuda.set_device(device.index or 0)
    return device
