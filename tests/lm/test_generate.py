"""`python -m lm.generate` on a real run: what it writes where, and how it refuses."""

import io
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from lm.generate import main
from lm.module import LanguageModule
from lm.sampling import generate
from lm.tokenizers import BytesTokenizer
from lm.writing import TextStream
from pretrain.reload import load_module
from tests.lm.runs import train

PROMPT = "The state of the Union — "


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("trained"), trainer__max_steps=4).folder


@pytest.fixture
def write(run, capfd):
    """Run the command; return what it has written to stdout and stderr."""

    def call(*arguments: str) -> tuple[str, str]:
        capfd.readouterr()
        main([f"--checkpoint={run}", "--device=cpu", *arguments])
        return capfd.readouterr()

    return call


@pytest.fixture
def refuse(run, capfd):
    """Run the command and check how it is refused; return the line."""

    def call(*arguments: str) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([f"--checkpoint={run}", "--device=cpu", *arguments])
        assert stop.value.code == 2
        shown = capfd.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("error: ")
        assert shown.err.count("\n") == 1
        return shown.err

    return call


def drawn(run: Path, prompts: list[str], n_tokens: int, **settings) -> list[str]:
    """What the command has to write: the reference without a cache, decoded at once."""
    module, _ = load_module(LanguageModule, run)
    ids = [list(prompt.encode()) for prompt in prompts]
    settings = {"end": 256, "n_vocab": 257, "max_length": 32, "use_cache": False} | settings
    return [BytesTokenizer().decode(row) for row in generate(module.model, ids, n_tokens, **settings)]


def test_stdout_holds_the_text_and_nothing_else(run, write):
    out, err = write("--prompt", PROMPT, "--n_tokens=60", "--seed=3")
    (expected,) = drawn(run, [PROMPT], 60, seed=3)
    assert out == PROMPT + expected + "\n"
    first, last = err.splitlines()
    assert first == f"{run}/checkpoints/last.ckpt, cpu, float32"
    assert "prefill 27 tokens in" in last
    assert "decoding 59 tokens in" in last
    assert last.count("tokens/s") == 2


def test_what_is_drawn_is_what_the_options_say(run, write):
    options = {"temperature": 0.5, "top_k": None, "top_p": 0.7, "seed": 1}
    given = [f"--{name}={'null' if value is None else value}" for name, value in options.items()]
    out, _ = write("--prompt", PROMPT, "--n_tokens=20", "--echo=false", *given)
    assert out == drawn(run, [PROMPT], 20, **options)[0] + "\n"


def test_the_text_is_shown_while_it_is_drawn(write, monkeypatch):
    moments: list[tuple[str, int]] = []
    push, shown = TextStream.push, io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(TextStream, "push", lambda *a: (moments.append(shown.getvalue()), push(*a))[1])
    write("--prompt", "a", "--n_tokens=30")
    assert moments[0] == "a"
    assert len(set(moments)) > 10
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(moments))


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_a_file_of_prompts_gives_the_same_in_batches_of_any_size(run, write, tmp_path, suffix):
    prompts = ["Mr. Speaker", "a", "Wörter\u2028 and more", "x" * 50]
    rows = prompts if suffix == "txt" else [json.dumps({"prompt": prompt, "id": 1}) for prompt in prompts]
    (tmp_path / f"prompts.{suffix}").write_text("\ufeff" + "\n\n".join(rows) + "\r\n", encoding="utf-8")
    expected = drawn(run, prompts, 12)
    for size in (1, 3, 16):
        output = tmp_path / "made" / f"{size}.jsonl"
        file = f"--prompts={tmp_path}/prompts.{suffix}"
        out, err = write(file, f"--batch_size={size}", "--n_tokens=12", f"--output={output}")
        assert out == ""
        assert "1 of 4 prompts longer than the model's 32 tokens: their ends count" in err
        written = [json.loads(line) for line in output.read_text(encoding="utf-8").split("\n")[:-1]]
        assert [(row["prompt"], row["text"]) for row in written] == list(zip(prompts, expected, strict=True))
        assert [row["n_tokens"] for row in written] == [12] * 4
        assert [path.name for path in output.parent.glob("*.tmp")] == []
    out, _ = write(file, "--n_tokens=12")
    assert out == "".join(f"{prompt}{text}\n\n" for prompt, text in zip(prompts, expected, strict=True))


def test_prompts_are_taken_literally(run, write, monkeypatch):
    for prompt in ("null", "[1, 2]", "<|endoftext|>"):
        assert write("--prompt", prompt, "--n_tokens=1")[0].startswith(prompt)
    out, err = write("--prompt", "", "--n_tokens=9")
    assert "1 of 1 prompts empty: the text starts a document" in err
    assert out == drawn(run, [""], 9)[0] + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("de stdin: é\n".encode())))
    assert write("--prompt", "-", "--n_tokens=1")[0].startswith("de stdin: é")


