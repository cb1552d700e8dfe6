"""Let a trained model write: `python -m lm.generate --checkpoint RUN --prompt "..."`.

The text goes to stdout, all else to stderr. Without any text, `--prompt ""`, the model starts a document.
"""

import io
import sys
from functools import partial
from typing import Any, Literal

import torch
from jsonargparse.typing import PositiveInt

from lm.data.module import TextData
from lm.module import LanguageModule
from lm.prompts import read_prompt, read_prompts
from lm.sampling import check_settings
from lm.tokenizers import load_tokenizer
from lm.writing import Writer, length_notes, save
from pretrain.arguments import OneLineParser
from pretrain.checkpoint import find_checkpoint
from pretrain.cli import quieten_libraries
from pretrain.devices import choose_device
from pretrain.errors import UserError, command
from pretrain.paths import new_output_path
from pretrain.reload import load_module


@torch.inference_mode()
def write(
    checkpoint: str,
    prompts: list[str],
    output: str | None = None,
    n_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    seed: int = 0,
    echo: bool = True,
    batch_size: PositiveInt = 16,
    device: str = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Write on from prompts, each until an end of text or until there are `n_tokens` tokens.

    Args:
        checkpoint: Folder of a run, one of its checkpoints, or a folder of runs: the one that has saved last.
        prompts: The texts to go on from.
        output: A .jsonl file to make, with prompt, text, n_tokens and ended in each row; null: the terminal.
        n_tokens: Tokens to write after each prompt, at most.
        temperature: Divides the logits; 0 takes the most likely token each time.
        top_k: Draw among so many most likely tokens only; null: all.
        top_p: Of these, draw among the fewest that have this probability together; null: all.
        seed: With a prompt's number it decides what is drawn, in batches of any size.
        echo: Show each prompt before its text.
        batch_size: Prompts that are gone on from together.
        device: auto, cpu, cuda or cuda:N.
        dtype: Of the weights: float32, or bfloat16, which takes half the memory.
    """
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    check_settings(n_tokens, max_length=1, **sampling)
    target = None if output is None else new_output_path(output)
    file, place = find_checkpoint(checkpoint), choose_device(device)
    module, run = load_module(LanguageModule, file, data_class=TextData)
    model: Any = module.model
    model.to(place, getattr(torch, dtype))
    tokenizer, max_length = load_tokenizer(run["data"]["tokenizer"]), run["data"]["sequence_length"]
    show = partial(print, end="", flush=True) if target is None else None
    writer = Writer(model, tokenizer, max_length, n_tokens, sampling, show, echo)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    say(f"{file}, {place}, {dtype}", *length_notes(ids, max_length))
    written = writer.write(ids, prompts, batch_size)
    if target is not None:
        save(written, target)
        say(f"written: {target}")
    say(str(writer.speed))


def say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


@command
def main(args: list[str] | None = None) -> None:
    quieten_libraries()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    parser = OneLineParser(prog="python -m lm.generate", description=__doc__)
    # Plain texts, so that no prompt is taken for YAML: "", null, 1.
    parser.add_argument("--prompt", type=str, help="The text to go on from; -: standard input.")
    parser.add_argument("--prompts", type=str, help='A file of prompts: one a line, or .jsonl rows with a "prompt".')
    parser.add_function_arguments(write, skip={"prompts"})
    settings = vars(parser.parse_args(args))
    prompt, file = settings.pop("prompt"), settings.pop("prompts")
    if (prompt is None) == (file is None):
        raise UserError("give either --prompt TEXT or --prompts FILE (--help says more)")
    write(prompts=[read_prompt(prompt)] if file is None else read_prompts(file), **settings)


if __name__ == "__main__":
    main()
