"""The prepared folder: true to its manifest, the same for any number of workers, there whole or not at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.data.encode import CHUNK_CHARACTERS, CHUNKS_ALONE, held_out
from lm.data.prepared import cached_prepare, check_tokenizer, is_prepared, open_prepared, prepare, read_manifest
from lm.tokenizers import load_tokenizer
from pretrain.errors import UserError

SPEECHES = Path(__file__).parents[2] / "lm" / "assets" / "sotu" / "val.jsonl"
QUIET = {"workers": 1, "progress": False}


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def documents(split):
    """The documents of a split, decoded, by a plain loop over all its tokens."""
    tokenizer = load_tokenizer(split.manifest.tokenizer)
    tokens = split.read(0, split.n_tokens).tolist()
    found, start = [], 0
    for place, token in enumerate(tokens):
        if token == split.eot:
            found.append(tokenizer.decode(tokens[start:place]))
            start = place + 1
    assert start == len(tokens)
    return found


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_the_documents_come_back_and_the_manifest_counts_are_true(tmp_path, tokenizer):
    texts = [json.loads(line)["text"] for line in SPEECHES.read_text().splitlines()]
    manifest = prepare(str(SPEECHES), tmp_path / "out", tokenizer, val_fraction=0.25, shard_tokens=20_000, **QUIET)
    train, val = open_prepared(tmp_path / "out"), open_prepared(tmp_path / "out", "val")
    assert documents(val) == [texts[1], texts[5]]
    assert documents(train) == [text for index, text in enumerate(texts) if index not in (1, 5)]
    for split in (train, val):
        assert split.n_documents == len(documents(split)) == np.sum(split.read(0, split.n_tokens) == split.eot)
        assert split.n_bytes == sum(len(text.encode()) for text in documents(split))
        assert split.n_tokens == sum(shard.tokens for shard in manifest.splits[split.split].shards)
        assert all(shard.tokens == 20_000 for shard in manifest.splits[split.split].shards[:-1])
    assert read_manifest(tmp_path / "out") == manifest
    assert manifest.sources == [{"path": str(SPEECHES), "size": SPEECHES.stat().st_size}]
    check_tokenizer(tmp_path / "out", load_tokenizer(tokenizer))


def test_reads_across_shard_borders_equal_one_array(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["abcdefghij" * 3, "x", "yz"])
    prepare(source, tmp_path / "out", "bytes", shard_tokens=5, **QUIET)
    split = open_prepared(tmp_path / "out")
    whole = np.concatenate([np.fromfile(path, "<u2") for path in sorted((tmp_path / "out").glob("train-*.bin"))])
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            assert np.array_equal(split.read(start, stop), whole[start:stop])
    for start, stop in [(-1, 2), (0, len(whole) + 1), (3, 2)]:
        with pytest.raises(IndexError):
            split.read(start, stop)


def test_a_vocabulary_beyond_65536_is_stored_in_32_bits(tmp_path, monkeypatch):
    tokenizer = load_tokenizer("bytes")
    tokenizer.n_vocab = tokenizer.eot = 100_000
    tokenizer.n_vocab += 1
    manifest = prepare(write_jsonl(tmp_path / "a.jsonl", ["hi"]), tmp_path / "out", tokenizer, **QUIET)
    assert manifest.dtype == "uint32"
    assert open_prepared(tmp_path / "out").read(0, 3).tolist() == [104, 105, 100_000]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A source of more chunks than one process keeps to itself, with one huge document and empty ones."""
    words = [json.loads(line)["text"] for line in SPEECHES.read_text().splitlines()]
    texts = [f"{number} {words[number % len(words)]}" for number in range(300)]
    texts[70] = " ".join(words) * 10
    texts[3] = texts[299] = ""
    assert sum(map(len, texts)) > (CHUNKS_ALONE + 3) * CHUNK_CHARACTERS
    return write_jsonl(tmp_path_factory.mktemp("large") / "a.jsonl", texts)


def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path, large):
    settings = {"val_fraction": 0.1, "shard_tokens": 1 << 21, "progress": False}
    prepare(large, tmp_path / "one", "bytes", workers=1, **settings)
    prepare(large, tmp_path / "two", "bytes", workers=2, **settings)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert read_manifest(tmp_path / "one").skipped["empty_documents"] == 2


