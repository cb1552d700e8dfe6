"""The benchmark of training steps: its step is that of a run, and its peers are the same model."""

import copy
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import train_step
from benchmarks.peers import build_peer, peer_names
from benchmarks.sides import FIRST_STEP, Setting, Task
from benchmarks.train_step import filling_batch
from pretrain.cli import config_folder
from pretrain.errors import UserError

LENGTH = 24


def task_of(name: str, dtype: str = "fp32", batch: int = 2) -> Task:
    return Task(Setting(config_folder() / f"{name}.yaml", batch, LENGTH, dtype, compile=False, device="cpu"))


def test_a_step_is_loss_backward_clip_and_adamw_on_the_configured_model():
    task = task_of("lm_tiny")
    side = task.build("qd-moa")
    plain = copy.deepcopy(side.model)
    settings = task.content["model"]["optimizer"]
    optimizer = torch.optim.AdamW(
        plain.parameters(),
        lr=settings["lr"] * FIRST_STEP,
        betas=settings["betas"],
        weight_decay=settings["weight_decay"],
    )
    for number in range(2):
        side.step()
        batch = task.batches[number]
        loss = F.cross_entropy(plain(batch["inputs"]).flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), task.content["trainer"]["gradient_clip_val"])
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(side.loss, loss.detach())
    for ours, theirs in zip(side.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_bf16_is_that_of_a_mixed_run():
    side = task_of("lm_tiny", dtype="bf16").build("swiglu")
    seen = []
    side.model.blocks[0].ffn.w1.register_forward_hook(lambda module, given, out: seen.append(out.dtype))
    side.step()
    assert seen == [torch.bfloat16]
    assert {parameter.dtype for parameter in side.model.parameters()} == {torch.float32}


def test_a_mixture_of_experts_trains_with_its_routers_losses():
    task = task_of("lm_moe_tiny")
    side = task.build("one-moa")
    side.step()
    batch = task.batches[0]
    cross_entropy = F.cross_entropy(
        task.build("one-moa").model(batch["inputs"]).flatten(0, 1), batch["targets"].flatten()
    )
    assert side.loss > cross_entropy + 1e-3
    assert peer_names(task) == []


def test_transformers_llama_is_the_baseline():
    task = task_of("lm_tiny")
    ours, peer = task.build("swiglu"), build_peer("transformers", task)
    assert peer.n_parameters() == task.module("swiglu").parameter_counts()["total"]
    names = {"embed.": "model.embed_tokens.", "norm.": "model.norm.", "head.": "lm_head."}
    inside = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn.": "self_attn."}
    inside |= {f"self_attn.{letter}.": f"self_attn.{letter}_proj." for letter in "qkvo"}
    inside |= {"ffn.w1": "mlp.gate_proj", "ffn.w2": "mlp.up_proj", "ffn.w3": "mlp.down_proj"}
    weights = {}
    for name, value in ours.model.state_dict().items():
        if name.startswith("blocks."):
            name = name.replace("blocks.", "model.layers.")
            for old, new in inside.items():
                name = name.replace(old, new)
        else:
            name = next(new + name.removeprefix(old) for old, new in names.items() if name.startswith(old))
        weights[name] = value
    peer.model.load_state_dict(weights)
    for side in (ours, peer):
        side.step()
        side.step()
    torch.testing.assert_close(peer.loss, ours.loss, rtol=1e-5, atol=1e-5)


def test_litgpt_is_of_the_same_size_and_starts_at_the_same_loss():
    pytest.importorskip("litgpt")
    task = task_of("lm_tiny")
    peer = build_peer("litgpt", task)
    assert peer.n_parameters() == task.module("swiglu").parameter_counts()["total"]
    peer.step()
    assert float(peer.loss) == pytest.approx(math.log(task.config.vocab_size), abs=0.5)


def test_the_plain_masked_autoencoder_is_the_baseline():
    task = task_of("mae_tiny")
    ours, peer = task.build("swiglu"), build_peer("plain", task)
    assert peer.n_parameters() == task.module("swiglu").parameter_counts()["total"]
    letters = {"w1": "fc1_g", "w2": "fc1_x", "w3": "fc2"}
    weights = {"encoder_positions": ours.model.positions, "decoder_positions": ours.model.decoder.positions}
    for name, value in ours.model.state_dict().items():
        if not name.endswith("positions"):
            for letter, timms in letters.items():
                name = name.replace(f"mlp.{letter}.", f"mlp.{timms}.")
            weights[name.removeprefix("decoder.")] = value
    peer.model.load_state_dict(weights)
    for side in (ours, peer):
        side.step()
        side.step()
    torch.testing.assert_close(peer.loss, ours.loss, rtol=1e-5, atol=1e-6)


def test_the_command_writes_rates_and_ratios_and_says_which_peer_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "litgpt", None)
    file = tmp_path / "step.json"
    config = str(config_folder() / "lm_tiny.yaml")
    arguments = f"--config {config} --kinds one-moa --length {LENGTH} --dtype bf16 --no-compile --no-memory --rounds 2"
    train_step.main([*arguments.split(), "--device", "cpu", "--json", str(file)])
    written = json.loads(file.read_text())
    assert written["complete"]
    assert written["notes"][0].startswith("litgpt is left out:")
    assert written["notes"][0] in capsys.readouterr().out
    rows = {row["side"]: row for row in written["rows"]}
    assert list(rows) == ["swiglu", "qd-moa", "one-moa", "transformers"]  # lm_tiny's own kind is qd-moa
    assert rows["swiglu"]["ratio"] == {"median": 1.0, "iqr": [1.0, 1.0], "ci95": None, "rounds": 2}
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(2 * LENGTH / row["seconds"]["median"])
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * row["flops_per_unit"] / row["peak_flops"])
        assert row["loss"] == pytest.approx(math.log(320), abs=0.5)
    assert rows["transformers"]["flops_per_unit"] == rows["swiglu"]["flops_per_unit"]


def test_memory_is_that_of_weights_and_optimizer_and_of_the_step():
    side = task_of("lm_tiny").build("swiglu")
    memory = side.memory()
    four_bytes = 4 * side.n_parameters()
    # Weights and two moments; a step counter of four bytes for each tensor.
    assert memory["state"] == 3 * four_bytes + 4 * len(list(side.model.parameters()))
    assert memory["total"] == memory["state"] + memory["step"]


def test_the_batch_that_fills_a_device():
    def memory_at(batch: int) -> dict[str, int | None]:
        return {"state": 100, "step": 50 + 3 * batch, "total": None}

    # 0.85 x 1000 - 2 x 100 - 50 = 600, at 3 a sample
    assert filling_batch(memory_at, n_sides=2, capacity=1000) == 200
    assert filling_batch(memory_at, n_sides=2, capacity=311) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "missing.yaml"], "cannot be read"),
        (["--config", "configs/lm_tiny.yaml", "--kinds", "nonsense"], "unknown kind 'nonsense'"),
        (["--config", "configs/lm_tiny.yaml", "--peers", "plain"], "has transformers, litgpt"),
        (["--config", "configs/lm_moe_tiny.yaml", "--peers", "litgpt"], "has no peers"),
        (["--config", "configs/lm_tiny.yaml", "--batch", "fill"], "is for a CUDA device"),
        (["--config", "configs/mae_linear.yaml"], "neither a language model nor a masked autoencoder"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        train_step.main([*arguments, "--device", "cpu"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_without_a_model_is_no_configuration(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("data: {}\n")
    with pytest.raises(UserError, match="no section `model`"):
        Task(Setting(Path(file), 2, LENGTH, "fp32", compile=False, device="cpu"))
