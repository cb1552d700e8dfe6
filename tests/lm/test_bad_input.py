"""Every mistake is one line that says what, where and what to do, exit code 2, and nothing is left behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from lm.data.prepared import prepare
from lm.fit import main
from pretrain.run import claimed
from tests.lm.runs import arguments, train
from tests.runs import run_folder


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("trained"), trainer__max_steps=2).folder


@pytest.fixture
def refuse(tmp_path, capfd):
    """Run the command, check how it is refused, and return the line."""

    def call(*extra: str, without: tuple[str, ...] = ("none",), **changes) -> str:
        runs = tmp_path / "runs"
        small = [arg for arg in arguments(runs, **changes) if not arg.startswith(without)]
        args = [*small, *extra]
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == 2
        lines = capfd.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        assert not runs.exists()
        return lines[0]

    return call


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model__d_modle": 3}, ["d_modle", "did you mean model.d_model?"]),
        ({"modle__d_model": 3}, ["modle.d_model", "did you mean model.d_model?"]),
        ({"model__d_model": "wide"}, ["model.d_model", "wide", "int"]),
        ({"model__d_model": 33}, ["model.d_model 33", "model.n_heads 2"]),
        ({"model__n_layers": 0}, ["model.n_layers is 0"]),
        ({"model__ffn__kind": "swigloo"}, ["swigloo", "swiglu", "qd-moa"]),
        ({"model__ffn__activations": "[gelu, foo]"}, ["foo", "leaky_relu"]),
        ({"model__ffn__gate": "hard"}, ["hard", "softmax"]),
        ({"model__ffn__kind": "swiglu", "model__ffn__gate": "tanh"}, ["does not apply", "qd-moa"]),
        ({"model__moe": "{n_experts: 2, top_k: 3}"}, ["error: model.moe.top_k is 3: there are only"]),
        ({"model__activation_checkpointing": "some"}, ["model.activation_checkpointing", "some", "selective"]),
        ({"model__vocab_size": 100}, ["model.vocab_size 100", "257", "bytes"]),
        ({"model__optimizer__lr": -1}, ["optimizer.lr is -1"]),
        ({"model__optimizer__base_lr": 1e-3}, ["lr and base_lr"]),
        ({"model__schedule__name": "linear"}, ["linear", "cosine", "wsd"]),
        ({"model__schedule__name": "wsd", "model__schedule__warmup_steps": 18}, ["warm-up of 18", "20 steps"]),
        ({"data__global_batch_size": 10, "data__micro_batch_size": 4}, ["no multiple", "8 or 12"]),
        ({"data__micro_batch_size": 0}, ["data.micro_batch_size is 0"]),
        ({"data__sequence_length": 0}, ["data.sequence_length is 0"]),
        ({"data__num_workers": -1}, ["data.num_workers is -1"]),
        ({"data__source": "missing.txt"}, ["missing.txt", "no such file"]),
        ({"data__source": "none-*.jsonl"}, ["none-*.jsonl", "matches nothing"]),
        ({"data__tokenizer": "missing.model"}, ["missing.model", "no such tokenizer"]),
        ({"trainer__max_steps": -1}, ["no end", "trainer.max_epochs"]),
        ({"trainer__accumulate_grad_batches": 2}, ["derived", "data.micro_batch_size"]),
        ({"trainer__gradient_clip_val": -1}, ["trainer.gradient_clip_val is -1"]),
        ({"trainer__gradient_clip_val": ".nan"}, ["trainer.gradient_clip_val is nan"]),
        ({"trainer__check_val_every_n_epoch": -3}, ["trainer.check_val_every_n_epoch is -3"]),
        ({"trainer__max_steps": 10**21}, ["trainer.max_steps", "more steps than can be counted"]),
        ({"trainer__devices": 10**6}, ["trainer.devices is 1,000,000", "GB"]),
        ({"trainer__devices": "-1"}, ["devices"]),
        ({"trainer__plugins": "foo"}, ["trainer.plugins", "foo"]),
        ({"model__d_model": 10**9}, ["parameters", "GB", "make it smaller"]),
        ({"model__vocab_size": 10**12}, ["parameters", "GB", "make it smaller"]),
        ({"model__n_layers": 10**9}, ["model.n_layers is 1000000000"]),
        ({"model__ffn__hidden_features": 10**30}, ["hidden_features", "at most 2^40"]),
        ({"model__moe": f"{{n_experts: 2, top_k: 1, n_shared: {10**30}}}"}, ["at most 2^40"]),
        ({"model__moe": "{n_experts: 2, top_k: 1, z_loss: .nan}"}, ["model.moe.z_loss is nan"]),
        ({"model__ffn__coefficient_init": ".inf"}, ["ffn.coefficient_init is inf"]),
        ({"data__sequence_length": 10**12}, ["data.micro_batch_size is 2", "GB", "the samples smaller"]),
        ({"data__micro_batch_size": 10**12}, ["data.micro_batch_size is 1,000,000,000,000", "GB"]),
        ({"data__global_batch_size": 10**14}, ["data.global_batch_size is 100,000,000,000,000", "GB"]),
        ({"data__num_workers": 10**6}, ["data.num_workers is 1000000", "at most 1024"]),
        ({"data__source": "/dev/zero"}, ["data.source is /dev/zero", "a pipe or a device"]),
        ({"data": "lm/assets/sotu/train.jsonl"}, ["train.jsonl has more than 256 kB"]),
        ({"model": "/dev/zero"}, ["model is /dev/zero"]),
        ({"data__source": "a" * 5000}, ["File name too long"]),
        ({"data__source": "~nobody-of-this-name/a.txt"}, ["unknown here"]),
        ({"seed_everything": 10**20}, ["seed_everything", "<4294967296"]),
        ({"tokens_per_parameter": ".inf"}, ["tokens_per_parameter", "a number above 0"]),
        ({"name": ".."}, ["name '..'"]),
        ({"name": "a" * 300}, ["has to be the name of one folder"]),
        ({"model__ffn__kind": "\x1b[31mred"}, ["\\x1b[31mred"]),
        ({"trainer__val_check_interval": 0}, ["trainer.val_check_interval is 0"]),
        ({"trainer__log_every_n_steps": 0}, ["trainer.log_every_n_steps is 0"]),
        ({"tokens_per_parameter": -1}, ["tokens_per_parameter", "above 0"]),
        ({"seed_everything": -1}, ["seed_everything", "-1"]),
        ({"data__seed": -1}, ["data.seed is -1"]),
        ({"name": "../out"}, ["name '../out'"]),
        ({"model__ffn__hidden_features": 0}, ["hidden_features", "0"]),
        ({"model__init_std": -1}, ["model.init_std is -1"]),
        ({"model__norm_eps": -1}, ["model.norm_eps is -1"]),
        ({"model__rope_base": 0}, ["model.rope_base is 0"]),
        ({"checkpoint_every_n_steps": 0}, ["checkpoint_every_n_steps"]),
        ({"resume": "missing"}, ["missing", "does not exist"]),
        ({"init_from": "missing"}, ["missing", "does not exist"]),
        ({"init_from": "hf:missing"}, ["hf:missing", "no such folder"]),
        ({"config": "missing.yaml"}, ["missing.yaml", "not exist"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_in_the_configuration(refuse, changes, parts):
    line = refuse(**changes)
    for part in parts:
        assert part in line


def test_an_unknown_key_in_a_file(refuse, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("model:\n  d_modle: 3\n")
    line = refuse(f"--config={config}")
    assert "d_modle" in line


def test_a_broken_row_is_named_and_leaves_no_cache(refuse, tmp_path, monkeypatch):
    monkeypatch.setenv("MOA_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "fine"}\n{"text": broken}\n')
    line = refuse(data__source=text)
    assert f"{text}, row 2" in line
    assert "--data.max_bad" in line
    assert list((tmp_path / "cache").glob("*")) == []


def test_undecodable_text_is_named(refuse, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"union \xff")
    assert "not UTF-8 at byte 7" in refuse(data__source=text)


def test_one_document_cannot_be_held_out(refuse, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one document")
    assert "data.val_source" in refuse(data__source=text)


def test_a_prepared_folder_of_another_tokenizer(refuse, tmp_path):
    prepare(str(Path("lm/assets/sotu/val.jsonl").resolve()), tmp_path / "prepared", "gpt2", val_fraction=0.2)
    line = refuse(data__source=tmp_path / "prepared")
    for part in (str(tmp_path / "prepared"), "gpt2", "bytes"):
        assert part in line


def test_a_checkpoint_of_another_architecture(refuse, small_run):
    line = refuse(init_from=small_run, model__n_layers=3)
    assert "another architecture" in line
    assert "blocks.2" in line
    assert "of another shape" in refuse(init_from=small_run, model__d_model=64)


def test_a_damaged_checkpoint(refuse, small_run, tmp_path):
    torn = tmp_path / "torn.ckpt"
    torn.write_bytes((small_run / "checkpoints" / "last.ckpt").read_bytes()[:5000])
    assert "no readable checkpoint" in refuse(init_from=torn)


def test_a_checkpoint_that_would_run_code_is_refused(refuse, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    torch.save({"state_dict": {}, "x": Evil()}, tmp_path / "evil.ckpt")
    assert "no readable checkpoint" in refuse(init_from=tmp_path / "evil.ckpt")
    assert not (tmp_path / "ran").exists()


def test_resuming_with_other_data_or_at_the_end(refuse, small_run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(small_run, copy)
    assert "at step 2, and the run ends at 2" in refuse(f"--resume={copy}", without=("--",))
    other = refuse(f"--resume={copy}", "--trainer.max_steps=4", "--data.source=demo:train", without=("--",))
    assert "n_samples" in other


def test_an_empty_text_has_nothing_to_train_on(refuse, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert "holds no documents" in refuse(data__source=tmp_path / "empty.txt")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: {d_model: 32}\nmodel: {n_layers: 1}\n", ["line 2", "'model'", "twice"]),
        ("", ["holds no keys"]),
        ("- a\n- b\n", ["holds no keys"]),
        ("model:\n\td_model: 3\n", ["cannot be read"]),
        ("resume: runs/a\n", ["--resume"]),
    ],
)
def test_a_configuration_that_would_be_misread(refuse, tmp_path, text, parts):
    config = tmp_path / "mine.yaml"
    config.write_text(text)
    line = refuse(f"--config={config}")
    for part in (str(config), *parts):
        assert part in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.optimizer.lr", 1e-3),
        ("model.ffn.kind", "geglu"),
        ("model.n_heads", 1),
        ("seed_everything", 1),
        ("data.sequence_length", 16),
        ("name", "other"),
    ],
)
def test_a_resumed_run_goes_on_as_before_or_not_at_all(refuse, small_run, key, value):
    before = sorted(small_run.iterdir())
    line = refuse(f"--resume={small_run}", "--trainer.max_steps=4", f"--{key}={value}", without=("--",))
    assert f"error: {key} was " in line
    assert "--init_from" in line
    assert sorted(small_run.iterdir()) == before


@pytest.mark.parametrize(("key", "value"), [("ffn.gate", "tanh"), ("n_heads", 1), ("rope_base", 500.0)])
def test_weights_of_equal_shapes_that_would_mean_something_else(refuse, small_run, key, value):
    line = refuse(init_from=small_run, **{f"model__{key.replace('.', '__')}": value})
    assert f"model.{key}" in line
    assert "mean something else" in line


def test_a_checkpoint_without_what_a_resume_needs(refuse, small_run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(small_run, copy)
    last = copy / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    del content["loops"]
    torch.save(content, last)
    assert "no loops" in refuse(f"--resume={last}", "--trainer.max_steps=4", without=("--",))


def test_a_folder_that_cannot_be_made(tmp_path, capfd):
    with pytest.raises(SystemExit) as stop:
        main(arguments(Path("/dev/null/runs")))
    assert stop.value.code == 2
    assert "cannot be made" in capfd.readouterr().err


def test_a_run_folder_belongs_to_one_process(small_run, tmp_path, capfd):
    copy = tmp_path / "copy"
    shutil.copytree(small_run, copy)
    with claimed(copy, anew=False), pytest.raises(SystemExit) as stop:
        main([f"--resume={copy}", "--trainer.max_steps=4"])
    assert stop.value.code == 2
    assert "another process trains in" in capfd.readouterr().err


def test_a_diverged_run_says_so(tmp_path, capfd):
    with pytest.raises(SystemExit) as stop:
        main(arguments(tmp_path, model__optimizer__lr=1e30, model__schedule__warmup_steps=0))
    assert stop.value.code == 2
    line = capfd.readouterr().err.strip().splitlines()[-1]
    assert "the gradient is not finite at step 12, the last of 11 in a row" in line
    assert line.endswith("there is no checkpoint yet")  # one of such weights would be of no use
    summary = json.loads((run_folder(tmp_path) / "summary.json").read_text())
    assert summary["exit_state"] == "diverged"
