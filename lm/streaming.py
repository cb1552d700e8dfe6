"""Tokens to text while they are drawn."""

from collections.abc import Sequence

from lm.tokenizers import Tokenizer

UNDECODABLE = "\ufffd"


class TextStream:
    """Turns tokens into pieces of text that, put together, are what decoding all of them at once adds to the prompt.

    A piece is given out when its last character is complete: characters may be spread over several tokens, and half of
    one looks like bytes that are no text. Those that turn out to be none appear as U+FFFD with the next whole
    character, or at the end.

    Only the tokens since the piece before the last are decoded, so that a token costs the same in a long text. They
    are decoded together, since tokenizers may drop a space at the start.

    Args:
        tokenizer: of the model.
        prompt: the ids of the text before, which is not given out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self._window = list(prompt)  # the tokens of the piece given out last, then those that wait
        self._n_given = len(self._window)

    def push(self, token: int) -> str:
        """Return the text that one more token completes, possibly none."""
        self._window.append(token)
        piece = self._waiting()
        if not piece or piece.endswith(UNDECODABLE):
            return ""
        if not piece.isspace():  # a start of spaces alone would lose those behind it as well
            self._window = self._window[self._n_given :]
        self._n_given = len(self._window)
        return piece

    def finish(self) -> str:
        """Return what still waits; the stream is at its end."""
        piece = self._waiting()
        self._window, self._n_given = [], 0
        return piece

    def _waiting(self) -> str:
        given = self.tokenizer.decode(self._window[: self._n_given])
        return self.tokenizer.decode(self._window)[len(given) :]
