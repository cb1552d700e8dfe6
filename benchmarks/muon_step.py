"""Time of one Muon step: `pretrain.optim.MuonAdamW`, which batches equal matrices, beside `torch.optim.Muon`.

The matrices are those that Muon trains in the 0.12B dense model and in the 0.25B mixture-of-experts model of the paper.
Both optimizers step in turn within one run, so that a disturbance of the machine meets both.

    python -m benchmarks.muon_step [--model dense moe] [--repeats 5] [--layers 6] [--device cuda] [--json result.json]
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

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


def measure(model: str, n_layers: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Median milliseconds of a step of both, and their ratio; the first steps, which allocate state, don't count."""
    optimizers = build(MODELS[model](n_layers), device)
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for repeat in range(repeats + 1):
        for name, (optimizer, _) in optimizers.items():
            _synchronize(device)
            start = time.perf_counter()
            optimizer.step()
            _synchronize(device)
            if repeat > 0:
                times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "model": model,
        "n_layers": n_layers,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}",
        "torch": torch.__version__,
        "repeats": repeats,
        "tensors": {name: tensors for name, (_, tensors) in optimizers.items()},
        "median_ms": medians,
        "min_ms": {name: min(values) for name, values in times.items()},
        "ratio": medians["ours"] / medians["torch"],
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Time of a Muon step, batched (ours) and one matrix at a time (torch)."
    )
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each optimizer")
    parser.add_argument("--layers", type=int, default=6, help="Transformer layers; fewer for a quick look")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()

    print(f"{'model':<8}{'ours ms':>12}{'torch ms':>12}{'ours/torch':>12}")
    results = []
    for model in args.model:
        result = measure(model, args.layers, args.repeats, torch.device(args.device))
        results.append(result)
        ours, theirs = result["median_ms"]["ours"], result["median_ms"]["torch"]
        print(f"{model:<8}{ours:>12.1f}{theirs:>12.1f}{result['ratio']:>12.2f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
