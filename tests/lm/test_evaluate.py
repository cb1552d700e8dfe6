"""Evaluation on text: windows and bytes against brute force, and the command as its users call it."""

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.data.documents import read_documents
from lm.data.module import VENDORED, TextData
from lm.data.prepared import open_prepared, prepare
from lm.data.whole import WholeDocuments, open_documents, split_documents
from lm.evaluate import main
from lm.evaluation import WindowScorer, evaluate_text, sliding_windows
from lm.model import Llama, LlamaConfig
from lm.moe import MoEConfig
from moa import FFNConfig
from tests.lm.runs import train

TEXTS = ["A short one.", "ünïcödé 日本語 😀", "x", "the state of the union is strong " * 3]
EOT, N_VOCAB = 256, 257


def model_of(vocab_size: int = N_VOCAB, moe: MoEConfig | None = None) -> Llama:
    torch.manual_seed(0)
    ffn = FFNConfig("swiglu" if moe else "qd-moa")
    return Llama(LlamaConfig(vocab_size, 16, 2, 2, ffn, init_std=0.3, moe=moe)).eval()


def documents(texts: list[str]) -> WholeDocuments:
    pairs = ((np.frombuffer(text.encode(), dtype=np.uint8), len(text.encode())) for text in texts)
    return WholeDocuments("texts", pairs)


def write_texts(folder: Path, texts: list[str] = TEXTS, field: str = "text") -> str:
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(file)


def evaluated(model: Llama, texts: list[str], length: int = 16, stride: int = 5, batch_size: int = 3, **changes):
    scorer = WindowScorer(model, batch_size, **{"n_vocab": N_VOCAB} | changes)
    return evaluate_text(scorer, documents(texts), EOT, length, stride)


def loss_of_each_token(model: Llama, tokens: list[int], length: int, stride: int) -> list[float]:
    """Each token with a forward pass of its own, over what it may see."""
    losses = []
    last = len(tokens) - 1
    for position in range(1, len(tokens)):
        further = max(0, math.ceil((position - length) / stride))
        end = min(length + further * stride, last)
        seen = tokens[max(0, end - length) : position]
        with torch.no_grad():
            logits = model(torch.tensor([seen]))[0, -1, :N_VOCAB]
        losses.append(-float(logits.double().log_softmax(-1)[tokens[position]]))
    return losses


@pytest.mark.parametrize(("length", "stride"), [(16, 5), (16, 16), (16, 1), (1, 1), (200, 100)])
@pytest.mark.parametrize("moe", [None, MoEConfig(n_experts=4, top_k=2)])
def test_every_token_is_scored_as_by_a_forward_pass_of_its_own(length, stride, moe):
    model = model_of(moe=moe)
    losses = [loss for text in TEXTS for loss in loss_of_each_token(model, [EOT, *text.encode(), EOT], length, stride)]
    found = evaluated(model, TEXTS, length, stride)
    assert found.tokens == len(losses) == sum(len(text.encode()) + 1 for text in TEXTS)
    assert found.documents == len(TEXTS)
    assert found.nats == pytest.approx(math.fsum(losses), rel=1e-6)
    assert found.bytes == sum(len(text.encode()) for text in TEXTS)
    assert found.loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2) * found.tokens / found.bytes)


@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_windows_cover_each_token_once_with_the_context_they_promise(n_tokens, length, data):
    stride = data.draw(st.integers(1, length))
    scored = []
    for window in sliding_windows(range(n_tokens), length, stride):
        targets = list(window.tokens)[len(window.tokens) - window.n_scored :]
        assert 1 < len(window.tokens) <= length + 1
        for target in targets:
            seen = target - window.tokens[0]
            assert seen >= min(target, length - stride + 1)
        scored += targets
    assert scored == list(range(1, n_tokens))


def test_order_of_documents_and_batch_size_change_nothing():
    model = model_of()
    expected = evaluated(model, TEXTS)
    for texts, batch_size in ((TEXTS[::-1], 3), (TEXTS, 1), (TEXTS, 100)):
        found = evaluated(model, texts, batch_size=batch_size)
        assert found.nats == pytest.approx(expected.nats, rel=1e-6)
        assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-6)


def test_padding_of_the_vocabulary_changes_nothing():
    model, padded = model_of(), model_of(320)
    weights = model.state_dict()
    for name in ("embed.weight", "head.weight"):
        weights[name] = torch.cat((weights[name], torch.full((320 - N_VOCAB, 16), 3.0)))
    padded.load_state_dict(weights)
    assert evaluated(padded, TEXTS).nats == pytest.approx(evaluated(model, TEXTS).nats, rel=1e-6)
    assert evaluated(padded, TEXTS, n_vocab=None).nats > 1.01 * evaluated(model, TEXTS).nats


