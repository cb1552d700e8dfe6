"""Any value of any key makes a plan, or is refused in one line: no traceback, nothing left, whatever the domain."""

import contextlib
import io
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lm.fit
import pretrain.cli
import vision_mae.fit
from tests.lm.runs import arguments as lm_arguments
from tests.vision_mae.runs import arguments as vision_arguments

DOMAINS = {"lm": (lm.fit, lm_arguments), "vision_mae": (vision_mae.fit, vision_arguments)}
# What answers by itself, and what the shape of a test run depends on.
NOT_TRIED = ("config", "print_config", "help")


class PlannedError(BaseException):
    """The run would begin now."""


@pytest.fixture(autouse=True)
def _plan_only(monkeypatch, tmp_path):
    def begin(folder: Path, anew: bool) -> None:
        raise PlannedError

    monkeypatch.setattr(pretrain.cli, "claimed", begin)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    yield
    torch.use_deterministic_algorithms(False)  # trainer.deterministic
    torch.autograd.set_detect_anomaly(False)


def outcome(domain: str, *extra: str) -> str:
    """Return "planned" or the line of the refusal."""
    command, arguments = DOMAINS[domain]
    told, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(said):
        try:
            command.main([*arguments(Path("runs")), *extra])
        except PlannedError:
            return "planned"
        except SystemExit as stop:
            code = stop.code
    assert code == 2
    # Lightning warns through the same stream.
    lines = [line for line in told.getvalue().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, told.getvalue()
    assert told.getvalue().splitlines()[-1] == lines[0]
    assert len(lines[0]) < 1500
    assert lines[0].isprintable()
    assert not Path("runs").exists()
    return lines[0]


def keys(domain: str) -> list[str]:
    """Return all keys of a domain's command line."""
    command, arguments = DOMAINS[domain]
    found = []

    def look(parser, *_, **__):
        found.extend(action.dest for action in parser._actions if not action.dest.startswith(NOT_TRIED))
        raise PlannedError

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(PlannedError):
        patch.setattr(pretrain.cli.OneLineParser, "parse_args", look)
        command.main(arguments(Path("runs")))
    return sorted(found)


numbers = st.one_of(
    st.sampled_from(["0", "-1", "1", "2", "0.5", "-0.5", ".nan", ".inf", "-.inf", "1e-300", "1e300", "0x7fffffff"]),
    st.integers(-(10**30), 10**30).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
)
words = st.one_of(
    st.sampled_from(["", "null", "true", "~", "[]", "{}", "[[]]", "{a: 1}", "!!python/object:os.system x", "&a [*a]"]),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30),
    st.lists(numbers, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
)


@pytest.mark.parametrize("domain", DOMAINS)
def test_any_value_of_any_key(domain):
    @settings(max_examples=int(os.environ.get("MOA_EXAMPLES", 10)), deadline=None, database=None)
    @given(st.sampled_from(keys(domain)), st.one_of(numbers, words))
    def check(key, value):
        outcome(domain, f"--{key}={value}")

    check()
