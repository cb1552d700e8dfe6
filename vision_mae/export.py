"""Weights for use elsewhere: `python -m vision_mae.export --checkpoint RUN --output DIR`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import load_file, save_file
from torch import nn

from pretrain.atomic import locked, partial_folder, publish, readable_as_usual
from pretrain.cli import OneLineParser
from pretrain.errors import command
from pretrain.paths import new_output_path
from pretrain.reload import load_module
from vision_mae.data.module import ImageData
from vision_mae.encoder import ARCHITECTURES, TIMM_LAYERS, encoder_weights, timm_arguments, timm_layer, timm_names
from vision_mae.model import MAEConfig, MaskedAutoencoder, ViTFFNConfig
from vision_mae.module import MaskedAutoencoderModule

ENCODER, AUTOENCODER, CONFIG = "encoder.safetensors", "autoencoder.safetensors", "config.json"
USE = """{output}: use it with
  from vision_mae.export import load_encoder, load_autoencoder
  encoder = load_encoder("{output}")    # timm.create_model("{architecture}", mlp_layer={layer}, ..), strictly loaded
"""


def export(checkpoint: str, output: str) -> None:
    """Write encoder.safetensors, autoencoder.safetensors and config.json.

    Args:
        checkpoint: Folder of a run, or one of its checkpoints.
        output: The folder to make.
    """
    folder = new_output_path(output)
    module, run = load_module(MaskedAutoencoderModule, checkpoint, data_class=ImageData)
    model = module.model
    assert isinstance(model, MaskedAutoencoder)
    description = describe(module.config, run)
    with locked(folder), partial_folder(folder) as partial:
        new_output_path(folder)  # again: another process may have made it meanwhile
        save_file(timm_names(encoder_weights(model), module.config.ffn.kind), partial / ENCODER)
        save_file({name: value.contiguous() for name, value in model.state_dict().items()}, partial / AUTOENCODER)
        for name in (ENCODER, AUTOENCODER):
            readable_as_usual(partial / name)
        (partial / CONFIG).write_text(json.dumps(description, indent=2) + "\n")
        publish(partial, folder)
    print(USE.format(output=folder, architecture=description["architecture"], layer=description["mlp_layer"]), end="")


def describe(config: MAEConfig, run: dict[str, Any]) -> dict[str, Any]:
    """Return what has to be known beside the weights, as plain data.

    `architecture` and `arguments` are for `timm.create_model`, together with the class that `mlp_layer` names.
    """
    standard = TIMM_LAYERS.get(config.ffn.kind)
    return {
        "architecture": ARCHITECTURES.get(config.d, "vit_base_patch16_224"),
        "arguments": timm_arguments(config),
        "mlp_layer": f"timm.layers.{standard.__name__}" if standard else f"moa.timm_mlp({config.ffn.kind!r}, ..)",
        "autoencoder": asdict(config),
        "norm_pixel_loss": run["model"]["norm_pixel_loss"],
        "mean": run["data"]["mean"],  # null: ImageNet's
        "std": run["data"]["std"],
    }


def load_encoder(folder: str | Path) -> nn.Module:
    """Return an exported encoder as a timm model without a head; `reset_classifier(n)` gives it one."""
    description, config = _read(folder)
    model = timm.create_model(
        description["architecture"], **description["arguments"], mlp_layer=timm_layer(config.ffn), pretrained=False
    )
    model.load_state_dict(load_file(Path(folder) / ENCODER), strict=True)
    return model.eval()


def load_autoencoder(folder: str | Path) -> MaskedAutoencoder:
    """Return an exported autoencoder."""
    _, config = _read(folder)
    model = MaskedAutoencoder(config)
    model.load_state_dict(load_file(Path(folder) / AUTOENCODER), strict=True)
    return model.eval()


def _read(folder: str | Path) -> tuple[dict[str, Any], MAEConfig]:
    description = json.loads((Path(folder) / CONFIG).read_text())
    settings = dict(description["autoencoder"])
    return description, MAEConfig(**settings | {"ffn": ViTFFNConfig(**settings["ffn"])})


@command
def main(args: list[str] | None = None) -> None:
    parser = OneLineParser(prog="python -m vision_mae.export", description=__doc__)
    parser.add_function_arguments(export)
    settings = parser.parse_args(args)
    export(settings.checkpoint, settings.output)


if __name__ == "__main__":
    main()
