"""LlamaMoE as a model and as a run: sizes, losses, what a step counts, resume, and what TensorBoard shows."""

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import moa
from lm.fit import config_folder, run
from lm.model import Llama, LlamaConfig, flops_per_token, num_parameters
from lm.module import LanguageModule
from lm.moe import MoEConfig
from lm.rules import optimizer_rules
from moa import FFNConfig
from pretrain.optim import OptimizerConfig, assign_parameters
from pretrain.schedules import ScheduleConfig, lr_multiplier
from tests.lm.runs import arguments, train
from tests.lm.test_configs import parse
from tests.runs import assert_identical, run_folder, state_of

ROOT = Path(__file__).parent.parent.parent

# name: d_model, layers, heads, total, activated; specified for swiglu.
SIZES = {
    "lm_moe_0.25b": (640, 6, 10, 251_044_480, 113_633_920),
    "lm_moe_0.5b": (768, 9, 12, 480_942_336, 183_671_040),
    "lm_moe_0.8b": (896, 12, 14, 822_324_608, 283_133_312),
    "lm_moe_1b": (1024, 13, 16, 1_138_590_720, 375_972_864),
    "lm_moe_2b": (1280, 15, 20, 1_996_574_720, 620_856_320),
}
SMALL_MOE = MoEConfig(n_experts=6, top_k=2)


def small_config(ffn: FFNConfig, moe: MoEConfig | None = SMALL_MOE) -> LlamaConfig:
    return LlamaConfig(vocab_size=50, d_model=16, n_layers=2, n_heads=2, ffn=ffn, moe=moe)


# Sizes.


@pytest.mark.parametrize("name", SIZES)
def test_configurations_have_the_parameters_they_are_named_by(name):
    settings = yaml.safe_load((config_folder() / f"{name}.yaml").read_text())["model"]
    d_model, n_layers, n_heads, total, activated = SIZES[name]
    assert (settings["d_model"], settings["n_layers"], settings["n_heads"]) == (d_model, n_layers, n_heads)
    config = LlamaConfig(
        settings["vocab_size"],
        d_model,
        n_layers,
        n_heads,
        FFNConfig(**settings["ffn"]),
        moe=MoEConfig(**settings["moe"]),
    )
    assert config.moe == MoEConfig()
    assert sum(num_parameters(config).values()) == total
    assert sum(num_parameters(config, activated=True).values()) == activated
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Llama(config).parameters()) == total


@pytest.mark.parametrize(
    "moe",
    [
        SMALL_MOE,
        MoEConfig(n_experts=3, top_k=1, n_shared=2, expert_hidden_features=5, shared_hidden_features=7),
        MoEConfig(n_experts=3, top_k=3, n_shared=0),
    ],
    ids=["usual", "two shared", "none shared"],
)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_counts_by_role_equal_the_modules_for_every_kind(moe, bias):
    for kind in moa.kinds():
        if moa.find_kind(kind).mixing is None:
            continue
        gated = moa.find_kind(kind).family == "moa"
        config = small_config(FFNConfig(kind, bias=bias, gate_bias=gated and bias), moe)
        model = Llama(config)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        roles = num_parameters(config)
        assert sum(roles.values()) == sum(sizes.values()), kind
        projections = sum(size for name, size in sizes.items() if ".experts.w" in name)
        assert roles["experts"] == projections, kind
        assert roles["shared"] == sum(size for name, size in sizes.items() if ".shared.w" in name), kind
        unused = sum(size for name, size in sizes.items() if ".experts." in name) * (1 - moe.top_k / moe.n_experts)
        activated = sum(num_parameters(config, activated=True).values())
        assert activated == sum(sizes.values()) - round(unused), kind


def test_shared_gates_are_counted_once():
    config = small_config(FFNConfig("bi-moa"), MoEConfig(n_experts=6, top_k=2, shared_gates=True))
    total = sum(parameter.numel() for parameter in Llama(config).parameters())
    assert sum(num_parameters(config).values()) == total
    assert num_parameters(config)["gates"] == num_parameters(config, activated=True)["gates"] == 2 * 14 * 16


