"""Exported weights, tokenizers and cards: read back by transformers, also where nothing of ours can be imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

from lm.export import main
from lm.hf_write import cast, write_model, write_tokenizer
from lm.model import Llama, LlamaConfig
from lm.model_card import model_card
from lm.module import LanguageModule
from lm.sampling import generate
from lm.tokenizers import load_tokenizer
from moa import FFNConfig
from pretrain.errors import UserError
from pretrain.reload import load_module
from tests.lm.runs import train
from tests.lm.test_tokenizers import PAGE, train_bpe

PROMPT = "The state of the union is strong, and naïve ☃"
# What a stranger does, who has transformers and nothing of ours.
STRANGER = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lm", "moa", "pretrain", "vision_mae"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
ids = tokenizer(prompt, return_tensors="pt").input_ids
with torch.no_grad():
    logits = model(ids).logits
drawn = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1]:]
print(json.dumps({
    "class": type(model).__name__, "ids": ids[0].tolist(), "logits": logits[0].tolist(), "drawn": drawn.tolist(),
    "missing": sorted(found["missing_keys"]), "unexpected": sorted(found["unexpected_keys"]),
    "dtype": str(model.dtype), "length": model.config.max_position_embeddings,
}))
"""


@pytest.fixture(scope="module")
def swiglu_run(tmp_path_factory) -> Path:
    """A run of a dense swiglu model, the embedding padded from 257 to 272 rows."""
    runs = tmp_path_factory.mktemp("trained")
    return train(
        runs, model__ffn__kind="swiglu", model__vocab_size=272, trainer__max_steps=4, trainer__val_check_interval=4
    ).folder


@pytest.fixture(scope="module")
def exported(swiglu_run, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("exported") / "out"
    main([f"--checkpoint={swiglu_run}", "--to=hf", f"--output={output}"])
    return output


def refusal(arguments: list[str], capfd) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    return line


def test_a_stranger_loads_the_plain_llama_and_gets_the_same(swiglu_run, exported, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(exported), PROMPT],
        cwd=tmp_path,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    module, _ = load_module(LanguageModule, swiglu_run)
    ids = load_tokenizer("bytes").encode(PROMPT)
    assert (theirs["class"], theirs["ids"]) == ("LlamaForCausalLM", ids)
    assert theirs["missing"] == theirs["unexpected"] == []
    assert (theirs["dtype"], theirs["length"]) == ("torch.float32", 32)
    with torch.no_grad():
        ours = module.model(torch.tensor([ids]))[0]
    torch.testing.assert_close(torch.tensor(theirs["logits"]), ours, atol=1e-5, rtol=0)
    (greedy,) = generate(module.model, [ids], 12, temperature=0, n_vocab=257)
    assert 256 not in greedy
    assert theirs["drawn"] == greedy


def test_the_card_says_what_was_measured_and_counted(swiglu_run, exported):
    card = (exported / "README.md").read_text()
    summary = json.loads((swiglu_run / "summary.json").read_text())
    for name, value in summary["final"].items():
        assert name == "step" or f"| {name} | {value:.4f} |" in card
    for role, number in summary["parameters"]["roles"].items():
        assert not number or f"| {role} | {number:,} | {number:,} |" in card
    assert f"**{summary['parameters']['total']:,}**" in card
    assert f"{summary['tokens_seen']:,} tokens" in card
    assert "272 rows. The last 15 belong to no token" in card


def test_every_file_has_the_permissions_of_the_umask(exported):
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in exported.iterdir()} == {0o666 & ~umask}


def test_the_card_says_what_the_spelling_of_the_last_token_becomes(exported):
    assert "A text that spells `<|endoftext|>` becomes that token" in (exported / "README.md").read_text()


def test_the_card_of_a_checkpoint_has_the_numbers_of_its_own_step(swiglu_run):
    module, run = load_module(LanguageModule, swiglu_run, weights=False)
    summary = {"final": {"step": 8, "val/loss": 2.5}, "best": {"step": 6, "val/loss": 1.25}}

    def card(step: int) -> str:
        return model_card(module.config, run, summary, step, load_tokenizer("bytes"), True, "float32")

    assert "| val/loss | 2.5000 |" in card(8)
    assert "| val/loss | 1.2500 |" in card(6)
    assert "Nothing was measured" in card(7)


def run_code(card: str, folder: Path) -> str:
    code = card.split("```python\n")[1].split("```")[0]
    exec(code.replace("path/to/this/folder", str(folder)), {})
    return code