def test_a_broken_row_beyond_max_tokens_is_never_reached_by_any_number_of_workers(tmp_path, large):
    shutil.copy(large, tmp_path / "a.jsonl")
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write("broken\n")
    limit = (CHUNKS_ALONE + 1) * CHUNK_CHARACTERS
    for workers in (1, 2):
        source, output = str(tmp_path / "a.jsonl"), tmp_path / f"out{workers}"
        manifest = prepare(source, output, "bytes", max_tokens=limit, workers=workers, progress=False)
        assert limit <= manifest.splits["train"].tokens < limit + 100_000
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")
    for workers in (1, 2):
        with pytest.raises(UserError, match="row 301: not JSON"):
            prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", "bytes", workers=workers, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out1", "out2"]


@given(st.integers(2, 2000), st.floats(1e-6, 0.5))
def test_held_out_documents_are_evenly_spread_and_leave_both_splits_filled(count, fraction):
    chosen = [index for index in range(count) if held_out(index, fraction)]
    assert 1 <= len(chosen) < count
    assert abs(len(chosen) - count * fraction) <= 1.5
    gaps = np.diff(chosen)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_one_document_cannot_be_held_out(tmp_path):
    with pytest.raises(UserError, match=r"too few to hold one out.*data.val_source, or set val_fraction to 0"):
        prepare(write_jsonl(tmp_path / "a.jsonl", ["one"]), tmp_path / "out", "bytes", val_fraction=0.1, **QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", "bytes", **QUIET)
    with pytest.raises(UserError, match="has no val split"):
        open_prepared(tmp_path / "out", "val")


def test_broken_rows_stand_in_the_manifest(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 1}\n{"text": "b"}\n')
    manifest = prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", "bytes", max_bad=1, **QUIET)
    assert manifest.skipped["bad_rows"] == 1
    assert "a.jsonl:2: the field 'text' is int" in manifest.skipped["first_bad_rows"][0]


def test_damaged_folders_are_named(tmp_path):
    prepare(write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), tmp_path / "out", "bytes", shard_tokens=3, **QUIET)
    shard = tmp_path / "out" / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"train-00001\.bin has 5 bytes instead of 6"):
        open_prepared(tmp_path / "out")
    shard.unlink()
    with pytest.raises(UserError, match=r"train-00001\.bin is missing"):
        open_prepared(tmp_path / "out")
    manifest = tmp_path / "out" / "manifest.json"
    manifest.write_text(manifest.read_text()[:300])
    with pytest.raises(UserError, match="damaged"):
        open_prepared(tmp_path / "out")
    with pytest.raises(UserError, match="no prepared folder"):
        open_prepared(tmp_path)


def test_another_tokenizer_is_refused_naming_both(tmp_path):
    prepare(write_jsonl(tmp_path / "a.jsonl", ["one"]), tmp_path / "out", "bytes", **QUIET)
    with pytest.raises(UserError, match=r"out was prepared with the tokenizer bytes .* not with gpt2"):
        cached_prepare(str(tmp_path / "out"), "gpt2")
    assert cached_prepare(str(tmp_path / "out"), "bytes") == tmp_path / "out"
    with pytest.raises(UserError, match="prepared folder already"):
        prepare(str(tmp_path / "out"), tmp_path / "again", "bytes", **QUIET)


