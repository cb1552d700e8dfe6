"""How the patches of a picture use the activations: `python -m vision_mae.inspect --checkpoint RUN [--image FILE]`.

The encoder sees the whole picture, unmasked, as it does in use; the decoder is left out. Patches are named (row,
column), from the upper left.
"""

from typing import Any

from PIL import Image

import moa
from pretrain import inspection
from pretrain.cli import OneLineParser, quieten_libraries
from pretrain.errors import UserError, command
from pretrain.inspection import by_gate, layer_inputs, layer_mixes
from pretrain.mix_figures import mix_figures
from pretrain.paths import user_path
from pretrain.reload import load_module
from vision_mae.data.decode import BadImage, decode_image
from vision_mae.data.module import ImageData, denormalise
from vision_mae.gate_maps import gate_maps_figure
from vision_mae.model import MAEConfig
from vision_mae.module import MaskedAutoencoderModule


def inspect(
    checkpoint: str,
    image: str | None = None,
    layers: str | None = None,
    top: int = 8,
    output: str | None = None,
) -> None:
    """Show, layer by layer, how patches mix the activations: a table and pictures.

    Args:
        checkpoint: Folder of a pre-training run, or one of its checkpoints.
        image: The picture to look at, cut as in evaluation; the first validation picture of the run when not given.
        layers: Numbers of the encoder's layers, such as 0,3; all when not given.
        top: How many patches to name at each end.
        output: The folder to make, in the place of an earlier one; when not given, `inspect` in the run's folder.
    """
    inspection.check_top(top)
    folder = inspection.output_folder(checkpoint, output)
    module, run = load_module(MaskedAutoencoderModule, checkpoint, data_class=ImageData)
    kind = module.config.ffn.kind
    inspection.check_kind(kind, moa.kinds("la", "moa"), checkpoint)
    model: Any = module.model
    found = {
        f"layer {i}": model.encoder.blocks[i].mlp for i in inspection.choose_layers(layers, module.config.depth or 0)
    }
    picture, inputs = None, {}
    if kind in moa.kinds("moa"):
        data = ImageData(**run["data"] | {name: getattr(module.config, name) for name in module.data_links()})
        picture = data.views.evaluation()(read_image(image, data))
        inputs = layer_inputs(found, lambda: model.encode(picture[None]))
    elif image is not None:
        print(f"{kind} mixes every patch alike: the picture that was given makes no difference")
    names = token_names(module.config)
    mixes = [mix for name, layer in found.items() for mix in layer_mixes(name, layer, inputs.get(name), names=names)]
    shown, figures = inspection.table(mixes, top), mix_figures(mixes, moa.ACTIVATIONS)
    if picture is not None:
        shown_picture = denormalise(picture, data.views)
        figures |= {f"patches_{gate}": gate_maps_figure(shown_picture, of) for gate, of in by_gate(mixes).items()}
    inspection.write_inspection(folder, {inspection.TABLE: f"{shown}\n"}, figures)
    print(shown)


def read_image(file: str | None, data: ImageData) -> Image.Image:
    """Return a picture from a file, or without one the first validation picture.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        if file is not None:
            if not user_path(file).is_file():
                raise UserError(f"--image {file} does not exist, or is no file")
            return decode_image(user_path(file), data.in_channels, data.patch_size)
        data.prepare_data()
        data.setup("validate")
        if data.val_rows is None:
            raise UserError("the run has no validation pictures: give --image")
        return data.dataset(data.val_rows).decode(0)[0]
    except BadImage as error:
        raise UserError(f"{f'--image {file}' if file is not None else 'the validation picture'}: {error}") from error


def token_names(config: MAEConfig) -> list[str]:
    """Return what the encoder's tokens are called: the class token, then the patches."""
    side = config.image_size // config.patch_size
    return ["class", *(f"({row},{column})" for row in range(side) for column in range(side))]


@command
def main(args: list[str] | None = None) -> None:
    quieten_libraries()
    parser = OneLineParser(prog="python -m vision_mae.inspect", description=__doc__)
    parser.add_function_arguments(inspect)
    inspect(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    main()
