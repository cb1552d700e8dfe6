"""Which configuration the command line implies."""

import pytest

from pretrain.arguments import with_config
from pretrain.errors import UserError


@pytest.fixture
def demo(tmp_path):
    file = tmp_path / "demo.yaml"
    file.write_text("name: demo\n")
    return file


def test_without_arguments_it_is_the_demo(demo):
    assert with_config([], demo) == ["--config", str(demo)]


def test_overrides_come_behind_the_demo(demo):
    assert with_config(["--name", "x"], demo) == ["--config", str(demo), "--name", "x"]


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"], ["-c", "{}"]])
def test_a_configuration_of_ones_own_replaces_it(demo, tmp_path, form):
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: mine\n")
    arguments = [word.format(mine) for word in form]
    assert with_config(arguments, demo) == arguments


@pytest.mark.parametrize("form", [["--resume", "{}"], ["--resume={}"]])
def test_a_resumed_run_brings_its_own(demo, tmp_path, form):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "last.ckpt").touch()
    arguments = [word.format(tmp_path / "run") for word in form]
    with pytest.raises(UserError, match=r"config\.yaml is missing"):
        with_config(arguments, demo)
    config = tmp_path / "run" / "config.yaml"
    config.write_text("name: run\n")
    assert with_config(arguments, demo) == ["--config", str(config), *arguments]


def test_two_runs_to_resume_are_one_too_many(demo):
    with pytest.raises(UserError, match="2 times"):
        with_config(["--resume", "a", "--resume=b"], demo)