def test_flops_are_those_of_the_activated_matrices():
    """Two for each weight that is multiplied with a token, plus attention's scores; three times that in training."""
    for settings in ({}, {"shared_gates": True}):
        config = small_config(FFNConfig("one-moa"), MoEConfig(n_experts=6, top_k=2, **settings))
        activated = num_parameters(config, activated=True)
        weights = sum(activated.values()) - activated["norm"] - activated["embedding"]
        if settings:
            assert activated["gates"] == 2 * 7 * 16
        assert flops_per_token(config, 32) == 3 * (2 * weights + 2 * 2 * 2 * 32 * 16)


@pytest.mark.parametrize("name", SIZES)
def test_configurations_follow_the_papers_recipe(name):
    cli = parse(config_folder() / f"{name}.yaml")
    optimizer, schedule, data = cli.model.optimizer_config, cli.model.schedule_config, cli.datamodule
    assert (optimizer.name, optimizer.betas, optimizer.weight_decay) == ("muon_adamw", (0.9, 0.95), 0.1)
    assert (schedule.name, schedule.warmup_steps) == ("wsd", 1000)
    assert (data.global_batch_size, data.sequence_length) == (512, 1024)
    assert cli.trainer.gradient_clip_val == 1.0
    assert cli.model.units_budget() == {"tokens_per_parameter": 100.0 * SIZES[name][4]}
    assert data.max_tokens > 100 * SIZES[name][4]  # it has to last for the run


def test_keys_of_the_mixture_can_be_overridden_from_the_command_line():
    cli = parse(config_folder() / "lm_moe_0.25b.yaml", "--model.moe.top_k=3", "--model.ffn.kind=qd-moa")
    assert cli.model.config.moe == MoEConfig(top_k=3)
    with torch.device("meta"):
        assert cli.model.build_model().blocks[0].ffn.experts.u.shape == (32, 10, 640)


# Training.


def module_of(kind: str = "one-moa", **moe: Any) -> LanguageModule:
    torch.manual_seed(0)
    module = LanguageModule(
        FFNConfig(kind),
        OptimizerConfig(lr=1e-2),
        ScheduleConfig(),
        vocab_size=50,
        d_model=16,
        n_layers=2,
        n_heads=2,
        moe=MoEConfig(**({"n_experts": 6, "top_k": 2} | moe)),
    )
    module.model = module.build_model().double()
    return module


