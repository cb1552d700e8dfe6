"""The benchmark of layers: its bytes equal a count by hand, and both sides of a row are what they say."""

import json

import pytest
import torch
from torch import nn

import moa
from benchmarks import ffn
from benchmarks.ffn import Problem, Side, peak_bytes
from benchmarks.memory import in_child, peak_growth, saved_bytes

T, D_MODEL, WIDTH = 6, 4, 10
FP32 = 4


def test_what_a_known_layer_keeps_is_counted_once_and_without_its_weights():
    first, second = nn.Linear(D_MODEL, WIDTH), nn.Linear(WIDTH, D_MODEL)
    x = torch.randn(T, D_MODEL)

    def forward() -> torch.Tensor:
        return second(first(x).tanh())  # the output of tanh is kept by tanh and by the second layer

    kept = saved_bytes(forward, [*first.parameters(), *second.parameters()])
    assert kept == FP32 * (T * D_MODEL + T * WIDTH)


def test_views_of_one_storage_count_as_that_storage():
    both, last = nn.Linear(D_MODEL, 2 * WIDTH, bias=False), nn.Linear(WIDTH, D_MODEL, bias=False)
    x = torch.randn(T, D_MODEL)

    def forward() -> torch.Tensor:
        y, z = both(x).chunk(2, dim=-1)
        return last(y * z)

    assert saved_bytes(forward, [both.weight, last.weight]) == FP32 * (T * D_MODEL + T * 2 * WIDTH + T * WIDTH)


def test_gates_are_told_apart():
    problem = Problem(D_MODEL, T, "bf16", "cpu", "auto")
    assert Side("qd-moa", "eager", problem).gate_bytes() == 2 * T * 10
    assert Side("bi-moa", "eager", problem).gate_bytes() == 2 * T * 14
    assert Side("qd-la", "eager", problem).gate_bytes() == 0


def test_the_peak_of_a_step_is_that_of_the_memory_in_use():
    (peak,) = in_child(peak_bytes, Problem(64, 8192, "fp32", "cpu", "auto"), [("relu", "eager")])
    hidden, narrow = FP32 * 8192 * 256, FP32 * 8192 * 64
    # At the worst moment the backward pass holds the hidden activation and its gradient, each once before and once
    # after the ReLU at most, and the gradient of the input.
    assert 2 * hidden < peak < 4 * hidden + 2 * narrow


def test_a_system_that_does_not_tell_gives_no_figure(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.memory.STATUS", tmp_path / "missing")
    assert peak_growth(lambda: None, torch.device("cpu")) is None


def test_the_command_measures_each_kind_beside_swiglu(tmp_path, capsys):
    file = tmp_path / "ffn.json"
    arguments = ["--d", "8", "--tokens", "16", "--modes", "eager", "--rounds", "2", "--device", "cpu", "--no-memory"]
    ffn.main([*arguments, "--json", str(file)])
    written = json.loads(file.read_text())
    assert written["complete"]
    assert [row["kind"] for row in written["rows"]] == moa.kinds()
    for row in written["rows"]:
        assert row["ratio"]["rounds"] == 2
        assert row["ratio"]["iqr"][0] <= row["ratio"]["median"] <= row["ratio"]["iqr"][1]
        assert row["saved_bytes"] > row["gate_bytes"]
        assert row["hidden_features"] == moa.hidden_features(row["kind"], 8)
    by_kind = {row["kind"]: row for row in written["rows"]}
    assert by_kind["swiglu"]["saved_bytes"] == by_kind["swiglu"]["baseline_saved_bytes"]
    assert "qd-moa" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", ""], "argument --json: '' is no name of a file"),
        (["--kinds", ""], "argument --kinds: '' names nothing"),
        (["--kinds", ","], "argument --kinds: ',' names nothing"),
        (["--modes", ","], "argument --modes: ',' names nothing"),
    ],
)
def test_empty_arguments_are_told(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        ffn.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_both_sides_of_a_compiled_row_are_compiled(monkeypatch):
    compiled: list[str] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(self.kind))
    ffn.main("--d 8 --tokens 4 --kinds qd-moa --modes compiled --rounds 1 --device cpu --no-memory".split())
    assert compiled == ["swiglu", "qd-moa"]


@pytest.mark.parametrize("mistake", [["--kinds", "nonsense"], ["--modes", "fast"], ["--rounds", "0"]])
def test_a_mistake_ends_with_exit_code_2(mistake, capsys):
    with pytest.raises(SystemExit) as ended:
        ffn.main(mistake)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err
