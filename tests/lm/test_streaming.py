"""Text as it comes is the text as a whole, and never half a character."""

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm.streaming import TextStream
from lm.tokenizers import load_tokenizer
from tests.lm.test_tokenizers import PAGE, train_bpe


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    train_bpe(folder / "tokenizer.json")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\nhello world\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tiny"), vocab_size=50, hard_vocab_limit=False
    )
    names = {"json": str(folder / "tokenizer.json"), "sentencepiece": str(folder / "tiny.model")}
    return {name: load_tokenizer(names.get(name, name)) for name in ("bytes", "gpt2", *names)}


def pieces(tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*map(stream.push, ids), stream.finish()]


@pytest.mark.parametrize("name", ["bytes", "gpt2", "json"])
def test_text_comes_in_whole_characters(tokenizers, name):
    ids = tokenizers[name].encode(PAGE)
    given_out = pieces(tokenizers[name], [], ids)
    assert "".join(given_out) == PAGE
    assert not any("\ufffd" in piece for piece in given_out)


def test_a_character_comes_with_its_last_byte(tokenizers):
    assert pieces(tokenizers["bytes"], [], list("a😀é".encode())) == ["a", "", "", "", "😀", "", "é", ""]
    assert pieces(tokenizers["bytes"], [], [0xF0, 0x9F, 97, 0xC3]) == ["", "", "\ufffda", "", "\ufffd"]


@pytest.mark.parametrize("name", ["bytes", "gpt2", "json", "sentencepiece"])
@settings(max_examples=100, deadline=None)
@example(prompt="", numbers=[0, 3, 3])  # spaces behind an unknown token
@given(prompt=st.sampled_from(["", "the lazy", "hello ", "fox\n", "é"]), numbers=st.lists(st.integers(0, 10**6)))
def test_any_tokens_give_what_decoding_them_at_once_adds_to_the_prompt(tokenizers, name, prompt, numbers):
    tokenizer = tokenizers[name]
    before, ids = tokenizer.encode(prompt), [number % tokenizer.n_vocab for number in numbers]
    whole, start = tokenizer.decode([*before, *ids]), tokenizer.decode(before)
    assert start + "".join(pieces(tokenizer, before, ids)) == whole
