"""The parts of `benchmarks/device.sh`: one command after the other, each under a time limit of its own.

What a part leaves of its time, later ones may use besides theirs: all together take eight minutes at most. A part
writes its JSON as it goes, so what it measured before it failed or ran out of time is kept; it doesn't stop the others.
`summary.json` says how each ended, and the exit code is 1 if one of them failed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GATED = "one-moa,bi-moa,qd-moa"


@dataclass(frozen=True)
class Part:
    """A command `python -m module arguments`, or with `dry_arguments` to try the script, and its share of the time."""

    module: str
    limit: int  # seconds
    arguments: str
    dry_arguments: str


PARTS = {
    "check": Part(
        "benchmarks.check",
        110,
        "--device cuda --workers 8 --implementations triton,torch,reference",
        "--device cpu --kinds swiglu,bi-la,qd-moa --dtypes fp32 --implementations reference",
    ),
    "floor": Part(
        "benchmarks.floor",
        40,
        "--device cuda --kinds swiglu,moa,one-la,one-moa,bi-moa,qd-moa --dtypes bf16,fp32",
        "--device cpu --kinds qd-moa --tokens 8 --width 16 --copy_bytes 4096 --rounds 2",
    ),
    "ffn": Part(
        "benchmarks.ffn",
        45,
        f"--device cuda --d 1280 --tokens 32768 --dtype bf16 --kinds swiglu,{GATED} --modes compiled,eager --rounds 10",
        "--device cpu --d 16 --tokens 32 --dtype bf16 --kinds swiglu,qd-moa --modes eager --rounds 2 --no-memory",
    ),
    "dense": Part(
        "benchmarks.train_step",
        145,
        f"--device cuda --config configs/lm_0.5b.yaml --kinds {GATED} --dtype bf16 --batch fill --rounds 10 "
        "--peers none",
        "--device cpu --config configs/lm_tiny.yaml --kinds qd-moa --dtype bf16 --batch 1 --length 16 --rounds 2 "
        "--peers none --no-compile --no-memory",
    ),
    "moe": Part(
        "benchmarks.train_step",
        80,
        "--device cuda --config configs/lm_moe_0.25b.yaml --kinds one-moa,qd-moa --dtype bf16 --batch 16 --rounds 10",
        "--device cpu --config configs/lm_moe_tiny.yaml --dtype bf16 --batch 1 --length 16 --rounds 2 --no-compile "
        "--no-memory",
    ),
    "mae": Part(
        "benchmarks.train_step",
        60,
        "--device cuda --config configs/mae_vitb16.yaml --kinds qd-moa --dtype bf16 --batch 256 --rounds 10",
        "--device cpu --config configs/mae_tiny.yaml --kinds qd-moa --dtype bf16 --batch 1 --rounds 2 --no-compile "
        "--no-memory",
    ),
}


def command_of(name: str, dry: bool, output: Path) -> list[str]:
    """Return the arguments of the part's module."""
    part = PARTS[name]
    return [*(part.dry_arguments if dry else part.arguments).split(), "--json", str(output / f"{name}.json")]


def run_part(name: str, limit: float, dry: bool, output: Path) -> dict[str, Any]:
    """Run a part in processes of its own, all of which are gone after `limit` seconds; return how it ended."""
    start = time.monotonic()
    print(f"\n== {name} (at most {limit:.0f} s)", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", PARTS[name].module, *command_of(name, dry, output)], start_new_session=True
    )
    try:
        code: int | None = process.wait(limit)
        ended = "done" if code == 0 else "failed"
    except subprocess.TimeoutExpired:
        code, ended = None, "out of time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.wait()
    seconds = time.monotonic() - start
    print(f"== {name}: {ended} after {seconds:.0f} s", flush=True)
    return {"part": name, "ended": ended, "exit_code": code, "seconds": seconds}


def run_parts(names: list[str], dry: bool, output: Path) -> bool:
    """Run parts one after the other; return whether all went well."""
    summary: list[dict[str, Any]] = []
    spare = 0.0
    for name in names:
        limit = PARTS[name].limit + spare
        summary.append(run_part(name, limit, dry, output))
        spare = max(limit - summary[-1]["seconds"], 0.0)
        (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print("\n" + "   ".join(f"{row['part']}: {row['ended']}" for row in summary))
    return all(row["ended"] == "done" for row in summary)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks/device.sh", description="Check and measure on a CUDA machine.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    chosen = parser.parse_args(args)
    unknown = [name for name in chosen.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    chosen.output.mkdir(parents=True, exist_ok=True)
    sys.exit(not run_parts(chosen.parts or list(PARTS), chosen.dry, chosen.output))


if __name__ == "__main__":
    main()
