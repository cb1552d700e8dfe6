"""Documents of any bytes, files that change while they are read, and prepared folders that anybody may have made."""

import contextlib
import gzip
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lm.data.documents
import lm.data.prepared
from lm.data.documents import ReadReport, read_documents
from lm.data.packing import PackedTokens
from lm.data.prepared import cached_prepare, prepare
from lm.data.split import PreparedSplit, check_tokenizer, open_prepared
from lm.tokenizers import load_tokenizer
from pretrain.errors import UserError
from pretrain.loader import EvaluationLoader, TrainLoader

QUIET = {"workers": 1, "progress": False}
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
# What no table of characters holds: controls, NUL, line ends of all kinds, a byte-order mark, the end-of-text itself.
ODD = ["\0", "\r\n", "\x85\u2028", "\ufeff", "<|endoftext|>", "\x1b[2J", "\ud7ff\ue000", "\U0010ffff", " ", "\n\n"]


def rows_of(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def refused(source, **settings) -> str:
    with pytest.raises(UserError) as error:
        list(read_documents(str(source), **settings))
    assert "\n" not in str(error.value)
    return str(error.value)


@settings(max_examples=15, deadline=None)
@example(ODD, 2)
@given(st.lists(ANY_TEXT, min_size=1, max_size=8), st.integers(1, 3))
def test_bytes_in_are_bytes_out_however_documents_are_spread_over_files(texts, n_files):
    texts = [*texts, "x"]  # an empty document is left out, and nothing but empty ones is an error
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(n_files):
            part = texts[number * len(texts) // n_files : (number + 1) * len(texts) // n_files]
            (folder / f"{number}.jsonl").write_bytes(rows_of(part))
        (folder / "all").mkdir()
        (folder / "all" / "all.jsonl").write_bytes(rows_of(texts))
        report = ReadReport()
        kept = [text for text in texts if text]
        assert list(read_documents(f"{folder}/*.jsonl", report=report)) == kept
        assert (report.documents, report.empty) == (len(kept), len(texts) - len(kept))
        prepare(f"{folder}/*.jsonl", folder / "parts", "bytes", shard_tokens=11, **QUIET)
        prepare(str(folder / "all"), folder / "whole", "bytes", **QUIET)
        parts, whole = open_prepared(folder / "parts"), open_prepared(folder / "whole")
        stream = parts.read(0, parts.n_tokens)
        assert stream.tolist() == whole.read(0, whole.n_tokens).tolist()
        assert [t for text in kept for t in [*text.encode(), 256]] == stream.tolist()
        assert parts.n_bytes == sum(len(text.encode()) for text in kept)


@settings(max_examples=60, deadline=None)
@example(b'{"text": "\\ud800"}')
@example(b'{"text": ["a"]}\n[1]\nnull\n{"txt": "a"}\n')
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"text": "a", "text": "b"}\n')
@example(b"1" * 5000)
@given(st.one_of(st.binary(max_size=200), st.lists(st.text(max_size=20), max_size=4).map(repr).map(str.encode)))
def test_any_bytes_are_documents_or_broken_rows_that_are_counted(data):
    with tempfile.TemporaryDirectory() as name:
        file, report = Path(name) / "a.jsonl", ReadReport()
        file.write_bytes(data)
        n_rows = sum(bool(line.strip(b" \t\r\n")) for line in data.split(b"\n"))
        texts: list[str] = []
        with contextlib.suppress(UserError):  # no documents at all
            texts += read_documents(str(file), max_bad=10**6, report=report)
        assert len(texts) == report.documents
        assert report.documents + report.empty + report.bad == n_rows
        assert all(text.encode("utf-8") for text in texts)


def test_a_line_of_50_million_characters_is_a_document(tmp_path):
    text = "ab\\n" * 12_500_000
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}\n{{"text": "end"}}\n')
    manifest = prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", "bytes", **QUIET)
    assert manifest.splits["train"].tokens == 37_500_000 + 1 + 3 + 1
    split = open_prepared(tmp_path / "out")
    assert bytes(split.read(37_499_998, 37_500_000).astype(np.uint8)) == b"b\n"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_a_document_that_memory_could_not_hold_is_told_before_it_is_read(tmp_path, name, monkeypatch):
    monkeypatch.setattr(lm.data.documents, "host_memory", lambda: 16 * 1000)
    monkeypatch.setattr(lm.data.documents, "READ_BYTES", 100)
    content = b"a" * 10_000
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert f"{name}, row 1: more than 1,000 bytes" in refused(tmp_path / name)