def test_a_text_ends_at_its_end(run, write, tmp_path):
    """A model to which all tokens are alike ends after 257 on average."""
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    checkpoint["state_dict"]["model.head.weight"].zero_()
    torch.save(checkpoint, tmp_path / "even.ckpt")  # every token alike: the most likely one is the first, byte 0
    greedy = ("--prompt", "a", "--temperature=0", "--n_tokens=3", "--echo=false", f"--checkpoint={tmp_path}/even.ckpt")
    assert write(*greedy)[0] == "\0\0\0\n"
    output = tmp_path / "out.jsonl"
    write("--prompt", "a", "--top_k=null", "--n_tokens=4000", f"--output={output}", *greedy[-1:])
    row = json.loads(output.read_text())
    assert row["ended"]
    assert row["n_tokens"] < 4000


def test_an_interruption_shows_what_there_is(run, capfd, monkeypatch):
    push = TextStream.push
    calls: list[int] = []

    def interrupted_at_the_tenth(self: TextStream, token: int) -> str:
        calls.append(token)
        if len(calls) == 10:
            signal.raise_signal(signal.SIGINT)
        return push(self, token)

    monkeypatch.setattr(TextStream, "push", interrupted_at_the_tenth)
    with pytest.raises(SystemExit) as stop:
        main([f"--checkpoint={run}", "--device=cpu", "--prompt=My fellow", "--n_tokens=100"])
    assert stop.value.code == 130
    shown = capfd.readouterr()
    assert shown.out == "My fellow" + drawn(run, ["My fellow"], 9)[0] + "\n"
    assert shown.err.splitlines()[-1] == "interrupted"


def test_a_reader_that_has_seen_enough_ends_it_quietly(run, monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        with pytest.raises(SystemExit) as stop:
            main([f"--checkpoint={run}", "--device=cpu", "--prompt=a"])
    assert stop.value.code == 141
    assert capfd.readouterr().err.count("\n") == 1  # the checkpoint's


def test_lower_precision_writes_too(write):
    assert write("--prompt", "a", "--n_tokens=5", "--dtype=bfloat16")[0].startswith("a")


def test_what_is_wrong_is_told_in_one_line(run, refuse, tmp_path, monkeypatch):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    (tmp_path / "torn.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    (tmp_path / "lone.jsonl").write_text('{"prompt": "\\ud800"}\n')
    (tmp_path / "latin.txt").write_bytes(b"one\ncaf\xe9\n")
    for arguments, message in [
        ([], "give either --prompt TEXT or --prompts FILE"),
        (["--prompt=a", "--prompts=b"], "give either"),
        (["--prompt=a", "--temperature=-1"], "temperature is -1"),
        (["--prompt=a", "--top_p=0"], "top_p is 0"),
        (["--prompt=a", "--top_k=0"], "top_k is 0"),
        (["--prompt=a", "--n_tokens=0"], "n_tokens is 0"),
        (["--prompt=a", "--batch_size=0"], "batch_size"),
        (["--prompt=a", "--seed=-1"], "seed is -1"),
        (["--prompt=a", "--device=warp"], "the device 'warp' cannot be used here"),
        (["--prompt=a", "--dtype=int8"], "int8"),
        (["--prompt=a", f"--checkpoint={tmp_path}/none"], "none does not exist"),
        (["--prompt=a", f"--output={run}/config.yaml"], "config.yaml exists already"),
        (["--prompt=a", f"--output={run}/config.yaml/x.jsonl"], "x.jsonl cannot be written"),
        (["--prompt=a\udc80"], "the prompt is no text: a lone surrogate at character 2"),
        ([f"--prompts={tmp_path}/none.txt"], "none.txt cannot be read: No such file"),
        ([f"--prompts={tmp_path}"], "cannot be read: Is a directory"),
        ([f"--prompts={tmp_path}/empty.txt"], "empty.txt holds no prompts: one a line"),
        ([f"--prompts={tmp_path}/broken.jsonl"], 'broken.jsonl, row 2 has no text called "prompt"'),
        ([f"--prompts={tmp_path}/torn.jsonl"], "torn.jsonl, row 2 is no JSON"),
        ([f"--prompts={tmp_path}/lone.jsonl"], "lone.jsonl, row 1 is no text: a lone surrogate"),
        ([f"--prompts={tmp_path}/latin.txt"], "latin.txt, line 2 is no UTF-8 text"),
    ]:
        assert message in refuse(*arguments)
    assert "no readable checkpoint" in refuse("--prompt=a", f"--checkpoint={run}/config.yaml")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    assert "standard input, line 1 is no UTF-8 text" in refuse("--prompt=-")