@pytest.mark.parametrize(
    "wrong",
    [
        {"val_fraction": 0.6},
        {"val_fraction": -1},
        {"max_bad": -1},
        {"max_tokens": 0},
        {"workers": 0},
        {"shard_tokens": 0},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(tmp_path, wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        prepare(write_jsonl(tmp_path / "a.jsonl", ["one"]), tmp_path / "out", "bytes", **(QUIET | wrong))


def test_an_output_is_replaced_only_on_demand_and_only_a_prepared_one(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "out").mkdir()  # an empty folder is fine
    prepare(source, tmp_path / "out", "bytes", **QUIET)
    with pytest.raises(UserError, match="--overwrite"):
        prepare(source, tmp_path / "out", "bytes", **QUIET)
    write_jsonl(tmp_path / "a.jsonl", ["two!"])
    prepare(source, tmp_path / "out", "bytes", overwrite=True, **QUIET)
    assert documents(open_prepared(tmp_path / "out")) == ["two!"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="no prepared folder"):
        prepare(source, tmp_path / "mine", "bytes", overwrite=True, **QUIET)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert leftovers(tmp_path) == []
    with pytest.raises(UserError, match="cannot be written"):
        prepare(source, tmp_path / "a.jsonl" / "out", "bytes", **QUIET)


def test_the_cache_is_reused_until_something_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("MOA_CACHE", str(tmp_path / "cache"))
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    first = cached_prepare(source, "bytes", **QUIET)
    assert first.parent == tmp_path / "cache"
    before = (first / "manifest.json").stat().st_mtime_ns
    assert cached_prepare(source, "bytes", val_fraction=0.0, workers=2) == first
    assert (first / "manifest.json").stat().st_mtime_ns == before
    others = {
        cached_prepare(source, "gpt2", **QUIET),
        cached_prepare(source, "bytes", val_fraction=0.5, **QUIET),
        cached_prepare(source, "bytes", max_tokens=1, **QUIET),
    }
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    others.add(cached_prepare(source, "bytes", **QUIET))
    assert len(others | {first}) == 5
    (first / "train-00000.bin").write_bytes(b"")
    write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    damaged = cached_prepare(source, "bytes", **QUIET)
    (damaged / "train-00000.bin").write_bytes(b"")
    assert cached_prepare(source, "bytes", **QUIET) == damaged
    assert documents(open_prepared(damaged)) == ["one", "two"]


def start(source, output, **settings):
    arguments = [f"--{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "lm.prepare", "--source", source, "--output", str(output), *arguments]
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(process):
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in listed]


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_an_interrupted_run_leaves_no_output_and_the_next_one_succeeds(tmp_path):
    speech = json.loads(SPEECHES.read_text().splitlines()[0])["text"]
    texts = [f"{number} {speech}" for number in range(25 * CHUNK_CHARACTERS // len(speech))]  # seconds of work
    source = write_jsonl(tmp_path / "long.jsonl", texts)
    (tmp_path / "work").mkdir()
    output = tmp_path / "work" / "out"
    for number in (signal.SIGKILL, signal.SIGINT):
        process = start(source, output, tokenizer="gpt2", workers=2)
        wait_for(lambda: len(children(process)) >= 2)  # noqa: B023
        workers = children(process)
        wait_for(lambda: any(path.stat().st_size for path in (tmp_path / "work").rglob("*.bin")))
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.kill()
        process.communicate(timeout=60)
        assert process.returncode != 0
        assert not output.exists()
        wait_for(lambda: not any(running(worker) for worker in workers))  # noqa: B023
        if number == signal.SIGINT:
            assert list((tmp_path / "work").iterdir()) == []
        else:
            assert ".out.partial" in leftovers(tmp_path / "work")
    (tmp_path / "work" / ".out.partial").mkdir()
    (tmp_path / "work" / ".out.partial" / "train-00000.bin").write_text("stale")
    prepare(write_jsonl(tmp_path / "a.jsonl", ["one"]), output, "bytes", **QUIET)
    assert documents(open_prepared(output)) == ["one"]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["out"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["one"])
    prepare(source, tmp_path / "out", "bytes", **QUIET)
    (tmp_path / "out").rename(tmp_path / ".out.retired")
    with pytest.raises(UserError, match="no such file"):
        prepare(str(tmp_path / "missing.txt"), tmp_path / "out", "bytes", **QUIET)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        prepare(str(tmp_path / "b.txt"), tmp_path / "out", "bytes", **QUIET)
    assert is_prepared(tmp_path / "out")


def test_two_processes_making_one_cache_folder_do_not_disturb_each_other(tmp_path, large):
    code = (
        "import sys; from lm.data.prepared import cached_prepare\n"
        "print(cached_prepare(sys.argv[1], 'bytes', cache=sys.argv[2], workers=1))"
    )
    command = [sys.executable, "-c", code, large, str(tmp_path / "cache")]
    both = [
        subprocess.Popen(
            command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    folder = Path(answers[0][0].strip())
    assert open_prepared(folder).n_documents == 298
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]
