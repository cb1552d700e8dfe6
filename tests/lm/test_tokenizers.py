"""Tokenizers against independent implementations, and what they promise about text and end-of-text."""

import json
import pickle
import sys

import numpy as np
import pytest
import tiktoken
import tokenizers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.tokenizers import GPT2_MERGES, gpt2_byte_symbols, gpt2_pieces, load_tokenizer
from pretrain.errors import UserError

PAGE = (
    "Hello world! It's what they'll say; we've 1234 reasons.\n\n\tTabs\tand   runs of   spaces  \n"
    "trailing spaces   \n 日本語のテキストと中文，한국어. Ünïcödé naïve café — “quotes”…\r\n"
    "😀👩‍👩‍👧‍👦🏳️‍🌈 emoji \u00a0 no-break \u2028 line\u3000wide\x00nul\x1funit <|endoftext|> </s> end"
)
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def independent():
    """GPT-2 in tiktoken, its ranks built here from the merges: printable bytes, the other bytes, merges in order."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " " and b != 0xAD]
    symbols = {chr(b): bytes([b]) for b in printable}
    symbols |= {chr(256 + n): bytes([b]) for n, b in enumerate(b for b in range(256) if b not in printable)}
    ranks = {symbol: rank for rank, symbol in enumerate(symbols.values())}
    for line in GPT2_MERGES.read_text(encoding="utf-8").splitlines()[1:]:
        ranks[b"".join(symbols[character] for character in line.replace(" ", ""))] = len(ranks)
    return tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


def test_gpt2_has_its_known_ids(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.n_vocab, gpt2.eot) == (50257, 50256)
    assert len(gpt2_byte_symbols()) == 256


def test_gpt2_agrees_with_tiktoken_on_a_hard_page(gpt2, independent):
    assert gpt2.encode(PAGE) == independent.encode_ordinary(PAGE)


def test_gpt2_agrees_with_transformers(gpt2, tmp_path):
    from transformers import GPT2TokenizerFast

    symbols = [*gpt2_byte_symbols().values()]
    symbols += [line.replace(" ", "") for line in GPT2_MERGES.read_text(encoding="utf-8").splitlines()[1:]]
    vocabulary = {symbol: index for index, symbol in enumerate([*symbols, "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_bytes(GPT2_MERGES.read_bytes())
    peer = GPT2TokenizerFast.from_pretrained(tmp_path)
    page = PAGE.replace("<|endoftext|>", "")  # transformers takes that text for the special token
    assert gpt2.encode(page) == peer(page)["input_ids"]


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_gpt2_agrees_with_tiktoken_and_loses_nothing(gpt2, independent, text):
    ids = gpt2.encode(text)
    assert ids == independent.encode_ordinary(text)
    assert gpt2.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab '\u00a0\n\x1f.é1日", max_size=60), st.integers(1, 10))
def test_cutting_a_long_text_changes_no_id(gpt2, text, length):
    pieces = list(gpt2_pieces(text, length))
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in gpt2.encode(piece)] == gpt2.encode(text)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_text_that_spells_end_of_text_is_ordinary(name):
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(PAGE)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == PAGE
    assert tokenizer.decode([*ids, tokenizer.eot]) == PAGE + "<|endoftext|>"
    assert [batch.tolist() for batch in tokenizer.encode_batch([PAGE, "", "a"])] == [ids, [], tokenizer.encode("a")]


def test_bytes_are_the_utf8_bytes():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert (tokenizer.n_vocab, tokenizer.eot) == (257, 256)
    assert tokenizer.decode([0xC3, 97, 300]) == "\ufffda"


def test_gpt2_decodes_half_a_character_and_ignores_padding_ids(gpt2):
    half = gpt2.encode("😀")[:1]
    assert gpt2.decode(half) == "\ufffd"
    assert gpt2.decode(np.array([15496, 50300])) == "Hello"


def train_bpe(path, end="</s>", **settings):
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    trainer = hf.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[end, "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([PAGE] * 5, trainer)
    if settings.get("truncation"):
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=10)
    tokenizer.save(str(path))
    return tokenizer


def test_a_tokenizer_json_works_and_its_truncation_is_off(tmp_path):
    path = tmp_path / "tokenizer.json"
    peer = train_bpe(path, truncation=True)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.eot == peer.token_to_id("</s>")
    assert tokenizer.n_vocab == peer.get_vocab_size()
    ids = tokenizer.encode(PAGE)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == PAGE
    assert load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint


def test_a_vocabulary_that_matches_end_of_text_in_text_is_kept_from_it(tmp_path):
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((c, -2.0) for c in "<>/s ab\0")]
    hf.Tokenizer(hf.models.Unigram(pieces, unk_id=0)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert hf.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a</s>").ids[-1] == tokenizer.eot
    text = "a</s>\0</s>b"
    ids = tokenizer.encode(text)
    assert tokenizer.eot not in ids
    assert len(ids) == len(text)


def test_the_fingerprint_follows_the_ids_not_the_path(tmp_path):
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    train_bpe(tmp_path / "a" / "tokenizer.json")
    (tmp_path / "b" / "tokenizer.json").write_bytes((tmp_path / "a" / "tokenizer.json").read_bytes())
    train_bpe(tmp_path / "c" / "tokenizer.json", end="<eos>")
    a, b, c = (load_tokenizer(str(tmp_path / folder / "tokenizer.json")).fingerprint for folder in "abc")
    assert a == b != c
    assert (
        load_tokenizer("gpt2").fingerprint == load_tokenizer("gpt2").fingerprint != load_tokenizer("bytes").fingerprint
    )


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    import sentencepiece

    folder = tmp_path_factory.mktemp("sp")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\nhello world\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tiny"), vocab_size=50, hard_vocab_limit=False
    )
    return folder / "tiny.model"


def test_a_sentencepiece_model_works(sentencepiece_model):
    import sentencepiece

    tokenizer = load_tokenizer(str(sentencepiece_model))
    peer = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    text = "the lazy fox </s> hello"
    ids = tokenizer.encode(text)
    assert ids == peer.encode(text)
    assert tokenizer.eot == peer.eos_id() not in ids
    assert tokenizer.decode([*tokenizer.encode("the lazy fox"), 10_000]) == "the lazy fox"


def test_without_the_package_the_error_names_the_extra(sentencepiece_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"moa-pretrain\[sentencepiece\]"):
        load_tokenizer(str(sentencepiece_model))


def test_tokenizers_can_be_pickled(tmp_path, sentencepiece_model):
    train_bpe(tmp_path / "tokenizer.json")
    for name in ("bytes", "gpt2", str(tmp_path / "tokenizer.json"), str(sentencepiece_model)):
        tokenizer = load_tokenizer(name)
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.encode("hello fox") == tokenizer.encode("hello fox")
        assert (copy.name, copy.fingerprint, copy.eot) == (tokenizer.name, tokenizer.fingerprint, tokenizer.eot)


def test_bad_tokenizers_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "broken.model").write_text("no model")
    (tmp_path / "other.bin").write_text("")
    train_bpe(tmp_path / "endless.json", end="<nothing>")
    for name, reason in {
        str(tmp_path / "missing.json"): "no such tokenizer file",
        "./missing": "no such tokenizer file",
        str(tmp_path / "broken.json"): "no tokenizer.json",
        str(tmp_path / "broken.model"): "no SentencePiece model",
        str(tmp_path / "other.bin"): "ends in .json",
        str(tmp_path / "endless.json"): "no end-of-text token",
        "nobody/nothing": "cannot be fetched from the Hugging Face hub",
    }.items():
        with pytest.raises(UserError, match=reason) as error:
            load_tokenizer(name)
        assert "\n" not in str(error.value)
