"""Packed sequences: whatever the documents and the length, unpacking gives every document back."""

import json
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm.data.packing import PackedTokens
from lm.data.prepared import open_prepared, prepare
from pretrain.errors import UserError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


def prepared(folder: Path, texts: list[str], shard_tokens: int = 7):
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(str(folder / "a.jsonl"), folder / "out", "bytes", shard_tokens=shard_tokens, workers=1, progress=False)
    return open_prepared(folder / "out")


def unpack(dataset: PackedTokens) -> list[str]:
    """The documents, from the first input and from the targets of all sequences."""
    tokens = [int(dataset[0]["inputs"][0])]
    for index in range(len(dataset)):
        targets = dataset[index]["targets"]
        tokens += targets[targets != -100].tolist()
    documents, current = [], bytearray()
    for token in tokens:
        if token == 256:
            documents.append(current.decode())
            current = bytearray()
        else:
            current.append(token)
    assert not current
    return documents


@settings(max_examples=40, deadline=None)
@example(["a"], 1)
@example(["abc", "d"], 5)  # the stream is exactly one sequence
@example(["x" * 500], 3)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40), min_size=1), st.integers(1, 50)
)
def test_unpacking_gives_back_every_document(texts, length):
    with tempfile.TemporaryDirectory() as folder:
        split = prepared(Path(folder), texts)
        dataset = PackedTokens(split, length, document_mask=True)
        assert unpack(dataset) == texts
        counts = [int((dataset[i]["targets"] != -100).sum()) for i in range(len(dataset))]
        assert sum(counts) == split.n_tokens - 1
        assert counts == [dataset.n_targets(i) for i in range(len(dataset))]
        assert dataset.n_targets(np.arange(-1, len(dataset))).tolist() == [0, *counts]
        check_sequences(dataset, split.read(0, split.n_tokens))


def check_sequences(dataset, stream):
    length = dataset.sequence_length
    for index in range(len(dataset)):
        sequence = dataset[index]
        segment, expected = 0, []
        for position in range(length):
            place = index * length + position
            inside = place < len(stream)
            assert sequence["inputs"][position] == (stream[place] if inside else 256)
            assert sequence["targets"][position] == (stream[place + 1] if place + 1 < len(stream) else -100)
            expected.append(segment)
            segment += inside and stream[place] == 256
        assert sequence["segments"].tolist() == expected


def test_shapes_dtypes_and_the_filler(tmp_path):
    dataset = PackedTokens(prepared(tmp_path, ["hello", "you"]), 4, document_mask=True)
    assert len(dataset) == 3
    for index in range(-1, 3):
        sequence = dataset[index]
        assert {key: (value.shape, value.dtype) for key, value in sequence.items()} == {
            "inputs": ((4,), torch.int64),
            "targets": ((4,), torch.int64),
            "segments": ((4,), torch.int32),
        }
    assert dataset[-1]["targets"].tolist() == [-100] * 4
    assert dataset[-1]["inputs"].tolist() == [256] * 4
    assert "segments" not in PackedTokens(dataset.split, 4)[0]
    assert len(list(dataset)) == 3
    for index in (-2, 3):
        with pytest.raises(IndexError):
            dataset[index]
        with pytest.raises(IndexError):
            dataset.n_targets(index)


def test_segments_number_documents_and_end_of_text_belongs_to_its_document(tmp_path):
    dataset = PackedTokens(prepared(tmp_path, ["ab", "c"]), 8, document_mask=True)
    assert dataset[0]["inputs"].tolist() == [97, 98, 256, 99, 256, 256, 256, 256]
    assert dataset[0]["targets"].tolist() == [98, 256, 99, 256, -100, -100, -100, -100]
    assert dataset[0]["segments"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]


def test_a_dataset_goes_through_pickle_without_its_data(tmp_path):
    dataset = PackedTokens(prepared(tmp_path, ["x" * 100_000], shard_tokens=1 << 20), 16)
    first = dataset[0]["inputs"].tolist()
    data = pickle.dumps(dataset)
    assert len(data) < 10_000
    assert pickle.loads(data)[0]["inputs"].tolist() == first


def test_impossible_lengths_are_refused(tmp_path):
    with pytest.raises(UserError, match="sequence_length is 0"):
        PackedTokens(prepared(tmp_path, ["a"]), 0)
    split = open_prepared(tmp_path / "out")
    split.n_tokens = 0
    with pytest.raises(UserError, match="is empty"):
        PackedTokens(split, 4)
