"""Weights for use elsewhere: `python -m lm.export --checkpoint RUN --to hf --output DIR`."""

import json
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from lm.hf_format import exported_config, exported_name, is_plain
from lm.hf_tokenizer import write_tokenizer
from lm.model import Llama
from lm.model_card import model_card
from lm.module import LanguageModule
from lm.tokenizers import Tokenizer, load_tokenizer
from pretrain.atomic import locked, partial_folder, publish
from pretrain.checkpoint import find_checkpoint, read_checkpoint
from pretrain.cli import OneLineParser
from pretrain.errors import UserError, command
from pretrain.reload import load_module
from pretrain.run import SUMMARY

PROG = "python -m lm.export"
DType = Literal["float32", "bfloat16", "float16"]


def export(checkpoint: str, output: str, to: Literal["hf"] = "hf", dtype: DType = "float32") -> None:
    """Write a model's weights, configuration and tokenizer in the format of another suite, with a model card.

    Args:
        checkpoint: Folder of a run, or one of its checkpoints.
        output: The folder to make. It appears when it is complete.
        to: hf, Hugging Face transformers: a dense swiglu model as a plain Llama that needs nothing of ours, every other
            one to be loaded after `import lm.hf`.
        dtype: Type of the weights: float32, bfloat16 or float16.
    """
    folder, file = Path(output), find_checkpoint(checkpoint)
    _check_free(folder)
    module, run = load_module(LanguageModule, file)
    tokenizer = load_tokenizer(run["data"]["tokenizer"])
    if tokenizer.n_vocab > module.config.vocab_size:
        raise UserError(
            f"{tokenizer.name} has {tokenizer.n_vocab} ids, more than the model: it is not the run's tokenizer"
        )
    assert isinstance(module.model, Llama)
    weights = {exported_name(module.config, n): v for n, v in cast(module.model.state_dict(), dtype).items()}
    step = read_checkpoint(file).get("global_step", 0)
    with locked(folder), partial_folder(folder) as partial:
        _check_free(folder)
        write_weights(weights, partial)
        auto_tokenizer = write_tokenizer(tokenizer, partial, run["data"]["sequence_length"])
        card = model_card(module.config, run, read_summary(file), step, tokenizer, auto_tokenizer, dtype)
        (partial / "README.md").write_text(card, encoding="utf-8")
        config = exported_config(module.config, run["data"]["sequence_length"], tokenizer.eot, dtype)
        write_json(config, partial / "config.json")
        write_json(generation_config(tokenizer, module.config.vocab_size), partial / "generation_config.json")
        publish(partial, folder)
    needs = "" if is_plain(module.config) else "import lm.hf; "
    print(f'{output}: load it with\n  {needs}transformers.AutoModelForCausalLM.from_pretrained("{output}")')
    if not auto_tokenizer:
        print("  its tokenizer.model with the sentencepiece package: no AutoTokenizer gives exactly the same ids")


def cast(weights: dict[str, Tensor], dtype: DType) -> dict[str, Tensor]:
    """Return the weights in another type.

    Raises:
        UserError: a value beyond its range.
    """
    converted = {name: value.to(getattr(torch, dtype)) for name, value in weights.items()}
    for name, value in converted.items():
        if not value.isfinite().all() and weights[name].isfinite().all():
            raise UserError(f"{name} has values too large for {dtype}: use --dtype bfloat16 or float32")
    return converted


def write_weights(weights: dict[str, Tensor], folder: Path) -> None:
    """Write model.safetensors, above 5 GB in shards with an index."""
    try:
        save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    except SafetensorError as error:  # what a full disk is called here
        raise UserError(f"the weights cannot be written ({error}): make room") from error


def generation_config(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return the content of generation_config.json: `generate` stops at the end of a text and draws no padding row."""
    ids: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot)
    padding = list(range(tokenizer.n_vocab, vocab_size))
    return ids | ({"suppress_tokens": padding} if padding else {})


def read_summary(checkpoint: Path) -> dict[str, Any]:
    """Return the summary.json of the run that a checkpoint lies in; {} without one."""
    file = checkpoint.parent.parent / SUMMARY
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def write_json(content: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _check_free(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} exists already: give another --output, or remove it first")


@command
def main(args: list[str] | None = None) -> None:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_function_arguments(export)
    export(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    main()
