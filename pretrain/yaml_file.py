"""A configuration file as it stands, looked through before the parser reads it: nothing in it is built yet."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from pretrain.errors import UserError

# A configuration has some kB and a hundred values; the parser needs seconds for each 100 kB.
MAX_BYTES = 256 * 1024
MAX_VALUES = 20_000
MAX_DEPTH = 50
PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in "map seq str int float bool null timestamp merge value".split()}


def check_yaml(file: Path) -> None:
    """Raise a UserError for what the parser would misread, or read without a word: a key that stands twice."""
    for key, value in scalars(file):
        if key == "resume" and value not in ("null", ""):
            raise UserError(f"{file} sets resume, which is an argument of the command line: --resume RUN")


def scalars(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the scalars of a configuration as (dotted key, text); an item of a list has the key of the list.

    Raises:
        UserError: it cannot be read, holds no keys, holds one twice or has no end: it is larger, deeper or, with its
            aliases written out, longer than any configuration.
    """
    waiting: list[tuple[str, yaml.Node, int]] = [("", _root(file), 0)]
    visited = 0
    while waiting:
        key, node, depth = waiting.pop()
        visited += 1
        where = f"{file}, line {node.start_mark.line + 1}"
        if visited > MAX_VALUES:
            raise UserError(f"{file} holds more than {MAX_VALUES:,} values, aliases written out: no configuration does")
        if depth > MAX_DEPTH:
            raise UserError(f"{where}: more than {MAX_DEPTH} levels, which no configuration has")
        if node.tag not in PLAIN:
            raise UserError(f"{where}: the tag {node.tag!r}: a configuration holds plain values only")
        if isinstance(node, yaml.ScalarNode):
            yield key, node.value
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(key, item, depth + 1) for item in reversed(node.value)]
        else:
            waiting += [(_below(key, name), item, depth + 1) for name, item in _items(node, file)][::-1]


def _root(file: Path) -> yaml.MappingNode:
    if not file.is_file():
        raise UserError(f"the configuration {file} does not exist, or is no file")
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{file} has more than {MAX_BYTES // 1024} kB: is it a configuration?")
        root = yaml.compose(content.decode("utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"the configuration {file} cannot be read: {error}") from error
    except RecursionError as error:
        raise UserError(f"the configuration {file} has more levels than can be read") from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"the configuration {file} holds no keys")
    return root


def _items(node: yaml.MappingNode, file: Path) -> Iterator[tuple[str, yaml.Node]]:
    seen: set[str] = set()
    for key, value in node.value:
        where = f"{file}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{where}: a key that is no word")
        if key.value in seen:
            raise UserError(f"{where}: the key {key.value!r} stands there twice")
        seen.add(key.value)
        yield key.value, value


def _below(key: str, name: str) -> str:
    return key if name == "<<" else f"{key}.{name}".lstrip(".")
