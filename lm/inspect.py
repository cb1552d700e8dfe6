"""How the tokens of a text use the activations: `python -m lm.inspect --checkpoint RUN [--text "..."]`."""

from typing import Any

import torch

import moa
from lm.data.module import TextData
from lm.mixes import model_mixes
from lm.module import LanguageModule
from lm.passage import chosen_tokens, pieces, segments, token_names
from lm.text_figure import text_figure
from lm.text_page import text_page
from lm.tokenizers import load_tokenizer
from pretrain import inspection
from pretrain.cli import OneLineParser, quieten_libraries
from pretrain.errors import command
from pretrain.inspection import Mix, by_gate
from pretrain.mix_figures import mix_figure, mix_figures
from pretrain.reload import load_module

PAGE = "text.html"


def inspect(
    checkpoint: str,
    text: str | None = None,
    file: str | None = None,
    layers: str | None = None,
    top: int = 8,
    output: str | None = None,
) -> None:
    """Show, layer by layer, how tokens mix the activations: a table, pictures, and a page of coloured text.

    Args:
        checkpoint: Folder of a run, or one of its checkpoints.
        text: The text to look at; without it and --file, the start of the run's validation text.
        file: A file of text to look at.
        layers: Numbers of layers, such as 0,3; all when not given.
        top: How many tokens to name at each end.
        output: The folder to make, in the place of an earlier one; when not given, `inspect` in the run's folder.
    """
    inspection.check_top(top)
    folder = inspection.output_folder(checkpoint, output)
    module, run = load_module(LanguageModule, checkpoint, data_class=TextData)
    kind = module.config.ffn.kind
    inspection.check_kind(kind, moa.kinds("la", "moa"), checkpoint)
    chosen = inspection.choose_layers(layers, module.config.n_layers)
    tokenizer = load_tokenizer(run["data"]["tokenizer"])
    ids: list[int] = []
    if kind in moa.kinds("moa"):
        ids = chosen_tokens(text, file, run, tokenizer)
    elif text is not None or file is not None:
        print(f"{kind} mixes every token alike: the text that was given makes no difference")
    parts = pieces(ids, tokenizer)
    documents = segments(ids, tokenizer.eot) if run["data"]["document_mask"] else None
    model: Any = module.model
    mixes, experts = model_mixes(
        {f"layer {i}": model.blocks[i].ffn for i in chosen},
        lambda: model(torch.tensor([ids]), documents),
        token_names(parts),
    )
    by_expert = [mix.by_expert() for mix in experts]
    shown = "\n\n".join([inspection.table(mixes + by_expert, top), *(mix.table() for mix in experts)])
    texts = {inspection.TABLE: f"{shown}\n"}
    drawn = mix_figures(mixes, moa.ACTIVATIONS) | expert_figures(by_expert)
    if parts:
        coloured = mixes + [mix.by_token(token_names(parts)) for mix in experts]
        texts[PAGE] = text_page(f"{checkpoint}, {kind}", parts, coloured)
        drawn |= {f"text_{gate}": text_figure(parts, same) for gate, same in by_gate(coloured).items()}
    inspection.write_inspection(folder, texts, drawn)
    print(shown)


def expert_figures(mixes: list[Mix]) -> dict[str, Any]:
    """Return the pictures of sparse experts by name: those of all layers, and for each layer every expert's mix."""
    drawn = mix_figures(mixes, moa.ACTIVATIONS, "experts_")
    for mix in mixes:
        drawn[f"{mix.layer.replace(' ', '_')}_{mix.gate}"] = mix_figure(f"{mix.layer}, {mix.gate}", mix.by_name())
    return drawn


@command
def main(args: list[str] | None = None) -> None:
    quieten_libraries()
    parser = OneLineParser(prog="python -m lm.inspect", description=__doc__)
    parser.add_function_arguments(inspect)
    inspect(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    main()
