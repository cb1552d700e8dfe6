"""The package as users get it: what travels with it, and how it works from another folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """`pip install .` into a folder of its own; the dependencies are those of this environment."""
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


@pytest.fixture
def fit(installed, tmp_path):
    """Run `python -m lm.fit` of the installed package in an empty folder."""

    def call(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "lm.fit", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            timeout=280,
        )

    return call


def test_every_shipped_configuration_and_the_demo_travel(installed):
    shipped = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert {path.name for path in (installed / "pretrain" / "configs").glob("*.yaml")} == shipped
    for asset in ("sotu/train.jsonl", "sotu/val.jsonl", "gpt2/merges.txt", "gpt2/LICENSE", "README.md"):
        assert (installed / "lm" / "assets" / asset).is_file()
    for asset in ("emoji64/train.parquet", "emoji64/val.parquet", "emoji64/LICENSE", "README.md"):
        assert (installed / "vision_mae" / "assets" / asset).is_file()


def test_help_explains_the_keys(fit):
    done = fit("--help")
    assert done.returncode == 0
    for word in ("--model.ffn.kind", "--data.source", "--tokens_per_parameter", "--resume", "One of moa.kinds()"):
        assert word in done.stdout


def test_without_arguments_the_demo_starts(fit, installed, tmp_path):
    """Two steps of it, from the installed text and configuration."""
    done = fit("--trainer.max_steps=2", "--trainer.limit_val_batches=2")
    assert done.returncode == 0, done.stderr
    assert "tensorboard --logdir runs/lm_tiny/" in done.stdout
    (summary,) = tmp_path.glob("runs/lm_tiny/*/summary.json")
    assert summary.is_file()


def test_print_config_gives_a_configuration_that_runs(fit, tmp_path):
    done = fit("--print_config")
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine.yaml").write_text(done.stdout)
    again = fit("--config", "mine.yaml", "--print_config")
    assert again.stdout == done.stdout
