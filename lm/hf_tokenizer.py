"""A tokenizer as the files that transformers' AutoTokenizer reads."""

import json
from pathlib import Path

import tokenizers

from lm.tokenizers import Tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> bool:
    """Write the tokenizer's own file and, if AutoTokenizer can read that with the same ids, what it needs besides.

    Args:
        max_length: tokens of the sequences that the model has been trained on.

    Returns:
        Whether AutoTokenizer can. It cannot for SentencePiece, whose normalisation no other engine repeats exactly.
    """
    name, content = tokenizer.file()
    (folder / name).write_bytes(content)
    if name != "tokenizer.json":
        return False
    end = tokenizers.Tokenizer.from_str(content.decode("utf-8")).id_to_token(tokenizer.eot)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return True
