"""How the tokens of a text use the activations: `python -m lm.inspect --checkpoint RUN [--text "..."]`."""

from typing import Any

import torch

import moa
from lm.mixes import ExpertMix, model_mixes
from lm.module import LanguageModule
from lm.passage import Piece, chosen_tokens, pieces, segments, token_names
from lm.text_page import text_page
from lm.tokenizers import load_tokenizer
from pretrain.cli import OneLineParser, quieten_libraries
from pretrain.errors import command
from pretrain.inspection import (
    TABLE,
    Mix,
    check_kind,
    check_top,
    choose_layers,
    output_folder,
    table,
    write_inspection,
)
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
    check_top(top)
    folder = output_folder(checkpoint, output)
    module, run = load_module(LanguageModule, checkpoint)
    kind = module.config.ffn.kind
    check_kind(kind, moa.kinds("la", "moa"), checkpoint)
    chosen = choose_layers(layers, module.config.n_layers)
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
    shown = "\n\n".join(
        [table([*mixes, *(mix.by_expert() for mix in experts)], top), *(mix.table() for mix in experts)]
    )
    texts = {TABLE: f"{shown}\n"} | page(f"{checkpoint}, {kind}", parts, mixes, experts)
    write_inspection(folder, texts, figures(mixes, experts))
    print(shown)


def page(title: str, parts: list[Piece], mixes: list[Mix], experts: list[ExpertMix]) -> dict[str, str]:
    """Return the coloured text, where there is one."""
    coloured = mixes + [mix.by_token([""] * parts[-1].stop) for mix in experts if parts]
    return {PAGE: text_page(title, parts, coloured)} if parts else {}


def figures(mixes: list[Mix], experts: list[ExpertMix]) -> dict[str, Any]:
    """Return all pictures by name."""
    by_expert = [mix.by_expert() for mix in experts]
    drawn = mix_figures(mixes, moa.ACTIVATIONS) | mix_figures(by_expert, moa.ACTIVATIONS, "experts_")
    for mix in by_expert:
        rows = {
            name: dict(zip(mix.labels, row, strict=True))
            for name, row in zip(mix.names, mix.weights.tolist(), strict=True)
        }
        drawn[f"{mix.layer.replace(' ', '_')}_{mix.gate}"] = mix_figure(f"{mix.layer}, {mix.gate}", rows)
    return drawn


@command
def main(args: list[str] | None = None) -> None:
    quieten_libraries()
    parser = OneLineParser(prog="python -m lm.inspect", description=__doc__)
    parser.add_function_arguments(inspect)
    inspect(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    main()
