"""Configuration files of any content: looked through before anything of them is built."""

import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pretrain.errors import UserError
from pretrain.yaml_file import MAX_BYTES, check_yaml, scalars

WORDS = st.text(st.characters(categories=["L", "N", "P", "Z"]), min_size=1, max_size=8)
TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=12,
)


def written(folder: Path, text: str) -> Path:
    file = folder / "a.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def leaves(tree, key=""):
    """Yield the key of each scalar, by plain recursion."""
    if isinstance(tree, dict):
        for name, child in tree.items():
            yield from leaves(child, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for child in tree:
            yield from leaves(child, key)
    else:
        yield key


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), TREES, min_size=1, max_size=4))
def test_every_scalar_is_visited_in_order(tree):
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder), yaml.safe_dump(tree, allow_unicode=True, sort_keys=False))
        keys = [key.lstrip(".") for key in leaves(tree)]
        assert [key for key, _ in scalars(file)] == keys


@settings(max_examples=200, deadline=None)
@example("a: &x [*x]")
@example("? [1, 2]\n: 3")
@example("a: 1\n---\nb: 2")
@given(st.text(st.sampled_from("ab:- \n[]{}&*!?|>'\"#,%@<\t\0\ufeff\x85"), max_size=40))
def test_any_text_is_read_or_refused(text):
    with tempfile.TemporaryDirectory() as folder:
        try:
            check_yaml(written(Path(folder), text))
        except UserError:
            return
        assert isinstance(yaml.compose(text), yaml.MappingNode)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: &a {b: *a}\n", "levels, which no configuration has"),
        ("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 10)}]\n" for n in range(9)
        ), "aliases written out"),
        ("a: " + "[" * 20_000, "more levels"),
        ("a: " + "[" * 60 + "]" * 60, "more than 50 levels"),
        ("a: !!python/object/apply:os.system [touch ran]\n", "line 1: the tag"),
        ("a: !mine 3\n", "line 1: the tag '!mine'"),
        ("? [a, b]\n: 3\n", "a key that is no word"),
        ("trainer:\n  callbacks:\n  - {name: a, name: b}\n", "line 3: the key 'name' stands there twice"),
        ("a: 1\n" + "#" * MAX_BYTES, "more than 256 kB"),
        ("resume: runs/a\n", "--resume"),
    ],
    ids=lambda value: value[:20],
)  # fmt: skip
def test_what_has_no_end_or_is_more_than_values_is_refused(tmp_path, text, part):
    with pytest.raises(UserError, match=part):
        check_yaml(written(tmp_path, text))


def test_an_alias_and_a_merge_are_values_like_others(tmp_path):
    file = written(tmp_path, "base: &base {a: 1}\nmodel: {<<: *base, b: 2}\nlist: [*base]\n")
    assert list(scalars(file)) == [("base.a", "1"), ("model.a", "1"), ("model.b", "2"), ("list.a", "1")]


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(UserError, match="is no file"):
            check_yaml(path)
