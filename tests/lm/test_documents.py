"""Every kind of source, read through a real `datasets` stream, and every way in which one can be broken."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from lm.data.documents import ReadReport, _stream_rows, find_files, hub_dataset, read_documents
from pretrain.errors import UserError

TEXTS = ["First document.", "Zweites Dokument: äöü 😀\nwith a line", "三つ目\u2028\x85 line separators", " "]


def jsonl(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}, ensure_ascii=False) + "\n" for text in texts).encode()


def parquet(texts, field="text"):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": list(range(len(texts))), field: texts}), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


COMPRESS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def message(source, **settings):
    with pytest.raises(UserError) as error:
        list(read_documents(str(source), **settings))
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("compression", COMPRESS)
def test_every_kind_of_file_gives_its_documents(tmp_path, compression):
    for name, content in {
        "a.jsonl": jsonl(TEXTS),
        "b.parquet": parquet(TEXTS),
        "c.txt": TEXTS[1].encode(),
    }.items():
        path = tmp_path / (name + compression)
        path.write_bytes(COMPRESS[compression](content))
        report = ReadReport()
        assert list(read_documents(str(path), report=report)) == (TEXTS[1:2] if name == "c.txt" else TEXTS)
        assert report.bytes == sum(len(t.encode()) for t in (TEXTS[1:2] if name == "c.txt" else TEXTS))


def test_folders_and_globs_are_read_in_sorted_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_text("hidden")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "a.txt").write_text("1")
    (tmp_path / "a2.txt").write_text("2")
    (tmp_path / "b" / "c.jsonl").write_bytes(jsonl(["3", "4"]))
    (tmp_path / "b" / "d.parquet").write_bytes(parquet(["5"]))
    (tmp_path / "z.txt.gz").write_bytes(gzip.compress(b"6"))
    report = ReadReport()
    assert list(read_documents(str(tmp_path), report=report)) == list("123456")
    assert report == ReadReport(documents=6, bytes=6, ignored_files=1)
    assert list(read_documents(f"{tmp_path}/*.txt")) == ["1", "2"]
    assert list(read_documents(f"{tmp_path}/**/*.jsonl")) == ["3", "4"]


def test_names_with_glob_characters_and_spaces_are_read(tmp_path):
    folder = tmp_path / "odd [1] *"
    folder.mkdir()
    (folder / "a [x]?.jsonl").write_bytes(jsonl(["odd"]))
    assert list(read_documents(str(folder))) == ["odd"]
    assert list(read_documents(str(folder / "a [x]?.jsonl"))) == ["odd"]


def test_agrees_with_a_plain_datasets_stream(tmp_path):
    texts = [f"document {i} " * (i % 50) + "." for i in range(500)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    stream = datasets.load_dataset("json", data_files=str(tmp_path / "a.jsonl"), split="train", streaming=True)
    assert list(read_documents(str(tmp_path / "a.jsonl"))) == [row["text"] for row in stream] == texts
    # The rows of a hub dataset come from such a stream.
    assert [row[2] for row in _stream_rows("name", stream, "text")] == texts
    assert "id" in next(_stream_rows("name", stream, "body"))[2].reason


def test_blank_lines_byte_order_marks_and_windows_line_ends_are_no_rows(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    report = ReadReport()
    assert list(read_documents(str(tmp_path / "a.jsonl"), report=report)) == ["a", "b"]
    assert report.bad == 0


def test_empty_documents_are_counted_not_given(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["", "a", ""]))
    (tmp_path / "b.txt").write_text("")
    report = ReadReport()
    assert list(read_documents(str(tmp_path), report=report)) == ["a"]
    assert (report.documents, report.empty) == (1, 3)


BROKEN = {
    b'{"text": "a"': "not JSON",
    b"[1]": "not a JSON object but a list",
    b'{"body": "a", "id": 3}': "no field 'text' (fields: body, id",
    b'{"text": 3}': "the field 'text' is int, not a string",
    b'{"text": null}': "the field 'text' is null",
    b'{"text": "\xff"}': "not UTF-8 at byte 11",
    b'{"text": "ab\\ud800"}': "a lone surrogate at character 3",
    b"[" * 100_000: "not JSON",
}


@pytest.mark.parametrize(("row", "reason"), BROKEN.items(), ids=BROKEN.values())
def test_a_broken_row_is_named_and_left_out_only_up_to_max_bad(tmp_path, row, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + row + b'\n{"text": "two"}\n' + row)
    said = message(path)
    assert f"{path}, row 3: {reason}" in said
    assert "--data.max_bad" in said
    assert f"{path}, row 5: {reason}" in message(path, max_bad=1)
    report = ReadReport()
    assert list(read_documents(str(path), max_bad=2, report=report)) == ["one", "two"]
    assert report.bad == 2
    assert report.first_bad[0].startswith(f"{path}:3: {reason}")


def test_broken_parquet_rows_and_texts_are_named(tmp_path):
    bad_utf8 = pa.Array.from_buffers(pa.string(), 2, [None, *pa.array([b"ok", b"\xff"]).buffers()[1:]])
    pq.write_table(pa.table({"text": bad_utf8}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": [1.5]}), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_bytes("ä".encode("latin-1"))
    assert f"{tmp_path}/a.parquet, row 2: not UTF-8" in message(tmp_path / "a.parquet")
    assert f"{tmp_path}/b.parquet, row 2: the field 'text' is null" in message(tmp_path / "b.parquet")
    assert "row 1: the field 'text' is float, not a string" in message(tmp_path / "c.parquet")
    assert f"{tmp_path}/d.txt, row 1: not UTF-8 at byte 1" in message(tmp_path / "d.txt")
    report = ReadReport()
    assert list(read_documents(str(tmp_path), max_bad=4, report=report)) == ["ok", "a"]
    assert report.bad == 4


def test_a_missing_parquet_field_lists_the_fields(tmp_path):
    (tmp_path / "a.parquet").write_bytes(parquet(["x"], field="content"))
    said = message(tmp_path / "a.parquet")
    assert "no field 'text' (fields: id, content; choose one with text_field)" in said
    assert list(read_documents(str(tmp_path / "a.parquet"), text_field="content")) == ["x"]


@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.zst", "a.parquet", "a.parquet.zst", "a.parquet.gz"]
)
def test_a_file_cut_short_is_an_error_not_an_end(tmp_path, name):
    compress = COMPRESS.get("." + name.rsplit(".", 1)[1], bytes)
    texts = [f"{i * 7919 % 10007} {i}" for i in range(20_000)]
    content = parquet(texts) if "parquet" in name else jsonl(texts)
    data = compress(content)
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    said = message(tmp_path / name)
    assert f"{tmp_path / name} cannot be read beyond row" in said
    assert "damaged or cut short" in said


def test_sources_that_are_not_there_say_so(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("a,b")
    (tmp_path / "nothing.txt").write_text("")
    assert "no such file" in message(tmp_path / "missing.jsonl")
    assert "no such file" in message("./missing")
    assert "no such file" in message("missing.txt")
    assert "empty" in message(" ")
    assert "holds no file to read" in message(tmp_path / "empty")
    assert "matches nothing" in message(f"{tmp_path}/*.txt.gz")
    assert "supported kind" in message(tmp_path / "a.csv")
    assert "holds no file to read (2 of other kinds)" not in message(f"{tmp_path}/*.csv")
    assert "no documents (1 empty" in message(tmp_path / "nothing.txt")
    with pytest.raises(UserError):  # before anything is read
        read_documents(str(tmp_path / "missing.jsonl"))


def test_a_bare_name_is_a_hub_dataset_and_a_path_never_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_files("owner/name") is None
    assert find_files("name") is None
    assert find_files("owner/name:subset:split") is None
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").mkdir()
    (tmp_path / "owner" / "name" / "a.txt").write_text("a")
    found = find_files("owner/name")
    assert found is not None
    assert [file.name for file in found.files] == ["a.txt"]


@pytest.mark.parametrize(
    ("source", "dataset"),
    [
        ("owner/name", ("owner/name", None, "train")),
        ("owner/name:sample-10BT", ("owner/name", "sample-10BT", "train")),
        ("name:en:validation", ("name", "en", "validation")),
        ("owner/name::validation", ("owner/name", None, "validation")),
    ],
)
def test_a_hub_name_may_choose_a_subset_and_a_split(source, dataset):
    assert hub_dataset(source) == dataset


def test_without_a_network_a_hub_name_is_one_line(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "cannot be opened on the Hugging Face hub" in message("nobody/nothing:en")
