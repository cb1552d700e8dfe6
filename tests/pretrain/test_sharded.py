"""Two processes train as one does, sharded (FSDP2) or not (DDP), and a run moves between one and two of them.

Every run takes the same steps of four micro-batches of one sample, which one process takes one after the other. All
runs of two processes are made at once, since starting them costs most.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lm.fit import run as fit_lm
from lm.module import LanguageModule
from pretrain import optim
from pretrain.checkpoint import read_checkpoint
from pretrain.errors import INTERRUPTED_EXIT_CODE, UserError
from pretrain.recovery import why_torn
from pretrain.reload import load_module
from tests.lm import runs as lm_runs
from tests.ranks import run_on_two_ranks
from tests.runs import logged, run_folder
from tests.vision_mae import runs as mae_runs

pytestmark = pytest.mark.timeout(900)  # on a busy machine, two ranks wait for each other much of the time

CUT = {"data__micro_batch_size": 1, "trainer__val_check_interval": 20, "trainer__log_every_n_steps": 1}
CUT |= {"checkpoint_every_n_steps": 20}
LM = CUT | {"trainer__gradient_clip_val": 0.5, "trainer__limit_val_batches": None, "data__global_batch_size": 4}
MOE = {"model__moe__n_experts": 3, "model__moe__top_k": 2, "model__moe__bias_update_rate": 0.01}
MUON = {"model__optimizer__name": "muon_adamw"}
ADAMW = {"model__optimizer__name": "adamw"}
MAE = CUT | {"data__global_batch_size": 4, "model__probe__every_n_steps": 20}
UNVALIDATED = {"trainer__limit_val_batches": 0}  # a text sample of 160 tokens is most of the time
SHORT = {"trainer__max_steps": 4}
CASES = {
    "dense-adamw": LM | ADAMW | {"model__ffn__kind": "bi-la"},
    "dense-muon": LM | MUON | UNVALIDATED,
    "moe-adamw": LM | MOE | ADAMW | UNVALIDATED,
    "moe-muon": LM | MOE | MUON,
    "mae-adamw": MAE | ADAMW,
    "mae-muon": MAE | MUON,
    "bf16": LM
    | MOE
    | MUON
    | SHORT
    | UNVALIDATED
    | {"trainer__precision": "bf16-mixed", "model__activation_checkpointing": "full"},
}
STRATEGIES = {
    "ddp": ["--trainer.strategy=ddp"],
    "fsdp2": ["--trainer.strategy=fsdp2"],
    "hsdp": [
        "--trainer.strategy.class_path=pretrain.strategy.ShardedStrategy",
        "--trainer.strategy.init_args.replicas=2",
        "--trainer.strategy.init_args.timeout=0:10:00",
    ],
}
RUNS = [(case, strategy) for case in CASES for strategy in ("ddp", "fsdp2") if (case, strategy) != ("bf16", "ddp")]
RUNS += [("dense-muon", "hsdp")]


def job(case: str, strategy: str, folder: Path) -> tuple[str, list[str]]:
    module, runs = ("vision_mae.fit", mae_runs) if case.startswith("mae") else ("lm.fit", lm_runs)
    settings = CASES[case] | (SHORT if strategy == "hsdp" else {})
    return module, [*runs.arguments(folder, **settings), *STRATEGIES[strategy], "--trainer.devices=2"]


def stop_at(step: int) -> list[str]:
    return ["--trainer.callbacks=[]", "--trainer.callbacks+=tests.runs.StopAt", f"--trainer.callbacks.step={step}"]


@pytest.fixture(scope="module")
def exact():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "NEWTON_SCHULZ_TYPE", torch.float32)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory, exact) -> dict[tuple[str, str], Path]:
    """The run folders by case and strategy; ("moved", "") began on one process and went on with two."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.raises(SystemExit) as stop:
        lm_runs.train(root / "moved", *stop_at(7), **CASES["moe-muon"])
    assert stop.value.code == INTERRUPTED_EXIT_CODE
    moved = run_folder(root / "moved")
    moving = ["--resume", str(moved), "--trainer.devices=2", *STRATEGIES["fsdp2"], *stop_at(14)]
    jobs = [job(case, strategy, root / f"{case}-{strategy}") for case, strategy in RUNS]
    run_on_two_ranks([*jobs, ("lm.fit", moving)])
    found = {(case, strategy): run_folder(root / f"{case}-{strategy}") for case, strategy in RUNS}
    return {**found, ("moved", ""): moved}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, exact) -> dict[str, Path]:
    """The run folders of one process, by case."""
    root = tmp_path_factory.mktemp("alone")
    return {
        case: (mae_runs if case.startswith("mae") else lm_runs).train(root / case, **settings).folder
        for case, settings in CASES.items()
    }


