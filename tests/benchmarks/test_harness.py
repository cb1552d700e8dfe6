"""Sides take turns, ratios carry their spread, and a record is whole whatever ends a benchmark."""

import argparse
import json
import math

import pytest
import torch
from scipy import stats

from benchmarks.arguments import dtype_list, find_device, kind_list
from benchmarks.harness import Report, alternate, format_ratio, median_interval, ratio, spread, warn_if_busy
from pretrain.errors import UserError

CPU = torch.device("cpu")


def test_sides_take_turns_and_the_order_is_turned_round_each_time():
    called: list[str] = []
    sides = {name: lambda name=name: called.append(name) for name in "abc"}
    seconds = alternate(sides, rounds=3, device=CPU, warm_up=1)
    assert "".join(called) == "abc" + "abc" + "cba" + "abc"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_ratio_is_formed_within_each_round():
    # A machine that is ten times slower in one round changes no ratio.
    found = ratio([2.0, 20.0, 3.0, 2.5, 2.0], [1.0, 10.0, 1.0, 1.0, 2.0])
    assert found == {"median": 2.0, "iqr": [2.0, 2.5], "ci95": None, "rounds": 5}
    assert spread([4.0]) == {"median": 4.0, "iqr": [4.0, 4.0], "ci95": None, "rounds": 1}


def test_the_interval_of_a_median_is_that_of_scipy():
    generator = torch.Generator().manual_seed(0)
    for n in range(1, 70):
        values = torch.randn(n, generator=generator).tolist()
        theirs = stats.quantile_test(values, p=0.5).confidence_interval(0.95)
        expected = [theirs.low, theirs.high]
        assert median_interval(values) == (expected if math.isfinite(sum(expected)) else None)


def test_a_ratio_is_printed_with_what_is_known_of_it():
    assert format_ratio(spread([0.9, 1.0, 1.1])).strip() == "1.000 [0.950, 1.050]"
    assert format_ratio(spread([0.8, 0.9, 1.0, 1.0, 1.1, 1.3])).strip() == "1.000 (0.800 to 1.300) [0.925, 1.075]"


def test_a_record_says_where_it_was_made_and_is_whole_after_every_row(tmp_path):
    file = tmp_path / "deep" / "result.json"
    arguments = argparse.Namespace(rounds=2, json=file)

    def fail_half_way() -> None:
        with Report("example", arguments, CPU, file) as report:
            report.add({"ratio": ratio([1.0, 2.0], [1.0, 1.0]), "loss": float("nan")})
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    written = json.loads(file.read_text())
    found = {"median": 1.5, "iqr": [1.25, 1.75], "ci95": None, "rounds": 2}
    assert written["rows"] == [{"ratio": found, "loss": None}]
    assert written["arguments"] == {"rounds": 2, "json": str(file)}
    assert not written["complete"]
    place = written["environment"]
    assert place["device"] == "cpu"
    assert place["threads"] == torch.get_num_threads()
    assert place["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert len(place["load_average"]) == 3
    with Report("example", arguments, CPU, file):
        pass
    assert json.loads(file.read_text())["complete"]


def test_a_record_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot be written"),
        Report("example", argparse.Namespace(), CPU, tmp_path / "file" / "result.json"),
    ):
        raise AssertionError("must not begin")


@pytest.mark.parametrize(("load", "is_busy"), [(0.2, False), (1.5, True)])
def test_a_busy_machine_is_warned_of(load, is_busy, monkeypatch, capsys):
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    warn_if_busy()
    assert ("is busy" in capsys.readouterr().err) == is_busy


def test_mistakes_on_the_command_line_are_told():
    for name, message in (("cuda:99", "CUDA devices"), ("nonsense", "is no device"), ("meta", "cannot be measured")):
        with pytest.raises(UserError, match=message):
            find_device(name)
    with pytest.raises(argparse.ArgumentTypeError, match="valid kinds: relu"):
        kind_list("swiglu,nonsense")
    with pytest.raises(argparse.ArgumentTypeError, match="choose from fp32"):
        dtype_list("fp8")
    assert kind_list("swiglu, qd-moa") == ["swiglu", "qd-moa"]
