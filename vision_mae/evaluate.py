"""What a pre-trained encoder is worth: `python -m vision_mae.evaluate --checkpoint RUN --task knn|linear|finetune ..`.

- knn: k nearest neighbours, the protocol of `vision_mae.probes` (Wu et al. 2018; Caron et al. 2021): k = 20, cosine
  similarity, votes weighted by exp(s / 0.07). The same on raw pixels is printed beside it.
- linear: the probe of MAE (He et al. 2021, table 9): frozen encoder in evaluation mode, batch normalisation without
  scale and shift, one linear layer; random resized crops and flips, no mixup, no weight decay, 90 epochs, 10 of
  warm-up, cosine to zero. MAE uses LARS for its batch of 16,384; here it is AdamW. configs/mae_linear.yaml
- finetune: MAE's end-to-end recipe (table 8): AdamW, layer-wise lr decay, drop path, mixup, cutmix, label smoothing,
  RandAugment, random erasing, 100 epochs, 5 of warm-up, cosine to zero. configs/mae_finetune.yaml

Evaluation crops pictures in the middle. linear and finetune are runs like those of fit, with a run folder, and take all
keys of their configurations. Without --data.source the pictures of the pre-training run are used.
"""

import argparse
import json
import sys
from typing import Any

import torch

from pretrain.cli import OneLineParser, config_folder, fit, quieten_libraries
from pretrain.errors import UserError, command
from pretrain.reload import load_module
from vision_mae.classifier import ClassifierModule
from vision_mae.data.module import ImageData
from vision_mae.model import KnnPool
from vision_mae.module import MaskedAutoencoderModule, check_same_pictures
from vision_mae.probes import ProbeConfig, knn_accuracies

PROG = "python -m vision_mae.evaluate"
TASKS = ("knn", "linear", "finetune")
# What evaluation takes over from the pre-training run unless told otherwise.
INHERITED = (
    *("source", "val_source", "val_fraction", "max_bad", "mean", "std", "val_crop_ratio"),
    *("image_field", "label_field", "cache_dir"),
)


def evaluate_knn(
    checkpoint: str, data: ImageData, k: int = 20, temperature: float = 0.07, pool: KnnPool = "avg"
) -> None:
    """Print the accuracy of k nearest neighbours, on the encoder's features and on raw pixels.

    Args:
        checkpoint: Folder of a pre-training run, or one of its checkpoints.
        data: Pictures to seek neighbours in (data.source) and to classify (data.val_source), both labelled.
        k: Neighbours that vote.
        temperature: Weight of a vote: exp(cosine similarity / temperature).
        pool: token, the class token's features, avg, the mean over the patches, or patches, all of them side by side.
    """
    ProbeConfig(k=k, temperature=temperature)  # for its checks
    module, _ = load_module(MaskedAutoencoderModule, checkpoint, data_class=ImageData)
    check_same_pictures(module.config, data)
    data.prepare_data()
    data.setup("validate")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = module.model
    model.to(device)
    for name, embed in (
        ("encoder", lambda images: model.features(images, pool)),
        ("raw pixels", lambda images: images.flatten(1)),
    ):
        found = knn_accuracies(embed, data, device, k, temperature)
        print(f"{name:<12}" + "  ".join(f"{key} {value:.4f}" for key, value in found.items()))


def inherited_arguments(checkpoint: str) -> list[str]:
    """Return the options that make the data fit the pre-trained model."""
    module, run = load_module(MaskedAutoencoderModule, checkpoint, weights=False, data_class=ImageData)
    settings = {name: run["data"][name] for name in INHERITED if name in run["data"]}
    settings |= {name: getattr(module.config, name) for name in module.data_links()}
    return [
        f"--data.{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()
    ]


@command
def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint")
    parser.add_argument("--task")
    chosen, rest = parser.parse_known_args(sys.argv[1:] if args is None else args)
    if chosen.checkpoint is None or chosen.task not in TASKS:
        if "--help" in rest or "-h" in rest:
            print(__doc__)
            return
        raise UserError(f"--checkpoint and --task ({', '.join(TASKS)}) are needed ({PROG} --help says more)")
    options = inherited_arguments(chosen.checkpoint)
    if chosen.task == "knn":
        quieten_libraries()
        knn_parser = OneLineParser(prog=PROG)
        knn_parser.add_function_arguments(evaluate_knn, skip={"data"})
        knn_parser.add_class_arguments(ImageData, "data")
        settings = knn_parser.instantiate_classes(
            knn_parser.parse_args([f"--checkpoint={chosen.checkpoint}", *options, *rest])
        )
        try:
            evaluate_knn(settings.checkpoint, settings.data, settings.k, settings.temperature, settings.pool)
        except ValueError as error:
            raise UserError(str(error)) from error
        return
    options.append(f"--model.checkpoint={chosen.checkpoint}")
    recipe = config_folder() / f"mae_{chosen.task}.yaml"
    finished = fit(
        ClassifierModule, ImageData, prog=PROG, description=__doc__, demo_config=recipe, args=[*options, *rest]
    )
    if finished.trainer.is_global_zero:
        finished.print_report()


if __name__ == "__main__":
    main()
