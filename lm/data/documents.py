"""Documents from files, folders, globs and Hugging Face datasets, every one read as a `datasets` stream."""

import glob
import gzip
import io
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pretrain.errors import UserError
from pretrain.hub import HUB_SOURCE, hub_dataset
from pretrain.hub import quiet_datasets as _datasets
from pretrain.hub import reason as _reason
from pretrain.memory import host_memory
from pretrain.paths import user_path

KINDS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".gz", ".zst")
SUPPORTED = "files may be .txt, .jsonl or .parquet, each also .gz or .zst"
# Names that end like a file are never taken for a dataset on the hub.
FILE_SUFFIXES = (*KINDS, *COMPRESSIONS, ".json", ".csv", ".tsv", ".zip", ".tar", ".arrow", ".md", ".bin")
BATCH_ROWS = 64
READ_BYTES = 1 << 24
# A document is held as bytes, as text and as tokens; from a compressed file it may be a thousand times its size.
MEMORY_PER_DOCUMENT = 16


@dataclass
class ReadReport:
    """What has been read so far.

    Attributes:
        documents: documents handed out.
        bytes: their length in UTF-8.
        empty: documents of no characters, left out.
        bad: broken rows, left out.
        first_bad: "file:row: reason" of the first few broken rows.
        ignored_files: files of a folder or glob that are of no supported kind.
    """

    documents: int = 0
    bytes: int = 0
    empty: int = 0
    bad: int = 0
    first_bad: list[str] = field(default_factory=list)
    ignored_files: int = 0


@dataclass(frozen=True)
class SourceFiles:
    """The files of a local source in reading order, and how many others lay beside them."""

    files: list[Path]
    ignored: int


@dataclass(frozen=True)
class BadRow:
    """Why a row holds no document."""

    reason: str


# Where a row is (file or dataset, row number from 1) and its text.
Row = tuple[str, int, str | BadRow]


def read_documents(
    source: str,
    text_field: str = "text",
    max_bad: int = 0,
    report: ReadReport | None = None,
    revision: str | None = None,
) -> Iterator[str]:
    """Stream the documents of `source`, always in the same order.

    A .txt file is one document, a row of a .jsonl or .parquet file is one document. Blank lines of a .jsonl file are
    passed over.

    Args:
        source: a file, a folder (searched recursively), a glob, or a dataset on the Hugging Face hub, written
            NAME[:SUBSET[:SPLIT]]; the split is train unless named.
        text_field: the field that holds the text, in .jsonl, .parquet and hub datasets.
        max_bad: how many broken rows may be left out; one more is an error.
        report: filled in while reading.
        revision: commit of a dataset on the hub; None: the newest.

    Raises:
        UserError: at the call when the source cannot be found; while reading when it is unreadable, has more than
            `max_bad` broken rows, or no document at all. The message names file, row and reason.
    """
    report = ReadReport() if report is None else report
    found = find_files(source)
    if found is None:
        rows = _hub_rows(source, text_field, revision)
    else:
        report.ignored_files = found.ignored
        rows = _file_rows(found.files, text_field)
    return _documents(rows, source, max_bad, report)


def find_files(source: str) -> SourceFiles | None:
    """The files that `source` names, sorted; None when it is the name of a dataset on the hub.

    A name that exists on disk, ends like a file, begins with ".", "/" or "~" or has a glob character is no hub name.

    Raises:
        UserError: nothing there, or nothing of a supported kind.
    """
    if not source.strip():
        raise UserError("the source is empty: give a file, a folder, a glob or the name of a Hugging Face dataset")
    path = user_path(source)
    if path.is_file():
        if file_kind(path) is None:
            raise UserError(f"{source} is of no supported kind: {SUPPORTED}")
        return SourceFiles([path], 0)
    if path.exists() and not path.is_dir():
        raise UserError(f"{source} is a pipe or a device: write its content into a file first")
    if path.is_dir():
        candidates = [file for file in path.rglob("*") if not _hidden(file.relative_to(path))]
        where = f"the folder {source}"
    elif glob.has_magic(source):
        candidates = [Path(match) for match in glob.glob(str(path), recursive=True)]
        where = f"the glob {source}"
        if not candidates:
            raise UserError(
                f"the glob {source} matches nothing: check it, and quote it so that the shell leaves it alone"
            )
    elif HUB_SOURCE.fullmatch(source) and path.suffix not in FILE_SUFFIXES:
        return None
    else:
        raise UserError(f"{source}: no such file or folder")
    # A loop of links shows the same file under many names.
    by_place = {file.resolve(): file for file in sorted(candidates, reverse=True) if file.is_file()}
    files = sorted(by_place.values())
    supported = [file for file in files if file_kind(file) is not None]
    if not supported:
        raise UserError(f"{where} holds no file to read ({len(files)} of other kinds): {SUPPORTED}")
    return SourceFiles(supported, len(files) - len(supported))


