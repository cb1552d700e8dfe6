"""The README is true: its commands run, its code runs, its links lead somewhere."""

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.harness import format_ratio
from lm.fit import config_folder
from tests.vision_mae.pictures import two_halves, write_folder

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

# What makes a run that would take minutes or a week take seconds, on any machine.
SHORT = ["--trainer.max_steps=2", "--trainer.limit_val_batches=1", "--trainer.accelerator=cpu"]
SMALL_MODEL = ["--model.d_model=32", "--model.n_layers=1", "--model.n_heads=1", "--trainer.precision=32-true"]
SMALL_BATCH = ["--data.global_batch_size=2", "--data.micro_batch_size=1", "--data.sequence_length=32"]
SMALL = {
    "vision_mae.fit": SHORT,
    "lm.generate": ["--n_tokens=20"],
    "lm.evaluate": ["--limit=1"],
    "pretrain.study": ["--dry_run"],  # hours
    "moa.theory": ["--quick", "--widths=1", "--starts=1", "--processes=1"],
    "benchmarks.ffn": ["--d=8", "--tokens=8", "--rounds=1", "--modes=eager", "--no-memory"],
    "benchmarks.train_step": [
        *("--config=configs/lm_tiny.yaml", "--length=16", "--rounds=1", "--no-compile", "--no-memory"),
    ],
}


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in code_blocks("bash") for line in block.splitlines() if line.startswith("python -m")]


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory) -> Path:
    """A folder as the README imagines it: some text of one's own, and the shipped configurations."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "configs").symlink_to(config_folder())
    (folder / "my_text").mkdir()
    for number in range(6):
        (folder / "my_text" / f"{number}.txt").write_text(f"Speech {number}: the state of the union is strong. " * 200)
    write_folder(folder / "my_pictures", n_images=80, side=64)
    two_halves().save(folder / "picture.png")
    return folder


def run(line: str, folder: Path) -> None:
    module, *arguments = shlex.split(line.removeprefix("python -m "), comments=True)
    package = importlib.util.find_spec(module).submodule_search_locations is not None
    main = importlib.import_module(f"{module}.__main__" if package else module).main
    if "--trainer.devices" in arguments:  # wants eight GPUs and the network
        with pytest.raises(SystemExit) as done:
            main([*arguments, "--print_config"])
        assert done.value.code == 0
        return
    arguments = [newest(folder, argument) if argument.endswith("/TIME") else argument for argument in arguments]
    if module != "lm.fit":
        main([*arguments, *SMALL.get(module, [])])
    elif "--resume" in arguments:
        main([*arguments, "--trainer.max_steps=3"])
    else:
        main([*arguments, *SHORT, *(SMALL_MODEL + SMALL_BATCH if "--config" in arguments else [])])


def newest(folder: Path, place: str) -> str:
    return str(max(folder.glob(place.replace("TIME", "*"))))


def test_its_commands_run_one_after_the_other(newcomer, monkeypatch, capfd):
    monkeypatch.chdir(newcomer)
    for line in COMMANDS:
        run(line, newcomer)
    shown = capfd.readouterr().out
    fits = [line for line in COMMANDS if ".fit " in line and "--trainer.devices" not in line]
    assert len(fits) == 6
    assert shown.count("look at it  tensorboard --logdir") == len(fits)
    assert "train on it: python -m lm.fit --data.source my_tokens --data.val_source null" in shown


def test_its_python_runs():
    names: dict = {}
    exec("import torch; x = torch.randn(2, 768)", names)
    for block in code_blocks("python"):
        exec(block, names)
    assert names["ffn"](names["x"]).shape == (2, 768)
    assert names["moa"].build_ffn("diagonal-moa", 8, 16)(names["torch"].randn(3, 8)).shape == (3, 8)
    names["moa"].registry._KINDS.pop("diagonal-moa")


def test_every_kind_and_every_configuration_is_listed():
    import moa

    for kind in moa.kinds():
        assert f"`{kind}`" in README
    for config in config_folder().glob("*.yaml"):
        assert f"`configs/{config.name}`" in README


def test_the_differences_it_quotes_are_those_of_published_reports():
    reports = "".join(path.read_text() for path in (ROOT / "docs/studies").glob("*/report.md"))
    quoted = re.findall(r"[+-]0\.\d{4} ± 0\.\d{4}", README)
    assert len(quoted) >= 10
    assert [difference for difference in quoted if difference not in reports] == []


def test_the_ratios_it_quotes_with_an_interval_are_those_of_committed_results():
    reports = [json.loads(file.read_text()) for file in (ROOT / "benchmarks/results").glob("train_step*.json")]
    reports.append(json.loads((ROOT / "benchmarks/results/ffn.json").read_text()))
    ratios = [row["ratio"] for report in reports for row in report["rows"]]
    measured = {format_ratio(found).partition(" [")[0] for found in ratios if found.get("ci95")}
    quoted = re.findall(r"\d\.\d{3} \(\d\.\d{3} to \d\.\d{3}\)", README)
    assert len(quoted) >= 12
    assert [ratio for ratio in quoted if ratio not in measured] == []


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/vision.md"])
def test_links_lead_to_files(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_the_make_targets_it_names_exist():
    for line in (line for block in code_blocks("bash") for line in block.splitlines() if line.startswith("make ")):
        target = line.split()[1]
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
