"""Time of an MoE layer's forward and backward beside a dense layer of the same active width.

    python -m benchmarks.moe_layer [--kinds swiglu,qd-moa] [--dispatches loop,grouped] [--json FILE]

The layer is that of LlamaMoE-0.25B: d = 640, 32 experts, 4 active, one shared expert. The dense layer is one
feed-forward of width 4 x 426 + 1706, the same number of multiply-adds for a token.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import comma_list, find_device, kind_list, new_parser, positive
from benchmarks.harness import BASELINE, DTYPES, RATIO_HEAD, Report, alternate, format_ratio, ratio, spread
from lm.moe import MoE, MoEConfig
from moa import FFNConfig
from pretrain.errors import UserError, command


def measure(kind: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Return one row for each dispatch; they and the dense layer take turns."""
    torch.manual_seed(0)
    dtype = DTYPES[args.dtype]
    x = torch.randn(args.tokens, args.d, device=device, dtype=dtype, requires_grad=True)
    upstream = torch.randn_like(x)
    mixture, ffn = MoEConfig(), FFNConfig(kind)
    experts, shared = mixture.expert(ffn, args.d), mixture.shared(ffn, args.d)
    assert shared is not None
    width = mixture.top_k * experts.width(args.d) + shared.width(args.d)
    dense = ffn.build(args.d, hidden_features=width).to(device, dtype)

    def moe_step(dispatch: Any) -> Callable[[], None]:
        layer: nn.Module = MoE(MoEConfig(dispatch=dispatch), ffn, args.d).to(device, dtype)
        return lambda: layer(x)[0].backward(upstream)

    sides = {dispatch: moe_step(dispatch) for dispatch in args.dispatches}
    seconds = alternate({"dense": lambda: dense(x).backward(upstream), **sides}, args.rounds, device)
    return [
        {
            "kind": kind,
            "dispatch": dispatch,
            "dense_width": width,
            "seconds": spread(seconds[dispatch]),
            "dense_seconds": spread(seconds["dense"]),
            "ratio": ratio(seconds[dispatch], seconds["dense"]),
        }
        for dispatch in args.dispatches
    ]


@command
def main(args: list[str] | None = None) -> None:
    parser = new_parser("benchmarks.moe_layer", __doc__, rounds=7)
    parser.add_argument("--kinds", type=kind_list, default=[BASELINE], help="kinds of moa.kinds() (default: swiglu)")
    parser.add_argument("--dispatches", type=comma_list, default=["auto", "loop", "grouped"])
    parser.add_argument("--d", type=positive, default=640, help="model width (default: 640)")
    parser.add_argument("--tokens", type=positive, default=4096, help="rows of the input (default: 4096)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    chosen = parser.parse_args(args)
    device = find_device(chosen.device)
    with Report("moe_layer", chosen, device, chosen.json) as report:
        print(f"{'kind':<10}{'dispatch':<10}{'MoE ms':>10}{'dense ms':>10}  {RATIO_HEAD}")
        for kind in chosen.kinds:
            try:
                rows = measure(kind, chosen, device)
            except ValueError as error:
                raise UserError(str(error)) from error
            for row in rows:
                report.add(row)
                times = [1e3 * row[name]["median"] for name in ("seconds", "dense_seconds")]
                print(
                    f"{kind:<10}{row['dispatch']:<10}{times[0]:>10.1f}{times[1]:>10.1f}  {format_ratio(row['ratio'])}"
                )


if __name__ == "__main__":
    main()