def test_what_is_no_file_is_refused_and_never_opened(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe.txt.gz")
    for source in (tmp_path / "pipe", tmp_path / "pipe.jsonl", tmp_path / "pipe.txt.gz", "/dev/zero", "/dev/null"):
        assert "is a pipe or a device" in refused(source)
    assert "holds no file to read" in refused(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "is a pipe or a device" in refused("pipe")
    assert "unknown" in refused("~nobody-of-this-name/a.txt")
    assert "NUL" in refused("a\0.txt")


@pytest.mark.parametrize("change", ["grows", "shrinks", "goes", "is replaced"])
def test_a_file_that_changes_while_it_is_read_is_named_and_nothing_is_left(tmp_path, monkeypatch, change):
    monkeypatch.setenv("MOA_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "a.jsonl"
    file.write_bytes(rows_of(["one", "two"]))
    read = lm.data.prepared.read_documents

    def changing(*arguments):
        for number, text in enumerate(read(*arguments)):
            yield text
            if number == 0 and change == "grows":
                file.open("ab").write(rows_of(["three"]))
            elif number == 0 and change == "shrinks":
                os.truncate(file, len(rows_of(["one"])))
            elif number == 0 and change == "goes":
                file.unlink()
            elif number == 0:
                (tmp_path / "b").write_bytes(rows_of(["1", "2"]))
                os.replace(tmp_path / "b", file)

    monkeypatch.setattr(lm.data.prepared, "read_documents", changing)
    with pytest.raises(UserError, match=r"a\.jsonl"):
        cached_prepare(str(file), "bytes", **QUIET)
    assert not [path for path in (tmp_path / "cache").glob("*") if path.is_dir()]


def test_a_dataset_on_the_hub_is_read_and_kept_by_its_revision(tmp_path, monkeypatch):
    """Another commit is another folder; without a network, the last one known."""
    hub = {"revision": "c1", "texts": ["one"]}
    read = []

    def rows(source, text_field, revision):
        read.append(revision)
        return iter([("hub", number, text) for number, text in enumerate(hub["texts"], 1)])

    monkeypatch.setattr(lm.data.documents, "_hub_rows", rows)
    monkeypatch.setattr(lm.data.prepared, "hub_revision", lambda source: hub["revision"])
    first = cached_prepare("owner/name", "bytes", cache=tmp_path, **QUIET)
    assert cached_prepare("owner/name", "bytes", cache=tmp_path, **QUIET) == first
    hub.update(revision="c2", texts=["two"])
    second = cached_prepare("owner/name", "bytes", cache=tmp_path, **QUIET)
    assert second != first
    assert read == ["c1", "c2"]
    assert open_prepared(second).manifest.sources == [{"dataset": "owner/name", "revision": "c2"}]
    hub.update(revision=None)
    assert cached_prepare("owner/name", "bytes", cache=tmp_path, **QUIET) == second


# Prepared folders from anybody.


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(rows_of(["first text", "second", "third one"]))
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", "bytes", shard_tokens=10, **QUIET)
    return tmp_path / "out"


def change(folder: Path, path: str, value) -> None:
    """Set a value of the manifest, under a path of keys and positions."""
    manifest = json.loads((folder / "manifest.json").read_text())
    *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    place = manifest
    for step in way:
        place = place[step]
    place[last] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))


HOSTILE = st.one_of(
    st.sampled_from(
        [None, -1, 0, 2**70, 1e400, float("nan"), True, "", "../../etc/passwd", "/etc/passwd", [], {}, "object"]
    ),
    st.integers(),
    st.text(max_size=10),
)
PLACES = """
    format fingerprint n_vocab eot dtype sources skipped settings new splits splits/train splits/train/documents
    splits/train/tokens splits/train/bytes splits/train/shards splits/train/shards/0 splits/train/shards/0/file
    splits/train/shards/0/tokens
""".split()


def test_any_value_in_a_manifest_is_the_right_one_or_refused_in_one_line(folder):
    right = open_prepared(folder).read(0, 28).tolist()
    original = (folder / "manifest.json").read_text()

    @settings(max_examples=150, deadline=None)
    @example("dtype", "object")
    @example("splits/train/shards/0/file", "../a.jsonl")
    @given(st.sampled_from(PLACES), HOSTILE)
    def check(path, value):
        (folder / "manifest.json").write_text(original)
        change(folder, path, value)
        with contextlib.suppress(UserError):
            split = open_prepared(folder)
            check_tokenizer(folder, load_tokenizer("bytes"))
            assert split.n_bytes >= split.n_documents >= 1
            assert split.read(0, 28).tolist() == right

    check()


@pytest.mark.parametrize(
    ("path", "value", "part"),
    [
        ("splits/train/shards/0/file", "../a.jsonl", "damaged"),
        ("splits/train/shards/0/file", "/etc/passwd", "damaged"),
        ("splits/train/shards/0/tokens", 2**60, "another number"),
        ("splits/train/tokens", -5, "tokens of train is -5"),
        ("splits/train/bytes", 0, "bytes of train is 0"),
        ("dtype", "object", "dtype is 'object'"),
        ("n_vocab", float("nan"), "n_vocab is nan"),
    ],
)
def test_what_is_wrong_in_a_manifest_is_said(folder, path, value, part):
    change(folder, path, value)
    with pytest.raises(UserError, match=part):
        open_prepared(folder)


def test_a_manifest_without_an_end_is_not_read(folder, monkeypatch):
    (folder / "manifest.json").write_text('{"fingerprint": ' + "[" * 100_000)
    with pytest.raises(UserError, match="damaged"):
        open_prepared(folder)
    monkeypatch.setattr("lm.data.manifest.MAX_BYTES", 100)
    with pytest.raises(UserError, match="larger than"):
        open_prepared(folder)


def put(file: Path, position: int, token: int) -> None:
    ids = np.fromfile(file, dtype="<u2")
    ids[position] = token
    ids.tofile(file)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_id_that_the_tokenizer_has_not_is_told_with_its_place_also_by_a_worker(folder, workers):
    put(folder / "train-00001.bin", 3, 40_000)
    dataset = PackedTokens(open_prepared(folder), 4)
    line = r"^[^\n]*train-00001\.bin, token 3: the id 40000, and the tokenizer has 257[^\n]*$"
    loader = TrainLoader(dataset, seed=0, global_batch_size=2, micro_batch_size=2, total_steps=20, num_workers=workers)
    with pytest.raises(UserError, match=line):
        list(loader)
    with pytest.raises(UserError, match=line):
        list(EvaluationLoader(dataset, batch_size=2, num_workers=workers))


def test_a_shard_that_is_cut_short_while_it_is_in_use_ends_no_process(folder):
    split = open_prepared(folder)
    assert len(split.read(10, 20)) == 10
    os.truncate(folder / "train-00001.bin", 6)
    with pytest.raises(UserError, match=r"train-00001\.bin ends before token 10"):
        split.read(10, 20)
    (folder / "train-00002.bin").unlink()
    with pytest.raises(UserError, match=r"train-00002\.bin cannot be read"):
        split.read(20, 24)


def test_more_shards_than_a_process_may_have_open(folder, monkeypatch):
    monkeypatch.setattr("lm.data.split.OPEN_FILES", 2)
    split: PreparedSplit = open_prepared(folder)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert len(split.read(0, split.n_tokens)) == split.n_tokens
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    del split
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_folder_behind_a_link_is_read(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    shutil.move(folder / "train-00000.bin", tmp_path / "blob")
    (folder / "train-00000.bin").symlink_to(tmp_path / "blob")
    assert torch.equal(PackedTokens(open_prepared(tmp_path / "link"), 4)[0]["inputs"], torch.tensor(list(b"firs")))
    (folder / "train-00000.bin").unlink()
    (folder / "train-00000.bin").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is missing"):
        open_prepared(folder)
