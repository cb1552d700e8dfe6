"""Time of one Muon step: `pretrain.optim.MuonAdamW`, which batches equal matrices, beside `torch.optim.Muon`.

The matrices are those that Muon trains in the 0.12B dense model and in the 0.25B mixture-of-experts model of the paper.

    python -m benchmarks.muon_step [--model dense moe] [--layers 6] [--json FILE]
"""

from typing import Any

import torch
from torch.nn import Parameter

from benchmarks.arguments import find_device, new_parser, positive
from benchmarks.harness import RATIO_HEAD, Report, alternate, format_ratio, ratio, spread
from pretrain.errors import command
from pretrain.optim import MuonAdamW


def dense_shapes(n_layers: int) -> list[tuple[int, ...]]:
    """Muon's matrices of the 0.12B Llama: d_model 768, SwiGLU of width 2048, 6 layers in the paper."""
    layer = [(768, 768)] * 4 + [(2048, 768)] * 2 + [(768, 2048)]
    return layer * n_layers


def moe_shapes(n_layers: int) -> list[tuple[int, ...]]:
    """Muon's matrices of the 0.25B LlamaMoE: d_model 640, 32 experts of width 426, a shared one of width 1706."""
    attention = [(640, 640)] * 4
    shared = [(1706, 640)] * 2 + [(640, 1706)]
    experts = [(32, 426, 640)] * 2 + [(32, 640, 426)]
    return (attention + shared + experts) * n_layers


MODELS = {"dense": dense_shapes, "moe": moe_shapes}


def build(shapes: list[tuple[int, ...]], device: torch.device) -> dict[str, tuple[torch.optim.Optimizer, int]]:
    """Both optimizers over equal random parameters, and how many tensors each steps."""
    generator = torch.Generator().manual_seed(0)
    ours = [Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    theirs = []
    for parameter in ours:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        for matrix, gradient in zip(_matrices(parameter.detach()), _matrices(parameter.grad), strict=True):
            theirs.append(Parameter(matrix.clone()))
            theirs[-1].grad = gradient.clone()
    group = {"params": ours, "optimizer": "muon"}
    return {
        "ours": (MuonAdamW([group], lr=1e-3), len(ours)),
        "torch": (torch.optim.Muon(theirs, lr=1e-3, adjust_lr_fn="match_rms_adamw"), len(theirs)),
    }


def _matrices(tensor: torch.Tensor) -> list[torch.Tensor]:
    """torch.optim.Muon refuses stacks: each expert's matrix becomes a parameter of its own."""
    return list(tensor.reshape(-1, *tensor.shape[-2:]))


def measure(model: str, n_layers: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the row of one model; the warm-up allocates the optimizers' state."""
    optimizers = build(MODELS[model](n_layers), device)
    seconds = alternate({name: optimizer.step for name, (optimizer, _) in optimizers.items()}, rounds, device)
    return {
        "model": model,
        "n_layers": n_layers,
        "tensors": {name: tensors for name, (_, tensors) in optimizers.items()},
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "ratio": ratio(seconds["ours"], seconds["torch"]),
    }


@command
def main(args: list[str] | None = None) -> None:
    parser = new_parser("benchmarks.muon_step", __doc__, rounds=5)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layers", type=positive, default=6, help="Transformer layers; fewer for a quick look")
    chosen = parser.parse_args(args)
    device = find_device(chosen.device)
    with Report("muon_step", chosen, device, chosen.json) as report:
        print(f"{'model':<8}{'ours ms':>12}{'torch ms':>12}  {RATIO_HEAD}")
        for model in chosen.model:
            row = measure(model, chosen.layers, chosen.rounds, device)
            report.add(row)
            ours, theirs = (1e3 * row["seconds"][name]["median"] for name in ("ours", "torch"))
            print(f"{model:<8}{ours:>12.1f}{theirs:>12.1f}  {format_ratio(row['ratio'])}")


if __name__ == "__main__":
    main()