def test_the_cards_own_code_runs(exported, capsys):
    assert "import lm" not in run_code((exported / "README.md").read_text(), exported)
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_a_folder_with_something_in_it_is_refused_and_an_empty_one_taken(swiglu_run, exported, tmp_path, capfd):
    before = {path: path.read_bytes() for path in exported.iterdir()}
    line = refusal([f"--checkpoint={swiglu_run}", f"--output={exported}"], capfd)
    assert line.startswith("error: ")
    assert f"{exported} exists already" in line
    assert {path: path.read_bytes() for path in exported.iterdir()} == before
    (tmp_path / "empty").mkdir()
    main([f"--checkpoint={swiglu_run}", f"--output={tmp_path / 'empty'}", "--dtype=bfloat16"])
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    weights, exact = (load_file(folder / "model.safetensors") for folder in (tmp_path / "empty", exported))
    assert weights.keys() == exact.keys()
    assert all(torch.equal(weights[name], exact[name].bfloat16()) for name in exact)
    assert json.loads((tmp_path / "empty" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_other_formats_and_missing_runs_are_one_line(tmp_path, capfd):
    assert "gguf" in refusal(["--checkpoint=x", f"--output={tmp_path / 'out'}", "--to=gguf"], capfd)
    assert "does not exist" in refusal([f"--checkpoint={tmp_path / 'x'}", f"--output={tmp_path / 'out'}"], capfd)
    assert list(tmp_path.iterdir()) == []


def test_what_a_smaller_type_cannot_hold_is_refused():
    with pytest.raises(UserError, match="head has values too large for float16"):
        cast({"head": torch.tensor([1e5])}, "float16")
    assert cast({"head": torch.tensor([1e5])}, "bfloat16")["head"].dtype == torch.bfloat16


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    model = Llama(LlamaConfig(256, 8, 1, 1))
    with pytest.raises(UserError, match="257 ids, more than the model's 256 rows"):
        write_model(model, load_tokenizer("bytes"), tmp_path)


@pytest.fixture(scope="module", params=["bytes", "gpt2", "local"])
def twins(request, tmp_path_factory):
    """A tokenizer of ours, and what AutoTokenizer makes of its exported files."""
    folder, name = tmp_path_factory.mktemp("tokenizer"), request.param
    if name == "local":
        name = str(folder / "local.json")
        train_bpe(Path(name), truncation=True)
    ours = load_tokenizer(name)
    assert write_tokenizer(ours, folder, max_length=1 << 20)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return ours, AutoTokenizer.from_pretrained(folder)


def test_an_exported_tokenizer_gives_the_same_ids_for_every_text(twins):
    ours, theirs = twins

    @settings(max_examples=200, deadline=None)
    @given(st.text() | st.text(alphabet="abc \n\t'é☃😀\x00", max_size=40))
    def check(text):
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == ours.decode(ids) == text

    check()
    page = PAGE.replace("<|endoftext|>", "").replace("</s>", "")
    assert theirs(page).input_ids == ours.encode(page)


def test_an_exported_tokenizer_knows_the_end_of_text(twins):
    ours, theirs = twins
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eot
    assert len(theirs) == ours.n_vocab
    assert theirs(f"a{theirs.eos_token}b").input_ids == [*ours.encode("a"), ours.eot, *ours.encode("b")]
    assert theirs.decode([ours.eot, *ours.encode("b")]) == f"{theirs.eos_token}b"
    assert theirs.decode([*ours.encode("b"), ours.n_vocab + 1]) == "b"


def test_a_tokenizer_that_would_add_tokens_adds_none(tmp_path):
    import tokenizers

    engine = train_bpe(tmp_path / "local.json")
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", engine.token_to_id("</s>"))]
    )
    engine.save(str(tmp_path / "local.json"))
    ours = load_tokenizer(str(tmp_path / "local.json"))
    write_tokenizer(ours, tmp_path, 100)
    assert AutoTokenizer.from_pretrained(tmp_path)("hello").input_ids == ours.encode("hello")


def test_sentencepiece_travels_as_its_own_file(swiglu_run, tmp_path, capsys):
    import sentencepiece

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "sp"), vocab_size=40, hard_vocab_limit=False
    )
    ours = load_tokenizer(str(tmp_path / "sp.model"))
    (tmp_path / "out").mkdir()
    assert not write_tokenizer(ours, tmp_path / "out", 100)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.model"]
    peer = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out" / "tokenizer.model"))
    assert peer.encode("the lazy fox") == ours.encode("the lazy fox")

    model = Llama(LlamaConfig(64, 8, 1, 1, FFNConfig("qd-moa")))
    assert not write_model(model, ours, tmp_path / "out")
    _, run = load_module(LanguageModule, swiglu_run, weights=False)
    code = run_code(model_card(model.config, run, {}, 1, ours, False, "float32"), tmp_path / "out")
    assert "import lm.hf" in code
    assert capsys.readouterr().out
