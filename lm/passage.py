"""A passage of text as the tokens that a model is given, and these tokens as people read them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lm.data.module import TextData
from lm.tokenizers import Tokenizer
from pretrain.errors import UserError
from pretrain.paths import user_path

REPLACED = "\ufffd"  # what the decoders write for bytes that are no UTF-8
MAX_BYTES_OF_A_CHARACTER = 4
VISIBLE = {" ": "·", "\n": "↵", "\t": "⇥"}
CONTEXT = 3  # characters shown on either side of a short token


@dataclass(frozen=True)
class Piece:
    """A part of a text: the tokens `start` to `stop` - 1, as few as have whole characters.

    Mostly one token; a character that several tokens spell byte by byte is one piece.
    """

    start: int
    stop: int
    text: str


def chosen_tokens(text: str | None, file: str | None, run: dict[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text, of a file, or of the start of a run's validation text: at most one sequence.

    Args:
        text, file: one of them or none.
        run: the run's configuration.
        tokenizer: the run's.

    Raises:
        UserError: both, no text in it, or nothing to read.
    """
    if text is not None and file is not None:
        raise UserError("--text and --file are both given: leave one out")
    if text is None and file is None:
        return _validation_tokens(run)
    ids = tokenizer.encode(_read(file) if file is not None else text or "")
    if not ids:
        raise UserError(f"{'--text' if file is None else file} is empty: give some words")
    length = run["data"]["sequence_length"]
    if len(ids) > length:
        print(
            f"the text has {len(ids):,} tokens, of which the first {length:,} are looked at: the run's sequence length"
        )
    return ids[:length]


def _validation_tokens(run: dict[str, Any]) -> list[int]:
    data = TextData(**run["data"])
    data.prepare_data()
    data.setup("validate")
    if data.val_tokens_per_byte is None:
        raise UserError("the run has no validation text: give --text or --file")
    return data.val_prompt(data.sequence_length)


def _read(file: str) -> str:
    try:
        return user_path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--file {file} is no UTF-8 text (byte {error.start:,}): convert it first") from error


def segments(ids: Sequence[int], eot: int) -> torch.Tensor:
    """Return the number of each token's document, (1, L); an end-of-text belongs to the document that it ends."""
    ends = torch.tensor(ids) == eot
    return (ends.cumsum(0) - ends.long())[None]


def pieces(ids: Sequence[int], tokenizer: Tokenizer) -> list[Piece]:
    """Return the tokens as pieces of readable text; joined they are the text."""
    found: list[Piece] = []
    start = 0
    while start < len(ids):
        longest = min(start + MAX_BYTES_OF_A_CHARACTER, len(ids))
        candidates = [
            Piece(start, stop, _text(ids, start, stop, found, tokenizer)) for stop in range(start + 1, longest + 1)
        ]
        piece = next((piece for piece in candidates if REPLACED not in piece.text), candidates[0])
        found.append(piece)
        start = piece.stop
    return found


def _text(ids: Sequence[int], start: int, stop: int, before: Sequence[Piece], tokenizer: Tokenizer) -> str:
    """What ids[start:stop] add to the piece before: some decoders drop the space that a token alone begins with."""
    anchor = before[-1].start if before else start
    lead, whole = tokenizer.decode(ids[anchor:start]), tokenizer.decode(ids[anchor:stop])
    return whole.removeprefix(lead) if whole.startswith(lead) else tokenizer.decode(ids[start:stop])


def token_names(found: Sequence[Piece]) -> list[str]:
    """Return a name for each token: what it reads, and for a short one the characters around it, "Pr⟨e⟩sid"."""
    text = "".join(piece.text for piece in found)
    names, place = [], 0
    for piece in found:
        end = place + len(piece.text)
        name = visible(piece.text)
        if len(piece.text) < CONTEXT:
            name = f"{visible(text[max(0, place - CONTEXT) : place])}⟨{name}⟩{visible(text[end : end + CONTEXT])}"
        names += [name] * (piece.stop - piece.start)
        place = end
    return names


def visible(text: str) -> str:
    """Return a text in which white space shows and nothing can steer a terminal."""
    shown = (
        VISIBLE.get(char) or (char if char.isprintable() else char.encode("unicode_escape").decode()) for char in text
    )
    return "".join(shown)
