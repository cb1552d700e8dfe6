"""Tokenizers: text to ids and back, each with one end-of-text id that ordinary text never produces."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from pretrain.errors import UserError
from pretrain.hub import HUB_NAME
from pretrain.paths import user_path

END_OF_TEXT = "<|endoftext|>"
# What published tokenizers call the token between two documents, in the order in which they are looked for.
END_OF_TEXT_NAMES = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|endofdoc|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
)
GPT2_MERGES = Path(__file__).parent / "assets" / "gpt2" / "merges.txt"


class Tokenizer(ABC):
    """Turns text into ids in [0, n_vocab) and ids into text.

    Attributes:
        name: what `load_tokenizer` was given.
        n_vocab: number of ids, end-of-text included.
        eot: the id that follows every document. `encode` never yields it, not even for text that spells it.
        fingerprint: sha256 over everything that decides the ids, the same on every machine.

    Every tokenizer can be pickled and is rebuilt in another process without a file or a network.
    """

    name: str
    n_vocab: int
    eot: int
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without any special token."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids from `n_vocab` on (padded heads) vanish."""

    @abstractmethod
    def file(self) -> tuple[str, bytes]:
        """Name and content of a file from which other programs build this tokenizer, special tokens not added.

        `tokenizer.json` of the tokenizers library, where text that spells the end-of-text token becomes it, or
        SentencePiece's `tokenizer.model`.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, one uint32 array (n_tokens,) per text."""
        return [np.asarray(self.encode(text), dtype=np.uint32) for text in texts]