def a_step(n_sequences: int = 8) -> dict[str, torch.Tensor]:
    tokens = torch.randint(50, (n_sequences, 17), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[1, 5:] = -100  # micro-batches with different numbers of targets
    return {"inputs": tokens[:, :-1], "targets": targets}


def gradients_of_a_step(module: LanguageModule, micro_batch_size: int) -> dict[str, torch.Tensor]:
    """Train on one step cut into micro-batches, as Lightning does: each loss is divided by their number."""
    batch = a_step()
    step_targets = int((batch["targets"] != -100).sum())
    starts = range(0, 8, micro_batch_size)
    module.plan = SimpleNamespace(accumulation=len(starts), world_size=1)
    module.zero_grad()
    for start in starts:
        part = {name: value[start : start + micro_batch_size] for name, value in batch.items()}
        output = module.training_step(part | {"step_targets": step_targets}, 0)
        (output["loss"] / len(starts)).backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_gradients_do_not_depend_on_how_a_step_is_cut(micro_batch_size):
    """All but the balance loss, which is not a mean over tokens."""
    whole = gradients_of_a_step(module_of(balance_loss=0.0, z_loss=0.1), 8)
    cut = gradients_of_a_step(module_of(balance_loss=0.0, z_loss=0.1), micro_batch_size)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_the_balance_loss_of_a_step_is_the_mean_over_its_micro_batches():
    module = module_of(balance_loss=0.5, z_loss=0.0)
    cut = gradients_of_a_step(module, 2)
    without = gradients_of_a_step(module_of(balance_loss=0.0, z_loss=0.0), 2)
    module.zero_grad()
    batch = a_step()
    losses = [module.model(batch["inputs"][i : i + 2], with_routing=True)[1].balance_loss.sum() for i in range(0, 8, 2)]
    (0.5 * torch.stack(losses).mean()).backward()
    for name, parameter in module.named_parameters():
        expected = without[name] if parameter.grad is None else without[name] + parameter.grad
        torch.testing.assert_close(cut[name], expected, rtol=1e-9, atol=1e-12, msg=name)


def test_training_loss_is_cross_entropy_plus_weighted_router_losses():
    module = module_of(balance_loss=0.25, z_loss=0.125)
    module.plan = SimpleNamespace(accumulation=1, world_size=1)
    batch = a_step()
    logits, routing = module.model(batch["inputs"], with_routing=True)
    picked = logits.log_softmax(-1).gather(-1, batch["targets"].clamp_min(0)[..., None])[..., 0]
    valid = batch["targets"] != -100
    cross_entropy = -(picked * valid).sum()
    output = module.training_step(batch | {"step_targets": int(valid.sum())}, 0)
    expected = cross_entropy / valid.sum() + 0.25 * routing.balance_loss.sum() + 0.125 * routing.z_loss.sum()
    assert output["loss"].item() == pytest.approx(expected.item(), rel=1e-5)  # cross-entropy in float32
    assert output["loss_sum"].item() == pytest.approx(cross_entropy.item(), rel=1e-5)
    assert not any(value.requires_grad for value in output["routing"])
    loss_sum, n_targets = module.loss(batch)
    assert loss_sum.item() == pytest.approx(cross_entropy.item(), rel=1e-5)
    assert n_targets == valid.sum()


def test_recomputation_of_activations_counts_nothing_twice():
    module = module_of(kind="swiglu")
    tokens = a_step()["inputs"]
    _, plain = module.model(tokens, with_routing=True)
    for block in module.model.blocks:
        original = block.forward

        def recomputed(*args: Any, original: Any = original) -> Any:
            return torch.utils.checkpoint.checkpoint(original, *args, use_reentrant=False)

        block.forward = recomputed
    logits, routing = module.model(tokens, with_routing=True)
    logits.sum().backward()
    assert torch.equal(routing.load, plain.load)
    assert int(routing.load[0].sum()) == 2 * tokens.numel()


def test_models_return_logits_unless_asked_for_routing():
    tokens = a_step()["inputs"]
    for moe in (None, SMALL_MOE):
        model = Llama(small_config(FFNConfig("swiglu"), moe))
        logits = model(tokens)
        assert logits.shape == (8, 16, 50)
        again, routing = model(tokens, with_routing=True)
        assert torch.equal(again, logits)
        assert (routing is None) == (moe is None)
    assert routing.load.shape == (2, 6)
    assert routing.z_loss.shape == (2,)


@pytest.mark.parametrize("kind", ["swiglu", "bi-moa", "bi-la", "moa"])
def test_muon_takes_the_matrices_of_every_expert_and_adamw_the_rest(kind):
    gated = kind.endswith("moa")
    model = Llama(small_config(FFNConfig(kind, bias=True, gate_bias=gated)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = assign_parameters(model.named_parameters(), optimizer_rules(OptimizerConfig("muon_adamw", lr=1e-2)))
    muon = {names[id(p)] for rule, parameters in groups if rule.optimizer == "muon" for p in parameters}
    adamw = {names[id(p)] for rule, parameters in groups if rule.optimizer == "adamw" for p in parameters}
    matrices = ("q", "k", "v", "o", "w1", "w2", "w3")
    assert muon == {
        name
        for name in names.values()
        if name.startswith("blocks.")
        and name.removesuffix(".weight").rsplit(".", 1)[-1] in matrices
        and ".ffn.shared.v" not in name
        and ".ffn.experts.v" not in name
    }
    assert {"blocks.0.ffn.router.weight", "blocks.1.ffn.experts.w1_bias", "embed.weight", "head.weight"} <= adamw


# Real runs.

MOE_RUN: dict[str, Any] = {
    "name": "small_moe",
    "model.ffn.kind": "one-moa",
    "model.moe.n_experts": 4,
    "model.moe.top_k": 2,
    "model.moe.bias_update_rate": 0.001,
    "model.optimizer.name": "muon_adamw",
    "model.schedule.name": "wsd",
}


def moe_arguments(runs_dir: Path, **changes: Any) -> list[str]:
    return arguments(runs_dir, **{name.replace(".", "__"): value for name, value in MOE_RUN.items()} | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a run of 20 steps of 2 micro-batches, validated at steps 10 and 20."""
    return run(moe_arguments(tmp_path_factory.mktemp("moe"))).folder


def rows_of(folder: Path) -> dict[int, dict[str, float]]:
    with (folder / "metrics.csv").open() as stream:
        return {int(row["step"]): {k: float(v) for k, v in row.items() if v} for row in csv.DictReader(stream)}


def test_ten_steps_and_ten_more_equal_twenty(finished, tmp_path):
    with pytest.raises(SystemExit):
        train(
            tmp_path,
            *("--trainer.callbacks+=tests.runs.StopAt", "--trainer.callbacks.step=10"),
            **{name.replace(".", "__"): value for name, value in MOE_RUN.items()},
        )
    folder = run_folder(tmp_path)
    half = state_of(folder / "checkpoints" / "last.ckpt")
    assert half["step"] == 10
    run(["--resume", str(folder), "--trainer.callbacks=[]"])
    whole = state_of(finished / "checkpoints" / "last.ckpt")
    assert_identical(state_of(folder / "checkpoints" / "last.ckpt"), whole)
    bias = "model.blocks.0.ffn.balance_bias"
    assert half["weights"][bias].any()
    assert not torch.equal(half["weights"][bias], whole["weights"][bias])
    learning_rates = [rows_of(folder)[step]["optim/lr"] for step in (5, 10, 15, 20)]
    assert learning_rates == [rows_of(finished)[step]["optim/lr"] for step in (5, 10, 15, 20)]


def test_the_loss_free_bias_moves_once_a_step(finished):
    """Each of 20 steps moves it by the rate, up or down or not at all, never once for each micro-batch."""
    bias = state_of(finished / "checkpoints" / "last.ckpt")["weights"]["model.blocks.1.ffn.balance_bias"] / 0.001
    torch.testing.assert_close(bias, bias.round(), rtol=0, atol=1e-3)
    assert 0 < bias.abs().max() <= 20


def test_the_schedule_hits_its_peak_holds_it_and_ends_at_zero(tmp_path):
    folder = run(moe_arguments(tmp_path, trainer__log_every_n_steps=1, trainer__val_check_interval=20)).folder
    rows = rows_of(folder)
    peak = 6e-3
    learning_rates = [rows[step]["optim/lr"] for step in range(1, 21)]
    assert learning_rates[:4] == pytest.approx([peak / 4, peak / 2, peak * 3 / 4, peak])
    assert learning_rates[3:16] == [peak] * 13  # to 80% of 20 steps
    assert learning_rates[16] < peak
    assert learning_rates[15:] == sorted(set(learning_rates[15:]), reverse=True)
    assert learning_rates[-1] == 0
    schedule = ScheduleConfig("wsd", warmup_steps=4)
    assert learning_rates == pytest.approx([peak * lr_multiplier(step, 20, schedule) for step in range(20)])


def test_counters_hold_the_training_tokens_and_nothing_else(finished, tmp_path):
    """They are the same in a run without validation, whose every token is a training token."""
    alone = rows_of(run(moe_arguments(tmp_path, trainer__limit_val_batches=0)).folder)
    for step, row in rows_of(finished).items():
        counters = {name: value for name, value in row.items() if name.startswith("moe/")}
        assert counters == {name: value for name, value in alone[step].items() if name.startswith("moe/")}
    assert sorted(alone) == [5, 10, 15, 20]


def test_counters_agree_with_each_other(finished):
    """A step has 4 sequences of 32 tokens, each with 2 of 4 experts."""
    for row in rows_of(finished).values():
        for layer in ("moe/blocks.0", "moe/blocks.1"):
            tokens_in_5_steps = 5 * 4 * 32
            for name in ("min_load", "max_load"):
                count = row[f"{layer}/{name}"] * tokens_in_5_steps
                assert count == pytest.approx(round(count), abs=1e-6)
            assert row[f"{layer}/imbalance"] == pytest.approx(row[f"{layer}/max_load"] / 0.5)
            assert 0 < row[f"{layer}/router_entropy"] <= 1
            assert row[f"{layer}/balance_loss"] == pytest.approx(1, abs=0.5)
            assert 0 < row[f"{layer}/z_loss"] < 2 * math.log(4) ** 2
        layers = [row[f"moe/blocks.{i}/imbalance"] for i in (0, 1)]
        assert row["moe/imbalance"] == pytest.approx(sum(layers) / 2)


def test_tensorboard_shows_load_and_gates_of_the_experts(finished):
    events = EventAccumulator(str(finished), size_guidance={"images": 0})
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    names = ("imbalance", "dead_experts", "router_entropy", "balance_loss", "z_loss", "min_load", "max_load")
    assert {f"moe/blocks.{layer}/{name}" for layer in (0, 1) for name in names} <= scalars
    assert {f"moe/{name}" for name in names} <= scalars
    assert {"gates/blocks.0.ffn/pi/gelu/mean", "gates/blocks.0.ffn.shared/pi/gelu/mean"} <= scalars
    assert [image.step for image in events.Images("moe/load")] == [10, 20]


def test_a_run_records_total_and_activated_parameters(finished):
    parameters = json.loads((finished / "summary.json").read_text())["parameters"]
    assert parameters["total"] == sum(parameters["roles"].values())
    assert parameters["activated"] == sum(parameters["activated_roles"].values()) < parameters["total"]


def test_tokens_per_parameter_counts_activated_parameters():
    module = module_of()
    module.tokens_per_parameter = 100
    assert module.units_budget() == {"tokens_per_parameter": 100 * module.parameter_counts()["activated"]}


@pytest.mark.slow
def test_two_processes_count_and_balance_as_one(tmp_path):
    """Loads are summed over the ranks, and the bias moves by the sum; only the balance loss is each rank's own."""
    changes = {"data__micro_batch_size": 1, "model__moe__balance_loss": 0.0, "trainer__max_steps": 4}
    changes |= {"trainer__log_every_n_steps": 2, "model__schedule__warmup_steps": 1}
    one = run(moe_arguments(tmp_path / "one", **changes)).folder
    command = [sys.executable, "-m", "lm.fit", *moe_arguments(tmp_path / "two", **changes)]
    command += ["--trainer.devices=2", "--trainer.strategy=ddp"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    two = run_folder(tmp_path / "two")
    bias = "model.blocks.0.ffn.balance_bias"
    weights = [state_of(folder / "checkpoints" / "last.ckpt")["weights"] for folder in (one, two)]
    assert torch.equal(weights[0][bias], weights[1][bias])
    ours, theirs = rows_of(one)[2], rows_of(two)[2]
    for name in ("max_load", "min_load", "router_entropy", "z_loss"):
        assert theirs[f"moe/blocks.0/{name}"] == pytest.approx(ours[f"moe/blocks.0/{name}"], rel=1e-4)
