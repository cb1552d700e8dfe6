"""Which configuration the command line implies."""

import pytest

from pretrain.arguments import with_config
from pretrain.errors import UserError
from tests.pretrain.test_recovery import save


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
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    save(last, 1)
    arguments = [word.format(tmp_path / "run") for word in form]
    with pytest.raises(UserError, match=r"config\.yaml is missing"):
        with_config(arguments, demo)
    config = tmp_path / "run" / "config.yaml"
    config.write_text("name: run\n")
    assert with_config(arguments, demo) == ["--config", str(config), "--resume", str(last)]


def test_auto_looks_where_the_run_would_lie_and_else_starts_it(demo, tmp_path, capfd):
    """Name and folder as the parser would read them: what comes later wins. The command line stays as it is."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"name: mine\nruns_dir: {tmp_path}\n")
    line = ["--config", str(mine), "--resume=auto", "--name", "other", "--trainer.max_steps=3"]
    without = [word for word in line if word != "--resume=auto"]
    assert with_config(line, demo) == without
    assert f"nothing to resume below {tmp_path / 'other'}" in capfd.readouterr().out
    last = tmp_path / "other" / "TIME" / "checkpoints" / "last.ckpt"
    save(last, 1)
    assert with_config(line, demo) == [*without, "--resume", str(last)]
    assert with_config(["--resume", "auto", f"--runs_dir={tmp_path}"], demo)[:2] == ["--config", str(demo)]


def test_two_runs_to_resume_are_one_too_many(demo):
    with pytest.raises(UserError, match="2 times"):
        with_config(["--resume", "a", "--resume=b"], demo)
