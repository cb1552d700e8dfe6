"""Write a model and its tokenizer as the files that Hugging Face transformers reads. It is not needed here itself."""

import json
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from lm.hf_format import exported_config, exported_name
from lm.model import Llama
from lm.tokenizers import Tokenizer
from pretrain.atomic import readable_as_usual
from pretrain.errors import UserError

DType = Literal["float32", "bfloat16", "float16"]


def write_model(
    model: Llama, tokenizer: Tokenizer, folder: Path, max_length: int = 1024, dtype: DType = "float32"
) -> bool:
    """Write weights, configuration and tokenizer as transformers reads them.

    Args:
        folder: exists already.
        max_length: tokens of the sequences that the model has been trained on.

    Returns:
        Whether AutoTokenizer reads the tokenizer; see `write_tokenizer`.

    Raises:
        UserError: the tokenizer has more ids than the model, or a weight is beyond the type's range.
    """
    config = model.config
    if tokenizer.n_vocab > config.vocab_size:
        raise UserError(
            f"{tokenizer.name} has {tokenizer.n_vocab} ids, more than the model's {config.vocab_size} rows: "
            "put the tokenizer of the run there"
        )
    weights = {exported_name(config, name): value for name, value in cast(model.state_dict(), dtype).items()}
    try:
        # One file, above 5 GB shards with an index.
        save_torch_state_dict(weights, folder, metadata={"format": "pt"})
    except SafetensorError as error:  # what a full disk is called here
        raise UserError(f"the weights cannot be written ({error}): make room") from error
    for file in folder.glob("*.safetensors"):
        readable_as_usual(file)
    write_json(exported_config(config, max_length, tokenizer.eot, dtype), folder / "config.json")
    write_json(generation_config(tokenizer, config.vocab_size), folder / "generation_config.json")
    return write_tokenizer(tokenizer, folder, max_length)


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


def generation_config(tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Return the content of generation_config.json: `generate` stops at the end of a text and draws no padding row."""
    ids: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eot)
    padding = list(range(tokenizer.n_vocab, vocab_size))
    return ids | ({"suppress_tokens": padding} if padding else {})


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> bool:
    """Write the tokenizer's own file and, if AutoTokenizer can read that with the same ids, what it needs besides.

    The ids are the same for every text that does not spell the end-of-text token: AutoTokenizer makes of that spelling
    the token, `Tokenizer.encode` its characters.

    Args:
        max_length: tokens of the sequences that the model has been trained on.

    Returns:
        Whether AutoTokenizer can. It cannot for SentencePiece, whose normalisation no other engine repeats exactly.
    """
    name, content = tokenizer.file()
    (folder / name).write_bytes(content)
    if name != "tokenizer.json":
        return False
    end = end_of_text(tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    write_json(config, folder / "tokenizer_config.json")
    return True


def end_of_text(tokenizer: Tokenizer) -> str:
    """Return the spelling of the end-of-text token of a tokenizer whose own file is a tokenizer.json."""
    _, content = tokenizer.file()
    end = tokenizers.Tokenizer.from_str(content.decode("utf-8")).id_to_token(tokenizer.eot)
    assert end is not None
    return end


def write_json(content: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