def test_bfloat16_is_near_float32():
    model = model_of()
    assert evaluated(model, TEXTS, precision="bfloat16").nats == pytest.approx(evaluated(model, TEXTS).nats, rel=0.02)


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_a_prepared_stream_falls_into_its_documents(tmp_path, block):
    prepare(write_texts(tmp_path), tmp_path / "out", "bytes", shard_tokens=10)
    found = [bytes(tokens.tolist()).decode() for tokens in split_documents(open_prepared(tmp_path / "out"), block)]
    assert found == TEXTS


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_prepared_documents_have_the_tokens_and_bytes_of_the_text(tmp_path, tokenizer):
    source = write_texts(tmp_path)
    prepare(source, tmp_path / "out", tokenizer)
    data = TextData("demo:val", tokenizer=tokenizer)
    prepared, direct = open_documents(data, str(tmp_path / "out")), open_documents(data, source)
    pairs = list(zip(prepared.documents, direct.documents, strict=True))
    for (tokens, size), (tokens_too, size_too) in pairs:
        assert size == size_too
        assert np.array_equal(tokens, tokens_too)
    assert prepared.n_bytes == sum(size for (_, size), _ in pairs) == direct.report.bytes
    assert prepared.n_tokens == sum(len(tokens) + 1 for (tokens, _), _ in pairs)


def test_a_prepared_source_gives_what_it_holds_out(tmp_path):
    prepare(write_texts(tmp_path), tmp_path / "out", "bytes", val_fraction=0.25)
    found = open_documents(TextData("demo:val", tokenizer="bytes"), str(tmp_path / "out"))
    assert [bytes(tokens.tolist()).decode() for tokens, _ in found.documents] == [TEXTS[1]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("evaluated")).folder


def evaluate(run: Path, *arguments: str) -> dict:
    main(["--checkpoint", str(run), *arguments])
    return json.loads((run / "evaluation.json").read_text())


def test_a_run_is_evaluated_on_the_text_it_has_held_out(run, capsys):
    found = evaluate(run)
    texts = list(read_documents(str(VENDORED["demo:val"])))
    assert found["source"] == "demo:val (held out)"
    assert (found["documents"], found["window"], found["stride"], found["tokenizer"]) == (1, 32, 16, "bytes")
    assert found["bytes"] == len(texts[1].encode()) == found["tokens"] - 1
    shown = capsys.readouterr().out
    assert f"bits per byte  {found['bits_per_byte']:.4f}" in shown
    assert f"written to {run / 'evaluation.json'}" in shown
    # Validation during training sees less context per token.
    logged = json.loads((run / "summary.json").read_text())["final"]["val/bpb"]
    assert found["bits_per_byte"] == pytest.approx(logged, rel=0.1)


def test_a_source_a_limit_and_an_output_of_ones_own(run, tmp_path):
    source = ("--data.source", write_texts(tmp_path, [*TEXTS, ""], "words"), "--data.text_field=words")
    all_of_it = evaluate(run, *source, "--window=24", "--stride=8")
    assert (all_of_it["documents"], all_of_it["left_out"]) == (4, 1)
    main(["--checkpoint", str(run), *source, "--limit=2", "--output", str(tmp_path / "mine.json")])
    mine = json.loads((tmp_path / "mine.json").read_text())
    assert (mine["documents"], mine["bytes"]) == (2, sum(len(text.encode()) for text in TEXTS[:2]))
    assert json.loads((run / "evaluation.json").read_text()) == all_of_it


def test_only_an_earlier_evaluation_is_replaced(run, tmp_path, capsys):
    (tmp_path / "page.txt").write_text(TEXTS[3])
    arguments = ["--checkpoint", str(run), "--data.source", str(tmp_path / "page.txt"), "--output"]
    earlier = tmp_path / "earlier.json"
    for _ in range(2):
        main([*arguments, str(earlier)])
    facts = dict.fromkeys(("checkpoint", "window", "limit", "device", "dtype"))
    earlier.write_text(json.dumps({"results": {}, "config": {"model_args": facts}}))  # one of tasks
    main([*arguments, str(earlier)])
    assert json.loads(earlier.read_text())["documents"] == 1

    for name, content in {
        "page.txt": TEXTS[3],
        "list.json": "[1]",
        "other.json": '{"checkpoint": "a", "config": {"model_args": "b"}}',
        "deep.json": "[" * 100_000,
        "latin.txt": "caf\udce9",
    }.items():
        file = tmp_path / name
        file.write_text(content, errors="surrogateescape")
        before = file.read_bytes()
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main([*arguments[:2], "--output", str(file)])
        assert f"--output {file} exists and is no earlier evaluation" in capsys.readouterr().err
        assert file.read_bytes() == before


