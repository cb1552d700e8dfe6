"""The prepared script for a CUDA machine works, as far as a machine without one can tell."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moa
from benchmarks import check, device
from benchmarks.device import PARTS, Part, command_of, run_parts

ROOT = Path(__file__).parent.parent.parent

# What the CUDA machine lacks.
WITHOUT = "import sys\nfor name in ('datasets', 'jsonargparse'):\n    sys.modules[name] = None\n"


def test_the_script_runs_without_the_libraries_that_the_machine_lacks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    surroundings = {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [ROOT / "benchmarks" / "device.sh", "--dry", "check", "dense"],
        env=os.environ | surroundings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    files = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "out").iterdir()}
    assert {row["part"]: row["ended"] for row in files["summary"]} == {"check": "done", "dense": "done"}
    assert files["check"]["complete"]
    assert [row["side"] for row in files["dense"]["rows"]] == ["swiglu", "qd-moa"]


@pytest.mark.parametrize("name", ["floor", "ffn", "moe", "mae"])
def test_every_other_part_runs_small(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = command_of(name, dry=True, output=tmp_path)
    importlib.import_module(PARTS[name].module).main(command)
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["complete"]
    assert all(row["ratio"]["rounds"] == 2 for row in written["rows"])


@pytest.mark.parametrize("name", PARTS)
def test_every_part_understands_its_arguments_for_the_cuda_machine(name, tmp_path):
    chosen = importlib.import_module(PARTS[name].module).parse(command_of(name, dry=False, output=tmp_path))
    assert chosen.device == "cuda"


def test_all_parts_together_take_eight_minutes_at_most():
    assert sum(part.limit for part in PARTS.values()) <= 480


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    (tmp_path / "hanging.py").write_text("import time; time.sleep(600)")
    (tmp_path / "fine.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limits = {"broken": 20, "hanging": -18, "fine": 20}  # what the first leaves, the second may use
    monkeypatch.setattr(device, "PARTS", {name: Part(name, limit, "", "") for name, limit in limits.items()})
    assert not run_parts(list(limits), dry=True, output=tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [row["ended"] for row in summary] == ["failed", "out of time", "done"]
    assert [row["exit_code"] for row in summary] == [3, None, 0]
    assert summary[1]["seconds"] < 10
    assert run_parts(["fine"], dry=True, output=tmp_path)


def test_a_wrong_kernel_is_found(tmp_path, monkeypatch, capsys):
    right = moa.FeedForward.mix

    def wrong(self, y, z, weights):
        h = right(self, y, z, weights)
        if h.dtype == torch.float32 and h.shape[-1] == 7:
            h = h + torch.nn.functional.one_hot(torch.tensor(6), 7)  # a single channel of the smallest odd size
        return h

    monkeypatch.setattr(moa.FeedForward, "mix", wrong)
    file = tmp_path / "check.json"
    with pytest.raises(SystemExit) as ended:
        check.main(["--kinds", "swiglu", "--dtypes", "fp32", "--device", "cpu", "--json", str(file)])
    assert ended.value.code == 1
    assert "WRONG swiglu" in capsys.readouterr().out
    assert not json.loads(file.read_text())["rows"][0]["passed"]
