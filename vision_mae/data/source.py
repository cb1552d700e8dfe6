"""Pictures and their labels from folders, parquet files and Hugging Face datasets, as one `datasets` table.

Nothing is decoded here: a row is the bytes or the path of a file.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.errors import UserError
from pretrain.hub import HUB_SOURCE, hub_dataset, quiet_datasets, reason
from pretrain.paths import user_path

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".jp2")
PARQUET = ".parquet"
LAYOUTS = f"pictures ({' '.join(IMAGE_SUFFIXES)}) or {PARQUET} files"


@dataclass(frozen=True)
class ImageRows:
    """Undecoded pictures.

    Attributes:
        table: a `datasets.Dataset` with the column `image_field`.
        image_field: its column of pictures.
        labels: the class of every row, or None if the source has no labels.
        classes: the names of the classes; () without labels.
        source: what the user calls it.
    """

    table: Any
    image_field: str
    labels: list[int] | None
    classes: tuple[str, ...]
    source: str

    def __len__(self) -> int:
        return len(self.table)

    def read(self, index: int) -> tuple[str, bytes | str, int]:
        """Return where a picture is (for messages), its bytes or path, and its label (-1 without labels)."""
        value = self.table[index][self.image_field]
        label = -1 if self.labels is None else self.labels[index]
        data, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
        if isinstance(value, str) or (data is None and path):
            return str(path or value), str(path or value), label
        return f"{self.source}, row {index + 1}" + (f" ({path})" if path else ""), data or b"", label

    def select(self, indices: Sequence[int]) -> "ImageRows":
        """Return some of the rows."""
        labels = None if self.labels is None else [self.labels[index] for index in indices]
        return ImageRows(self.table.select(indices), self.image_field, labels, self.classes, self.source)

    def with_classes(self, classes: tuple[str, ...]) -> "ImageRows":
        """Return the same rows with labels in terms of another source's classes.

        Raises:
            UserError: a class that the other source does not have.
        """
        if self.labels is None or self.classes == classes:
            return self
        unknown = [self.classes[label] for label in set(self.labels) if self.classes[label] not in classes]
        if unknown:
            raise UserError(
                f"{self.source} has the class {unknown[0]!r}, which the training data has not: "
                "the labels of data.source and data.val_source have to be of one set"
            )
        labels = [classes.index(self.classes[label]) for label in self.labels]
        return ImageRows(self.table, self.image_field, labels, classes, self.source)


def open_images(
    source: str, image_field: str = "image", label_field: str = "label", cache_dir: Path | None = None
) -> ImageRows:
    """Find the pictures of `source`, always in the same order.

    Args:
        source: a folder of pictures, searched recursively (when every picture lies in a sub-folder, the first level of
            sub-folders names the classes); a .parquet file, a folder or a glob of them; a single picture; or a dataset
            on the Hugging Face hub, NAME[:SUBSET[:SPLIT]].
        image_field: column of the pictures in parquet and hub datasets: a `datasets` image, or the bytes of a file.
        label_field: column of the labels there, if it exists.
        cache_dir: where `datasets` keeps what it makes of parquet files; None: its own place.

    Raises:
        UserError: nothing there, no pictures, or no such column. The message names the source and the remedy.
    """
    if not source.strip():
        raise UserError("the source is empty: give a folder, .parquet files or the name of a Hugging Face dataset")
    files = _find_files(source)
    if files is None:
        return _from_table(_hub_table(source), source, image_field, label_field)
    if files[0].suffix.lower() == PARQUET:
        return _from_table(_parquet_table(files, source, cache_dir), source, image_field, label_field)
    return _from_files(files, source)


def _find_files(source: str) -> list[Path] | None:
    """The files of a local source, all pictures or all parquet; None for the name of a hub dataset."""
    path = user_path(source)
    if path.is_file():
        candidates, where = [path], source
    elif path.exists() and not path.is_dir():
        raise UserError(f"{source} is a pipe or a device: give a folder or a file")
    elif path.is_dir():
        candidates, where = list(_visible_files(path)), f"the folder {source}"
    elif glob.has_magic(source):
        candidates, where = [Path(match) for match in glob.glob(str(path), recursive=True)], f"the glob {source}"
    elif HUB_SOURCE.fullmatch(source) and path.suffix.lower() not in (*IMAGE_SUFFIXES, PARQUET):
        return None
    else:
        raise UserError(f"{source}: no such file or folder")
    pictures = sorted(file for file in candidates if file.suffix.lower() in IMAGE_SUFFIXES)
    tables = sorted(file for file in candidates if file.suffix.lower() == PARQUET)
    if pictures and tables:
        raise UserError(f"{where} holds both pictures and {PARQUET} files: name the one to read")
    if not pictures and not tables:
        raise UserError(f"{where} holds no pictures ({len(candidates)} other files): it has to hold {LAYOUTS}")
    return pictures or tables


def _visible_files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if not hidden and file.is_file():
            yield file


def _from_files(files: list[Path], source: str) -> ImageRows:
    datasets = quiet_datasets()
    table = datasets.Dataset.from_dict({"image": [str(file) for file in files]})
    root = user_path(source)
    parts = [file.relative_to(root).parts for file in files] if root.is_dir() else []
    if not parts or any(len(names) < 2 for names in parts):
        return ImageRows(table, "image", None, (), source)
    classes = tuple(sorted({names[0] for names in parts}))
    position = {name: number for number, name in enumerate(classes)}
    return ImageRows(table, "image", [position[names[0]] for names in parts], classes, source)


def _parquet_table(files: list[Path], source: str, cache_dir: Path | None) -> Any:
    datasets = quiet_datasets()
    try:
        return datasets.load_dataset(
            "parquet",
            data_files={"train": [glob.escape(str(file.resolve())) for file in files]},
            split="train",
            cache_dir=None if cache_dir is None else str(cache_dir),
        )
    except Exception as error:  # pyarrow's and datasets' own kinds
        cause = error.__cause__ or error
        raise UserError(f"{source} cannot be read ({reason(cause)}): the file may be damaged or cut short") from error


def _hub_table(source: str) -> Any:
    name, subset, split = hub_dataset(source)
    try:
        return quiet_datasets().load_dataset(name, subset, split=split)
    except Exception as error:  # many kinds: no network, offline mode, unknown name, subset or split, gated
        raise UserError(
            f"{source} is no local file or folder and cannot be opened on the Hugging Face hub "
            f"({reason(error)}): check the name, subset, split and network, or give a local path"
        ) from error


def _from_table(table: Any, source: str, image_field: str, label_field: str) -> ImageRows:
    datasets = quiet_datasets()
    if image_field not in table.column_names:
        columns = ", ".join(table.column_names)
        raise UserError(f"{source} has no column {image_field!r} (columns: {columns}): set data.image_field")
    if len(table) == 0:
        raise UserError(f"{source} holds no pictures: it has no rows")
    feature = table.features[image_field]
    if isinstance(feature, datasets.Image):
        table = table.cast_column(image_field, datasets.Image(decode=False))
    elif not _holds_files(feature):
        raise UserError(f"the column {image_field!r} of {source} holds no pictures but {feature}: set data.image_field")
    labels, classes = _labels(table, label_field, source)
    return ImageRows(table.select_columns([image_field]), image_field, labels, classes, source)


def _holds_files(feature: Any) -> bool:
    if isinstance(feature, dict):
        return "bytes" in feature or "path" in feature
    return getattr(feature, "dtype", None) in ("binary", "large_binary", "string", "large_string")


def _labels(table: Any, label_field: str, source: str) -> tuple[list[int] | None, tuple[str, ...]]:
    if label_field not in table.column_names:
        return None, ()
    values = list(table[label_field])
    if any(value is None for value in values):
        raise UserError(f"the column {label_field!r} of {source} has empty cells: fill them or set data.label_field")
    names = getattr(table.features[label_field], "names", None)
    if names is not None and all(0 <= value < len(names) for value in values):
        return values, tuple(names)
    if not (all(isinstance(value, int) for value in values) or all(isinstance(value, str) for value in values)):
        raise UserError(f"the column {label_field!r} of {source} holds no labels: set data.label_field to another one")
    classes = tuple(sorted(set(values)))
    position = {name: number for number, name in enumerate(classes)}
    return [position[value] for value in values], tuple(map(str, classes))