def assert_same_course(ours: Path, theirs: Path, tolerance: float = 1e-5) -> None:
    """Compare the loss and the gradient's norm at every step, and the validation at the end."""
    ours, theirs = logged(ours), logged(theirs)
    for step, row in ours.items():
        for name in ("train/loss", "optim/grad_norm", "val/loss"):
            if name in row and name in theirs[step]:
                assert row[name] == pytest.approx(theirs[step][name], abs=tolerance), (step, name)


@pytest.mark.parametrize(("case", "strategy"), [pair for pair in RUNS if pair[0] != "bf16"])
def test_two_processes_train_as_one(folders, alone, case, strategy):
    """At every step, so the same weights at the start and the same samples; experts, balance and their biases too."""
    assert_same_course(folders[case, strategy], alone[case])
    last = max(logged(folders[case, strategy]))
    assert last == (4 if strategy == "hsdp" else 20)


def test_sharded_bfloat16_is_as_near_to_one_process_as_bfloat16_is(folders, alone):
    """Sent in bfloat16 and recomputed; the weights themselves and what is summed stay float32."""
    assert_same_course(folders["bf16", "fsdp2"], alone["bf16"], tolerance=0.02)
    weights = read_checkpoint(folders["bf16", "fsdp2"] / "checkpoints/last.ckpt")["state_dict"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_a_run_moves_from_one_process_to_two_and_back(folders, alone):
    """Saved by one process after step 7, by two ranks after step 14: every step sees the samples that it would have."""
    folder = folders["moved", ""]
    assert (folder / "checkpoints/last.ckpt").is_dir()
    fit_lm(["--resume", str(folder), "--trainer.devices=1", "--trainer.strategy=auto", "--trainer.callbacks=[]"])
    assert_same_course(folder, alone["moe-muon"])
    assert list(logged(folder)) == list(range(1, 21))
    moved, stayed = (read_checkpoint(path / "checkpoints/last.ckpt", True) for path in (folder, alone["moe-muon"]))
    assert moved["loops"]["fit_loop"]["state_dict"] == stayed["loops"]["fit_loop"]["state_dict"]
    for name, weight in stayed["state_dict"].items():
        torch.testing.assert_close(moved["state_dict"][name], weight, atol=1e-4, rtol=0)


def test_a_folder_of_slices_is_the_checkpoint_of_one_process(folders, alone):
    sharded = folders["moe-muon", "fsdp2"]
    assert len(list((sharded / "checkpoints/last.ckpt").glob("part-*"))) == 2
    ours, theirs = (read_checkpoint(f / "checkpoints/last.ckpt", True) for f in (sharded, alone["moe-muon"]))
    assert ours.keys() == theirs.keys()
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    module, _ = load_module(LanguageModule, sharded)
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(weight, theirs["state_dict"][name], atol=1e-4, rtol=0)
    (mine,), (other,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for number, entry in other["state"].items():
        for key, value in entry.items():
            torch.testing.assert_close(mine["state"][number][key], value, atol=1e-4, rtol=0)


def test_every_slice_has_its_checksum(folders, tmp_path):
    checkpoint = tmp_path / "last.ckpt"
    shutil.copytree(folders["dense-adamw", "fsdp2"] / "checkpoints/last.ckpt", checkpoint)
    assert why_torn(checkpoint) is None
    for part in sorted(checkpoint.glob("part-*")):
        with safe_open(part, "pt") as file:
            assert set(json.loads(file.metadata()["crc32"])) == set(file.keys())
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 128]))
    assert f"in {part.name} is wrong" in why_torn(checkpoint)


@pytest.mark.slow
def test_compiled_blocks_can_be_sharded(tmp_path):
    settings = LM | ADAMW | SHORT | UNVALIDATED
    eager = lm_runs.train(tmp_path / "eager", **settings).folder
    compiled = lm_runs.arguments(tmp_path / "compiled", **settings, model__compile_blocks=True)
    run_on_two_ranks([("lm.fit", [*compiled, *STRATEGIES["fsdp2"], "--trainer.devices=2"])])
    assert_same_course(run_folder(tmp_path / "compiled"), eager)


def test_what_cannot_be_saved_whole_is_refused(tmp_path):
    by_class = "--trainer.strategy.class_path=lightning.pytorch.strategies.ModelParallelStrategy"
    with pytest.raises(UserError, match="use fsdp2 or hsdp"):
        lm_runs.train(tmp_path, by_class)
    with pytest.raises(UserError, match="precision 64-true does not go with"):
        lm_runs.train(tmp_path, "--trainer.strategy=fsdp2", trainer__precision="64-true")
    assert not list(tmp_path.iterdir())
