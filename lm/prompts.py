"""Prompts from the command line, from standard input, or from a file."""

import json
import sys

from pretrain.errors import UserError
from pretrain.paths import user_path

STDIN = "-"


def read_prompt(prompt: str) -> str:
    """Return the prompt, or what standard input holds if it is "-": without the newline at its end."""
    if prompt != STDIN:
        return checked(prompt, "the prompt")
    return decoded(sys.stdin.buffer.read(), "standard input").removesuffix("\n")


def read_prompts(name: str) -> list[str]:
    """Return the prompts of a file: a line each, or "prompt" of each row of a .jsonl file; blank lines are left out.

    Raises:
        UserError: no such file, no text, a broken row (named by its number), or no prompt in it.
    """
    path = user_path(name)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"the prompts {name} cannot be read: {error.strerror}") from error
    is_json = path.suffix == ".jsonl"
    prompts = []
    # Not by str.splitlines, which also cuts at characters such as U+2028.
    for number, line in enumerate(decoded(data, name).removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            where = f"{name}, row {number}"
            prompts.append(checked(_of_row(line, where) if is_json else line.removesuffix("\r"), where))
    if not prompts:
        raise UserError(f"{name} holds no prompts: " + ('{"prompt": ".."} in each row' if is_json else "one a line"))
    return prompts


def _of_row(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is no JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise UserError(f'{where} has no text called "prompt"')
    return row["prompt"]


def decoded(data: bytes, where: str) -> str:
    """Return bytes as text, or raise a UserError that says where they are none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{where}, line {line} is no UTF-8 text: convert it") from error


def checked(text: str, where: str) -> str:
    """Return the text, or raise a UserError for a lone surrogate, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where} is no text: a lone surrogate at character {error.start + 1}") from error
    return text