def file_kind(path: Path) -> str | None:
    """ ".txt", ".jsonl" or ".parquet", with or without a compression suffix behind it; None for other files."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in KINDS else None


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _documents(rows: Iterator[Row], source: str, max_bad: int, report: ReadReport) -> Iterator[str]:
    for place, number, text in rows:
        if isinstance(text, str):
            try:
                size = len(text.encode("utf-8"))
            except UnicodeEncodeError as error:
                text = BadRow(f"a lone surrogate at character {error.start + 1}, which is no text")
        if isinstance(text, BadRow):
            report.bad += 1
            if len(report.first_bad) < 5:
                report.first_bad.append(f"{place}:{number}: {text.reason}")
            if report.bad > max_bad:
                raise UserError(
                    f"{place}, row {number}: {text.reason}; {report.bad} broken rows, and max_bad allows {max_bad}: "
                    f"mend the row, or raise --data.max_bad (in lm.prepare: --max_bad) to leave such rows out"
                )
        elif not text:
            report.empty += 1
        else:
            report.documents += 1
            report.bytes += size
            yield text
    if report.documents == 0:
        raise UserError(
            f"{source} holds no documents ({report.empty} empty, {report.bad} broken): give one with text in it"
        )


def _file_rows(files: list[Path], text_field: str) -> Iterator[Row]:
    for is_parquet, group in itertools.groupby(files, lambda file: file_kind(file) == ".parquet"):
        if is_parquet:
            for file in group:
                yield from _parquet_rows(file, text_field)
        else:
            yield from _text_rows(list(group), text_field)


def _text_rows(files: list[Path], text_field: str) -> Iterator[Row]:
    # Bytes through a generator rather than the library's "text" builder: that one reads compressed files in the
    # encoding of the machine, so a row that is no UTF-8 ends the stream and cannot be named.
    names = [str(file) for file in files]
    for row in _datasets().IterableDataset.from_generator(read_bytes, gen_kwargs={"files": names}):
        file, number, data = row["file"], row["row"], row["data"]
        if file_kind(Path(file)) == ".txt":
            yield file, number, _decode(data, first=True)
        elif data.strip(b" \t\r\n"):
            yield file, number, _parse(data, text_field, first=number == 1)


def read_bytes(files: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of .txt files (the whole file) and .jsonl files (a line) as {"file", "row" from 1, "data" in bytes}."""
    limit = host_memory() // MEMORY_PER_DOCUMENT
    for file in files:
        number = 0
        try:
            with _open_plain(Path(file)) as stream:
                is_whole = file_kind(Path(file)) == ".txt"
                for data in [_read_up_to(stream, limit)] if is_whole else iter(lambda: stream.readline(limit + 1), b""):
                    number += 1
                    if len(data) > limit:
                        raise UserError(
                            f"{file}, row {number}: more than {limit:,} bytes, too much for one document on this "
                            "machine: split it"
                        )
                    yield {"file": file, "row": number, "data": data}
        except UserError:
            raise
        except Exception as error:
            raise _unreadable(file, number, error) from error


def _read_up_to(stream: BinaryIO, limit: int) -> bytes:
    """The rest of a stream, or somewhat more than `limit` bytes of it; `read(limit)` would allocate them at once."""
    pieces: list[bytes] = []
    while sum(map(len, pieces)) <= limit and (piece := stream.read(READ_BYTES)):
        pieces.append(piece)
    return b"".join(pieces)


