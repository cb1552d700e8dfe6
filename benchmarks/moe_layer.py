"""Time of an MoE layer's forward and backward beside a dense layer of the same active width.

    python -m benchmarks.moe_layer [--kind swiglu] [--json result.json]

The layer is that of LlamaMoE-0.25B: d = 640, 32 experts, 4 active, one shared expert. The dense layer is one
feed-forward of width 4 x 426 + 1706, the same number of multiply-adds for a token. Both run in turn, and the ratio is
the median of the ratios of neighbours, so that a machine that slows down slows both.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lm.moe import MoE, MoEConfig
from moa import FFNConfig


def measure(
    kind: str, d_model: int, n_tokens: int, rounds: int, dtype: torch.dtype, device: str, dispatches: list[str]
) -> list[dict[str, Any]]:
    """Return one row for each dispatch: median milliseconds of both layers and their median ratio."""
    torch.manual_seed(0)
    x = torch.randn(n_tokens, d_model, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn_like(x)
    mixture, ffn = MoEConfig(), FFNConfig(kind)
    experts, shared = mixture.expert(ffn, d_model), mixture.shared(ffn, d_model)
    assert shared is not None
    width = mixture.top_k * experts.width(d_model) + shared.width(d_model)
    dense = ffn.build(d_model, hidden_features=width).to(device, dtype)
    rows = []
    for dispatch in dispatches:
        layer = MoE(MoEConfig(dispatch=dispatch), ffn, d_model).to(device, dtype)  # type: ignore[arg-type]

        def moe_step(layer: nn.Module = layer) -> None:
            out, _ = layer(x)
            out.backward(upstream)

        def dense_step() -> None:
            dense(x).backward(upstream)

        seconds_moe, seconds_dense = in_turn(moe_step, dense_step, rounds, device)
        rows.append(
            {
                "kind": kind,
                "dispatch": dispatch,
                "dtype": str(dtype).removeprefix("torch."),
                "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "threads": torch.get_num_threads(),
                "d_model": d_model,
                "tokens": n_tokens,
                "dense_width": width,
                "moe_ms": 1e3 * statistics.median(seconds_moe),
                "dense_ms": 1e3 * statistics.median(seconds_dense),
                "ratio": statistics.median(a / b for a, b in zip(seconds_moe, seconds_dense, strict=True)),
                "rounds": rounds,
                "torch": torch.__version__,
            }
        )
    return rows


def in_turn(
    first: Callable[[], None], second: Callable[[], None], rounds: int, device: str
) -> tuple[list[float], list[float]]:
    """Return the seconds of each of `rounds` calls of both functions, after one call to warm up."""

    def timed(step: Callable[[], None]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first(), second()
    pairs = [(timed(first), timed(second)) for _ in range(rounds)]
    return [a for a, _ in pairs], [b for _, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", nargs="+", default=["swiglu"], help="kinds of moa.kinds()")
    parser.add_argument("--dispatch", nargs="+", default=["auto", "loop", "grouped"])
    parser.add_argument("--d_model", type=int, default=640)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []
    print(f"{'kind':<10}{'dispatch':<10}{'MoE ms':>10}{'dense ms':>10}{'ratio':>8}")
    for kind in args.kind:
        for row in measure(
            kind, args.d_model, args.tokens, args.rounds, getattr(torch, args.dtype), args.device, args.dispatch
        ):
            rows.append(row)
            print(f"{kind:<10}{row['dispatch']:<10}{row['moe_ms']:>10.1f}{row['dense_ms']:>10.1f}{row['ratio']:>8.2f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