def test_the_command_equals_brute_force_on_the_checkpoint(run, tmp_path):
    (tmp_path / "page.txt").write_text(TEXTS[3])
    found = evaluate(run, "--data.source", str(tmp_path / "page.txt"), "--stride=7")
    model = Llama(LlamaConfig(320, 32, 2, 2, FFNConfig("qd-moa")))
    weights = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()})
    losses = loss_of_each_token(model, [EOT, *TEXTS[3].encode(), EOT], 32, 7)
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_a_checkpoint_that_lies_alone_has_its_evaluation_beside_it(run, tmp_path):
    shutil.copy(run / "checkpoints" / "last.ckpt", tmp_path / "alone.ckpt")
    main(["--checkpoint", str(tmp_path / "alone.ckpt"), "--data.source=demo:val", "--limit=1", "--window=64"])
    assert json.loads((tmp_path / "evaluation.json").read_text())["documents"] == 1


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--data.source=missing.txt"], ["missing.txt", "no such file"]),
        (["--data.source=none-*.txt"], ["matches nothing"]),
        (["--data.source=empty.txt"], ["empty.txt", "no documents", "give one with text in it"]),
        (["--data.source=broken.jsonl"], ["broken.jsonl, row 1", "not JSON"]),
        (["--data.source=demo:train", "--data.text_field=words"], ["no field 'words'"]),
        (["--data.source=demo:nothing"], ["demo:nothing", "demo:val"]),
        (["--data.tokenizer=gpt2"], ["50257", "320"]),
        (["--data.source=tokens"], ["tokens", "gpt2"]),
        (["--stride=33"], ["--stride 33", "32"]),
        (["--stride=0"], ["--stride is 0"]),
        (["--limit=0"], ["--limit is 0"]),
        (["--batch_size=0"], ["--batch_size is 0"]),
        (["--device=nowhere"], ["nowhere", "give auto, cpu, cuda or cuda:N"]),
        (["--device=meta"], ["'meta' cannot be used here: give auto, cpu, cuda or cuda:N"]),
        (["--device=mkldnn"], ["'mkldnn' cannot be used here: give auto, cpu, cuda or cuda:N"]),
        (["--data.source=demo:val", "--data.max_bad=-1"], ["data.max_bad is -1: it has to be 0 or more"]),
        (["--dtype=float8"], ["float8", "bfloat16"]),
        (["--num_fewshot=1"], ["--num_fewshot", "--tasks"]),
        (["--include_path=."], ["--include_path", "--tasks"]),
        (["--tasks=arc_easy", "--stride=3"], ["--stride", "text"]),
        (["--tasks=arc_easy", "--data.source=x"], ["--data.source", "text"]),
        (["--data.sorce=x"], ["data.sorce"]),
        (["--output=."], ["--output . is a folder"]),
        (["--output=empty.txt/x"], ["empty.txt/x cannot be written", "no writable folder"]),
        (["--output=broken.jsonl"], ["--output broken.jsonl exists and is no earlier evaluation"]),
        (["--tasks=arc_easy"], ["moa-pretrain[eval]"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, tmp_path, monkeypatch, capfd, arguments, parts):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    (tmp_path / "empty.txt").touch()
    (tmp_path / "broken.jsonl").write_text("{\n")
    if "--data.source=tokens" in arguments:
        prepare(str(VENDORED["demo:val"]), tmp_path / "tokens", "gpt2", max_tokens=10)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stop:
        main(["--checkpoint", str(run), *arguments])
    assert stop.value.code == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]
    assert sorted(tmp_path.iterdir()) == before


def test_without_a_checkpoint_or_held_out_text_it_says_so(run, tmp_path, capfd):
    for place, message in ((tmp_path, "holds no checkpoints/last.ckpt"), (tmp_path / "gone", "does not exist")):
        with pytest.raises(SystemExit) as stop:
            main(["--checkpoint", str(place)])
        assert stop.value.code == 2
        assert message in capfd.readouterr().err
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    checkpoint["config"]["data"]["val_fraction"] = 0.0
    torch.save(checkpoint, tmp_path / "nothing.ckpt")
    with pytest.raises(SystemExit):
        main(["--checkpoint", str(tmp_path / "nothing.ckpt")])
    assert "held out no text: give some with --data.source" in capfd.readouterr().err