class BytesTokenizer(Tokenizer):
    """One id per UTF-8 byte, and 256 for end-of-text."""

    def __init__(self) -> None:
        self.name = "bytes"
        self.n_vocab = 257
        self.eot = 256
        self.fingerprint = _sha256("utf-8 bytes, end of text 256")

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        end = END_OF_TEXT.encode("ascii")
        pieces = (end if token == self.eot else bytes((token,)) for token in map(int, ids) if 0 <= token < self.n_vocab)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def file(self) -> tuple[str, bytes]:
        return _json_file(_byte_level_engine({symbol: byte for byte, symbol in gpt2_byte_symbols().items()}, []))


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, rebuilt from its merges: 256 byte symbols, 50,000 merges, end-of-text 50256."""

    def __init__(self) -> None:
        lines = GPT2_MERGES.read_text(encoding="utf-8").split("\n")
        merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines[1:]) if right]
        symbols = [*gpt2_byte_symbols().values(), *(left + right for left, right in merges), END_OF_TEXT]
        self._engine = _byte_level_engine({symbol: index for index, symbol in enumerate(symbols)}, merges)
        self.name = "gpt2"
        self.n_vocab = len(symbols)
        self.eot = self.n_vocab - 1
        self.fingerprint = _sha256("\n".join(symbols))

    def __reduce__(self) -> tuple:
        return GPT2Tokenizer, ()

    def encode(self, text: str) -> list[int]:
        # No merge builds the end-of-text symbol, so text that spells it comes out as its pieces.
        return [token for piece in gpt2_pieces(text) for token in _encode_ordinary(self._engine, piece)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.decode([int(token) for token in ids], skip_special_tokens=False)

    def file(self) -> tuple[str, bytes]:
        return _json_file(tokenizers.Tokenizer.from_str(self._engine.to_str()))


class JsonTokenizer(Tokenizer):
    """Any Hugging Face `tokenizer.json`; truncation, padding and dropout in it are switched off.

    Raises:
        UserError: the file is no tokenizer, or has no end-of-text token under any usual name.
    """

    def __init__(self, name: str, definition: str) -> None:
        try:
            data = json.loads(definition)
            engine = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{name} is no tokenizer.json of the tokenizers library: {_first_line(error)}") from error
        vocabulary = engine.get_vocab(with_added_tokens=True)
        end = next((text for text in END_OF_TEXT_NAMES if text in vocabulary), None)
        if end is None:
            raise UserError(
                f"{name} has no end-of-text token (looked for {', '.join(END_OF_TEXT_NAMES)}): add one of them to it"
            )
        self._definition = definition
        self._engine = tokenizers.Tokenizer.from_str(json.dumps(_without_randomness(data, end)))
        # Only tokens marked special are left alone by this switch, hence the mark set on the end-of-text token.
        self._engine.encode_special_tokens = True
        self._end = end
        self.name = name
        self.n_vocab = max(vocabulary.values()) + 1
        self.eot = vocabulary[end]
        decisive = {key: data.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
        self.fingerprint = _sha256(json.dumps([decisive, end], sort_keys=True))

    def __reduce__(self) -> tuple:
        return JsonTokenizer, (self.name, self._definition)

    def encode(self, text: str) -> list[int]:
        ids = _encode_ordinary(self._engine, text)
        if self.eot not in ids:
            return ids
        # Some models hold the end-of-text token in their plain vocabulary and match it in text: spell it in two halves.
        halves = re.split(f"(?<={re.escape(self._end[0])})(?={re.escape(self._end[1:])})", text)
        ids = [token for half in halves for token in _encode_ordinary(self._engine, half)]
        if self.eot in ids:
            raise UserError(
                f"{self.name} yields its end-of-text token {self._end} for ordinary text: use another tokenizer"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.decode([int(token) for token in ids], skip_special_tokens=False)

    def file(self) -> tuple[str, bytes]:
        definition = _without_randomness(json.loads(self._definition), self._end) | {"post_processor": None}
        return _json_file(tokenizers.Tokenizer.from_str(json.dumps(definition)), self._end)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`; end-of-text is its `</s>`. Its normalisation may change spaces and rare characters.

    Raises:
        UserError: the package is not installed, the file is no such model, or it has no `</s>`.
    """

    def __init__(self, name: str, model: bytes) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise UserError(
                f"{name} needs the sentencepiece package: pip install 'moa-pretrain[sentencepiece]'"
            ) from error
        self._model = model
        try:
            self._engine = sentencepiece.SentencePieceProcessor(model_proto=model)
            self.n_vocab = self._engine.vocab_size()
        except Exception as error:  # the library raises RuntimeError, or whatever protobuf does
            raise UserError(f"{name} is no SentencePiece model: {_first_line(error)}") from error
        self.name = name
        self.eot = int(self._engine.eos_id())
        if not 0 <= self.eot < self.n_vocab:
            raise UserError(f"{name} has no end-of-text token: train the SentencePiece model with eos_id >= 0")
        self.fingerprint = _sha256(model)

    def __reduce__(self) -> tuple:
        return SentencePieceTokenizer, (self.name, self._model)

    def encode(self, text: str) -> list[int]:
        return self._engine.encode(text, out_type=int)

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.decode([token for token in map(int, ids) if 0 <= token < self.n_vocab])

    def file(self) -> tuple[str, bytes]:
        return "tokenizer.model", self._model


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`.

    Args:
        name: "bytes", "gpt2", the path of a `tokenizer.json` or of a SentencePiece `.model`, or the name of a
            Hugging Face repository that holds a `tokenizer.json`.

    Raises:
        UserError: no such file or repository, no network, or a file that is no tokenizer with an end-of-text token.
    """
    if name == "bytes":
        return BytesTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer()
    path = user_path(name)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        if path.suffix in (".json", ".model") or not HUB_NAME.fullmatch(name):
            raise UserError(
                f"{path}: no such tokenizer file; give bytes, gpt2, a tokenizer.json or a SentencePiece .model"
            )
        path = _download(name)
    try:
        if path.suffix == ".json":
            return JsonTokenizer(name, path.read_text(encoding="utf-8"))
        if path.suffix == ".model":
            return SentencePieceTokenizer(name, path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a tokenizer: {_first_line(error)}") from error
    raise UserError(f"{path}: a tokenizer file ends in .json (tokenizers library) or .model (SentencePiece)")


@cache
def gpt2_byte_symbols() -> dict[int, str]:
    """GPT-2's printable symbol for each byte, in the order of GPT-2's ids: printable bytes first, then the rest."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


# GPT-2 begins a new token at a single space between two visible characters, whatever surrounds them.
_GPT2_BOUNDARY = re.compile(r"(?<=\S) (?=\S)")


def gpt2_pieces(text: str, length: int = 1 << 20) -> Iterator[str]:
    """Cut `text` where no token crosses, into pieces of about `length` characters.

    The engine holds some hundred bytes per token while it works; pieces keep that small for a document of gigabytes.
    """
    start = 0
    while len(text) - start > length:
        boundary = _GPT2_BOUNDARY.search(text, start + length)
        if boundary is None:
            break
        yield text[start : boundary.start()]
        start = boundary.start()
    yield text[start:]


def _byte_level_engine(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """GPT-2's scheme: bytes stand as printable symbols, and words of them are merged."""
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    return engine


def _json_file(engine: tokenizers.Tokenizer, end: str = END_OF_TEXT) -> tuple[str, bytes]:
    engine.add_special_tokens([tokenizers.AddedToken(end, normalized=False)])
    return "tokenizer.json", engine.to_str(pretty=True).encode("utf-8")


def _encode_ordinary(engine: tokenizers.Tokenizer, text: str) -> list[int]:
    # The batch call is the faster one: it does not track the place of each token in the text. One text at a time, since
    # the parallel unit is the process: a text alone uses one core.
    return engine.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _without_randomness(data: dict[str, Any], end: str) -> dict[str, Any]:
    """The definition with nothing in it that cuts, pads or varies, and with its end-of-text token marked special."""
    added = [token | {"special": True} if token["content"] == end else token for token in data.get("added_tokens", [])]
    return data | {
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "model": data["model"] | ({"dropout": None} if "dropout" in data["model"] else {}),
    }


def _download(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    # The file itself rather than `Tokenizer.from_pretrained`, so that a hub name and a copy of the file on disk have
    # the same fingerprint under every version of the library.
    try:
        return Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:  # many kinds: no network, offline mode, unknown name, no such file, gated
        raise UserError(
            f"tokenizer {name} is no local file and its tokenizer.json cannot be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {_first_line(error)}): check the name and the network, or give a local file"
        ) from error


def _first_line(error: BaseException) -> str:
    lines: Iterable[str] = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def _sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode("utf-8") if isinstance(content, str) else content).hexdigest()
