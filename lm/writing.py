"""A model and its tokenizer write texts: shown as they come, collected, and timed."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from lm.model import Llama
from lm.sampling import generate
from lm.streaming import TextStream
from lm.tokenizers import Tokenizer
from pretrain.atomic import write_atomically
from pretrain.errors import UserError


class Written(NamedTuple):
    """What came after a prompt."""

    prompt: str
    text: str
    n_tokens: int
    ended: bool  # by an end-of-text, which is not counted; otherwise by the number of tokens


@dataclass
class Speed:
    """Tokens and seconds of prefill, up to each batch's first token, and of decoding, the tokens after those."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decoding_tokens: int = 0
    decoding_seconds: float = 0.0

    def start(self) -> None:
        self._begun = time.perf_counter()
        self._first: float | None = None

    def token(self) -> None:
        if self._first is None:
            self._first = time.perf_counter()

    def stop(self, n_read: int, n_drawn: Sequence[int]) -> None:
        """Add a batch: the prompts' tokens that were read, and how many were drawn after each."""
        now = time.perf_counter()
        first = now if self._first is None else self._first
        self.prefill_tokens += n_read
        self.prefill_seconds += first - self._begun
        self.decoding_tokens += sum(max(0, number - 1) for number in n_drawn)
        self.decoding_seconds += now - first

    def __str__(self) -> str:
        def part(name: str, tokens: int, seconds: float) -> str:
            rate = f" ({tokens / seconds:,.0f} tokens/s)" if tokens and seconds else ""
            return f"{name} {tokens:,} tokens in {seconds:.2f} s{rate}"

        return (
            f"{part('prefill', self.prefill_tokens, self.prefill_seconds)}, "
            f"{part('decoding', self.decoding_tokens, self.decoding_seconds)}"
        )


@dataclass
class Writer:
    """Writes on from prompts.

    Args:
        model: a Llama, in evaluation mode.
        tokenizer: of its training.
        max_length: tokens that it sees.
        n_tokens: to write after each prompt, at most.
        sampling: arguments of `lm.sampling.generate`.
        show: takes pieces of text to be seen; None: nothing is shown.
        echo: show the prompts, too.
    """

    model: Llama
    tokenizer: Tokenizer
    max_length: int
    n_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    show: Callable[[str], None] | None = None
    echo: bool = True
    speed: Speed = field(default_factory=Speed)

    def write(self, prompts: Sequence[Sequence[int]], texts: Sequence[str], batch_size: int) -> list[Written]:
        """Return what comes after each prompt.

        A single text is shown as it is drawn; several one after the other with an empty line behind each, as soon as
        their batch is done. An interruption shows what there is. Where no text is shown, a bar counts the prompts.

        Args:
            prompts: ids, of `texts`.
            batch_size: prompts that are gone on from together.
        """
        written = []
        with tqdm(desc="generate", unit="prompt", total=len(prompts), disable=True if self.show else None) as bar:
            for first in range(0, len(prompts), batch_size):
                batch = slice(first, first + batch_size)
                written += self._write_batch(prompts[batch], texts[batch], first, as_drawn=len(prompts) == 1)
                bar.update(len(prompts[batch]))
        return written

    def _write_batch(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[str], first_row: int, as_drawn: bool
    ) -> list[Written]:
        show = self.show or (lambda piece: None)
        streams = [TextStream(self.tokenizer, prompt) for prompt in prompts]
        parts: list[list[str]] = [[] for _ in prompts]

        def add(row: int, piece: str) -> None:
            parts[row].append(piece)
            if as_drawn and piece:
                show(piece)

        def on_token(row: int, token: int) -> None:
            self.speed.token()
            add(row, streams[row].push(token))

        if as_drawn and self.echo:
            show(texts[0])
        self.speed.start()
        try:
            drawn = generate(
                self.model,
                prompts,
                self.n_tokens,
                n_vocab=self.tokenizer.n_vocab,
                end=self.tokenizer.eot,
                first_row=first_row,
                max_length=self.max_length,
                on_token=on_token,
                **self.sampling,
            )
        finally:
            for row, stream in enumerate(streams):
                add(row, stream.finish())
                if as_drawn:
                    show("\n")
                else:
                    show((texts[row] if self.echo else "") + "".join(parts[row]) + "\n\n")
        n_drawn = list(map(len, drawn))
        self.speed.stop(sum(min(len(prompt) or 1, self.max_length) for prompt in prompts), n_drawn)
        return [
            Written(text, "".join(pieces), number, number < self.n_tokens)
            for text, pieces, number in zip(texts, parts, n_drawn, strict=True)
        ]


def length_notes(prompts: Sequence[Sequence[int]], max_length: int) -> list[str]:
    """Return what has to be said of prompts that are not taken as they are."""
    lengths = [len(prompt) for prompt in prompts]
    notes = []
    if long := sum(length > max_length for length in lengths):
        notes.append(f"{long} of {len(lengths)} prompts longer than the model's {max_length} tokens: their ends count")
    if empty := lengths.count(0):
        notes.append(f"{empty} of {len(lengths)} prompts empty: the text starts a document")
    return notes


def save(written: Sequence[Written], file: Path) -> None:
    """Write results as .jsonl, whole or not at all."""
    rows = (json.dumps(row._asdict(), ensure_ascii=False) + "\n" for row in written)
    try:
        write_atomically(file, "".join(rows))
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}): give another --output") from error
