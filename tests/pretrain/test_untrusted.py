"""Checkpoints from anybody: nothing is executed, imported or read, and no memory is taken for what they only claim."""

import contextlib
import copy
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.module import TextData
from lm.module import LanguageModule
from pretrain.checkpoint import read_checkpoint
from pretrain.errors import UserError
from pretrain.reload import load_module
from tests.lm.runs import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = train(tmp_path_factory.mktemp("untrusted"), trainer__max_steps=1, trainer__limit_val_batches=1).folder
    return folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def content(trained) -> dict:
    return torch.load(trained, weights_only=True)


def refused(file: Path, content=None, load=read_checkpoint) -> str:
    if content is not None:
        torch.save(content, file)
    with pytest.raises(UserError) as error:
        load(file)
    assert "\n" not in str(error.value)
    return str(error.value)


def load_lm(file: Path):
    return load_module(LanguageModule, file, data_class=TextData)


def recompressed(source: Path, target: Path, change=lambda name, data: data, method=zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


def test_the_checkpoint_itself_is_read(trained, tmp_path):
    module, config = load_lm(recompressed(trained, tmp_path / "a.ckpt"))
    assert module.model is not None
    assert config["data"]["tokenizer"] == "bytes"


def test_a_compressed_one_could_become_of_any_size(tmp_path):
    torch.save({"state_dict": {"a": torch.zeros(1_000_000)}}, tmp_path / "a.ckpt")
    bomb = recompressed(tmp_path / "a.ckpt", tmp_path / "b.ckpt", method=zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 10_000
    assert "it is compressed" in refused(bomb)


def test_parts_that_share_their_bytes_are_refused(tmp_path, monkeypatch):
    torch.save({"state_dict": {"a": torch.zeros(1000)}}, tmp_path / "a.ckpt")
    entries = zipfile.ZipFile(tmp_path / "a.ckpt").infolist()
    monkeypatch.setattr(zipfile.ZipFile, "infolist", lambda archive: entries * 3)
    assert "larger than the file" in refused(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1).expand(10**6, 10**6),
        torch.empty(10**6, 10**6, device="meta"),
        torch.zeros(3).to_sparse(),
        3,
        [torch.zeros(3)],
        None,
    ],
    ids=["expanded", "meta", "sparse", "number", "list", "none"],
)
def test_weights_that_are_no_numbers_of_their_own(tmp_path, value):
    assert "no readable checkpoint" in refused(tmp_path / "a.ckpt", {"state_dict": {"a": value}})


def test_a_tensor_anywhere_has_its_numbers(content, tmp_path):
    content = copy.deepcopy(content)
    content["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(1).expand(10**6, 10**6)
    assert "has not as many numbers" in refused(tmp_path / "a.ckpt", content)


def test_a_storage_that_is_shorter_than_it_claims(trained, tmp_path):
    cut = recompressed(trained, tmp_path / "a.ckpt", lambda name, data: data[:8] if "/data/" in name else data)
    assert "no readable checkpoint" in refused(cut)


def test_what_contains_itself_is_refused(content, tmp_path):
    loop: list = []
    loop.append(loop)
    config = content["config"]
    assert "no end" in refused(tmp_path / "a.ckpt", content | {"config": config | {"model": {"a": loop}}})
    wide: list = []
    for _ in range(30):
        wide = [wide, wide]
    assert "no end" in refused(tmp_path / "a.ckpt", content | {"config": config | {"model": {"a": wide}}})


@pytest.mark.parametrize("step", [-1, float("nan"), "3", True, None])
def test_a_step_is_a_count(content, tmp_path, step):
    assert "global_step" in refused(tmp_path / "a.ckpt", content | {"global_step": step})


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("model", "d_model", 10**9),
        ("model", "n_layers", 10**9),
        ("model", "vocab_size", 10**15),
        ("model", "norm_eps", float("nan")),
        ("model", "rope_base", "wide"),
        ("model", "ffn", {"class_path": "antigravity.Model"}),
        ("model", "ffn", "/dev/zero"),
        ("model", "ffn", {"kind": "swigloo"}),
        ("model", "moe", "/dev/zero"),
        ("model", "new", 3),
        ("data", "sequence_length", "long"),
        ("data", "tokenizer", 3),
        ("data", "source", ["a"]),
    ],
)
def test_settings_in_a_checkpoint_are_checked_before_memory_is_taken(content, tmp_path, part, key, value):
    changed = copy.deepcopy(content["config"])
    changed[part][key] = value
    assert "a.ckpt" in refused(tmp_path / "a.ckpt", content | {"config": changed}, load_lm)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_byte_changed_in_a_checkpoint_executes_nothing_and_ends_in_one_line(trained, data):
    original = trained.read_bytes()
    file = trained.parent / "changed.ckpt"
    changed = bytearray(original)
    # The structure is at both ends; what lies between are numbers.
    place = data.draw(st.one_of(st.integers(0, 8000), st.integers(len(changed) - 8000, len(changed) - 1)))
    changed[place] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(changed))
    try:
        with contextlib.suppress(UserError):
            assert isinstance(read_checkpoint(file)["state_dict"], dict)
    finally:
        file.unlink()
