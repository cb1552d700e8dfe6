"""Names of outputs are checked before the work."""

from pathlib import Path

import pytest

from pretrain.errors import UserError
from pretrain.paths import new_output_path, output_path


def test_an_output_may_lie_in_folders_that_are_still_to_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert output_path("~/new/folder/x.json") == tmp_path / "new/folder/x.json"
    assert output_path("x.json") == new_output_path("x.json") == Path("x.json")
    assert output_path(tmp_path) == tmp_path  # what may be replaced is each command's own question
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("check", [output_path, new_output_path])
def test_where_nothing_can_be_made_is_told(tmp_path, monkeypatch, check):
    (tmp_path / "file").touch()
    for name, message in [
        (tmp_path / "file" / "x", "file is no writable folder: give another --output"),
        (tmp_path / "file" / "deeper" / "x", "file is no writable folder: give another --output"),
        (tmp_path / ("x" * 300), "cannot be written .File name too long"),
        (tmp_path / ("x" * 300) / "x", "cannot be written .File name too long"),
    ]:
        with pytest.raises(UserError, match=message):
            check(name)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # a superuser may write to every folder
    with pytest.raises(UserError, match=f"{tmp_path} is no writable folder"):
        check(tmp_path / "x")


def test_nothing_takes_the_place_of_what_is_there(tmp_path):
    with pytest.raises(UserError, match="exists already: give another --output, or remove it first"):
        new_output_path(tmp_path)