def _open_plain(file: Path) -> BinaryIO:
    """The uncompressed bytes of `file`; reading raises when it was cut short."""
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if suffix == ".zst":
        import pyarrow

        # Arrow's reader, because the zstandard package takes a file that was cut short for a whole one.
        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return open(file, "rb")


def _parquet_rows(file: Path, text_field: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    with tempfile.TemporaryDirectory(prefix="moa-pretrain-") as folder:
        number = 0
        try:
            plain = file
            if file.suffix.lower() in COMPRESSIONS:  # Parquet is read from its end, which a stream does not allow
                plain = Path(folder) / file.stem
                with _open_plain(file) as source, open(plain, "wb") as target:
                    shutil.copyfileobj(source, target)
            names = pyarrow.parquet.read_schema(plain).names
            if text_field not in names:
                raise UserError(_no_field(str(file), text_field, names))
            stream = _datasets().load_dataset(
                "parquet",
                data_files={"train": [glob.escape(str(plain.resolve()))]},
                split="train",
                streaming=True,
                columns=[text_field],
                batch_size=BATCH_ROWS,
            )
            for table in stream.with_format("arrow").iter(batch_size=BATCH_ROWS):
                column = table.column(0)
                if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                    # As bytes, so that a row that is no UTF-8 can be named.
                    column = column.cast(pyarrow.large_string()).cast(pyarrow.large_binary())
                    values = [value if value is None else _decode(value) for value in column.to_pylist()]
                else:
                    values = column.to_pylist()
                for value in values:
                    number += 1
                    yield str(file), number, _text(value, text_field)
        except UserError:
            raise
        except Exception as error:
            raise _unreadable(file, number, error) from error


def _hub_rows(source: str, text_field: str, revision: str | None) -> Iterator[Row]:
    name, subset, split = hub_dataset(source)
    try:
        stream = _datasets().load_dataset(name, subset, split=split, revision=revision, streaming=True)
        names = stream.column_names
    except Exception as error:  # many kinds: no network, offline mode, unknown name, subset or split, gated
        raise UserError(
            f"{source} is no local file or folder and cannot be opened on the Hugging Face hub "
            f"({_reason(error)}): check the name, subset, split and network, or give a local path"
        ) from error
    if names is not None and text_field not in names:
        raise UserError(_no_field(name, text_field, names))
    return _stream_rows(name, stream, text_field)


def _stream_rows(name: str, stream: Any, text_field: str) -> Iterator[Row]:
    number = 0
    try:
        for row in stream:
            number += 1
            yield name, number, _field(row, text_field)
    except Exception as error:
        raise _unreadable(name, number, error) from error


def _decode(data: bytes, first: bool = False) -> str | BadRow:
    try:
        return data.decode(
            "utf-8-sig" if first else "utf-8"
        )  # only the beginning of a file may carry a byte-order mark
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8 at byte {error.start + 1} of the row ({error.reason})")


def _parse(line: bytes, text_field: str, first: bool) -> str | BadRow:
    decoded = _decode(line, first)
    if isinstance(decoded, BadRow):
        return decoded
    try:
        value = json.loads(decoded)
    except (ValueError, RecursionError) as error:
        return BadRow(f"not JSON ({error})")
    if not isinstance(value, dict):
        return BadRow(f"not a JSON object but a {type(value).__name__}")
    return _field(value, text_field)


def _field(row: dict[str, Any], text_field: str) -> str | BadRow:
    return _text(row[text_field], text_field) if text_field in row else BadRow(_fields_instead(text_field, list(row)))


def _text(value: Any, text_field: str) -> str | BadRow:
    if isinstance(value, str | BadRow):
        return value
    return BadRow(f"the field {text_field!r} is {'null' if value is None else type(value).__name__}, not a string")


def _fields_instead(text_field: str, names: list[str]) -> str:
    return f"no field {text_field!r} (fields: {', '.join(names) or 'none'}; choose one with text_field)"


def _no_field(place: str, text_field: str, names: list[str]) -> str:
    return f"{place}: {_fields_instead(text_field, names)}"


def _unreadable(place: Path | str, rows: int, error: Exception) -> UserError:
    return UserError(
        f"{place} cannot be read beyond row {rows} ({_reason(error)}): the file may be damaged or cut short"
    )
