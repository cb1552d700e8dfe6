"""The optimizer against torch's own, its routing of parameters, and real tiny Lightning runs with it."""

import json
import math
from copy import deepcopy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from lm.rules import optimizer_rules
from pretrain.optim import (
    MuonAdamW,
    MuonConfig,
    OptimizerConfig,
    Rule,
    assign_parameters,
    batches_of_equal_matrices,
    build_optimizer,
    decay_rules,
    format_table,
    newton_schulz,
)
from pretrain.schedules import ScheduleConfig, build_schedule


def random_parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_random_gradients(parameters, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def muon_group(parameters, **settings) -> dict:
    return {"name": "matrices", "params": list(parameters), "optimizer": "muon", **settings}


def adamw_group(parameters, **settings) -> dict:
    return {"name": "rest", "params": list(parameters), "optimizer": "adamw", **settings}


# --- the two halves against torch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_half_equals_torch_muon_over_several_steps(nesterov):
    shapes = [(16, 16), (16, 16), (24, 16), (16, 24), (7, 3)]
    ours, theirs = random_parameters(*shapes), random_parameters(*shapes)
    settings = {"lr": 0.02, "weight_decay": 0.1, "nesterov": nesterov}
    optimizer = MuonAdamW([muon_group(ours)], **settings)
    reference = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)
    for step in range(5):
        set_random_gradients(ours, step)
        set_random_gradients(theirs, step)
        optimizer.step()
        reference.step()
    for p, q, initial in zip(ours, theirs, random_parameters(*shapes), strict=True):
        # One bf16 rounding step of an update is lr * scale * 2^-8; batched and single matmul may round differently.
        rounding = 0.02 * 0.2 * math.sqrt(max(p.shape)) * 2**-8
        torch.testing.assert_close(p, q, atol=5 * rounding, rtol=0)
        assert (p - initial).abs().max() > 100 * rounding


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_half_equals_torch_adamw_to_the_last_bit(fused):
    shapes = [(16, 16), (24, 16), (5,), (), (3, 4, 5)]
    ours, theirs = random_parameters(*shapes), random_parameters(*shapes)
    settings = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = MuonAdamW([adamw_group(ours)], fused=fused, **settings)
    reference = torch.optim.AdamW(theirs, fused=fused, **settings)
    for step in range(5):
        set_random_gradients(ours, step)
        set_random_gradients(theirs, step)
        optimizer.step()
        reference.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(4, 12, 8), (4, 8, 12), (4, 8, 8)])
def test_a_stack_of_experts_is_stepped_as_separate_matrices(shape):
    [stack] = random_parameters(shape)
    singles = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    optimizer = MuonAdamW([muon_group([stack])], lr=0.02)
    reference = torch.optim.Muon(singles, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        set_random_gradients([stack], step)
        for single, gradient in zip(singles, stack.grad, strict=True):
            single.grad = gradient.clone()
        optimizer.step()
        reference.step()
    rounding = 0.02 * 0.2 * math.sqrt(max(shape[-2:])) * 2**-8
    torch.testing.assert_close(stack.detach(), torch.stack([s.detach() for s in singles]), atol=5 * rounding, rtol=0)


def test_newton_schulz_moves_singular_values_near_one_and_keeps_the_singular_vectors():
    matrices = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(1))
    result = newton_schulz(matrices.bfloat16(), steps=5).float()
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    assert ((values := torch.linalg.svdvals(result)) > 0.6).all()
    assert (values < 1.3).all()
    in_their_basis = u.mT @ result @ vh.mT
    off_diagonal = in_their_basis - torch.diag_embed(torch.diagonal(in_their_basis, dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 0.05


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (2, 32, 32)])
def test_the_update_has_the_root_mean_square_of_adamw(shape):
    """0.2 sqrt(max(rows, cols)) makes the RMS about 0.2 lr, whatever the shape (paper, training appendix)."""
    [parameter] = random_parameters(shape)
    before = parameter.detach().clone()
    set_random_gradients([parameter], 0)
    MuonAdamW([muon_group([parameter])], lr=1.0, weight_decay=0.0).step()
    assert (parameter - before).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)


def test_batches_hold_equal_matrices_up_to_transposition_and_respect_the_limit():
    a, b, c, d, e = random_parameters((4, 6), (6, 4), (4, 4), (5, 4, 6), (4, 6))
    assert batches_of_equal_matrices([a, b, c, d, e], max_elements=10_000) == [[a, b, d, e], [c]]
    assert batches_of_equal_matrices([a, b, c, d, e], max_elements=50) == [[a, b], [c], [d], [e]]


def test_a_small_batch_limit_does_not_change_the_result(monkeypatch):
    shapes = [(8, 12), (12, 8), (3, 8, 12), (8, 12)]
    results = []
    for limit in (2**24, 1):
        monkeypatch.setattr("pretrain.optim.MAX_BATCH_ELEMENTS", limit)
        parameters = random_parameters(*shapes)
        set_random_gradients(parameters, 0)
        MuonAdamW([muon_group(parameters)], lr=0.01).step()
        results.append(parameters)
    for together, alone in zip(*results, strict=True):
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


# --- the contract of an optimizer -------------------------------------------------------------------------------------


def both_halves():
    matrix, stack, vector = random_parameters((6, 4), (2, 4, 6), (5,))
    return [matrix, stack, vector], MuonAdamW([muon_group([matrix, stack]), adamw_group([vector])], lr=0.1)


def test_zero_gradients_only_decay_the_weights():
    parameters, optimizer = both_halves()
    before = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.detach(), old * (1 - 0.1 * 0.1))


def test_parameters_without_gradient_are_left_alone():
    parameters, optimizer = both_halves()
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    assert not optimizer.state


def test_gradients_are_never_written_to():
    parameters, optimizer = both_halves()
    set_random_gradients(parameters, 0)
    before = [(p.grad, p.grad.clone()) for p in parameters]
    optimizer.step()
    for parameter, (same, copy) in zip(parameters, before, strict=True):
        assert parameter.grad is same
        assert torch.equal(parameter.grad, copy)


def test_the_closure_runs_first_and_with_gradients_enabled():
    parameters, optimizer = both_halves()
    before = parameters[0].detach().clone()

    def closure():
        loss = sum(p.square().sum() for p in parameters)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() > 0
    assert not torch.equal(parameters[0], before)


def test_state_dict_round_trip_goes_on_to_the_last_bit(tmp_path):
    parameters, optimizer = both_halves()
    set_random_gradients(parameters, 0)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    others, resumed = both_halves()
    for parameter, other in zip(parameters, others, strict=True):
        other.data.copy_(parameter.data)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in (1, 2):
        for params, opt in ((parameters, optimizer), (others, resumed)):
            set_random_gradients(params, step)
            opt.step()
    assert all(torch.equal(p, q) for p, q in zip(parameters, others, strict=True))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"optimizer": "muon", "params": [nn.Parameter(torch.zeros(3))]}, "takes matrices"),
        ({"optimizer": "muon", "params": [nn.Parameter(torch.zeros(2, 3, 1, 1))]}, "takes matrices"),
        ({"optimizer": "sgd", "params": [nn.Parameter(torch.zeros(3))]}, "adamw, muon"),
        ({"params": [nn.Parameter(torch.zeros(3))]}, "adamw, muon"),
    ],
)
def test_a_group_that_no_half_can_take_is_refused(group, message):
    with pytest.raises(ValueError, match=message):
        MuonAdamW([group])


# --- rules and the table ----------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))


def language_model(moe: bool = False, gates: bool = False, coefficients: bool = False, bias: bool = False) -> nn.Module:
    """An empty module with the parameter names of the language models."""
    d, hidden, experts = 8, 16, 4
    model = nn.Module()
    model.embed, model.head, model.norm = nn.Embedding(32, d), nn.Linear(d, 32, bias=False), Norm(d)
    model.blocks = nn.ModuleList(nn.Module() for _ in range(2))
    for block in model.blocks:
        block.attn_norm, block.ffn_norm, block.attn = Norm(d), Norm(d), nn.Module()
        for name in "qkvo":
            block.attn.add_module(name, nn.Linear(d, d, bias=False))
        ffn = nn.Module()
        ffn.w1, ffn.w2, ffn.w3 = nn.Linear(d, hidden, bias), nn.Linear(d, hidden, bias), nn.Linear(hidden, d, bias)
        if gates:
            ffn.u, ffn.v = nn.Linear(d, 5, bias), nn.Linear(d, 5, bias)
        if coefficients:
            ffn.alpha, ffn.beta = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
        block.ffn = ffn
        if moe:
            block.ffn = nn.Module()
            block.ffn.shared, block.ffn.router, block.ffn.experts = ffn, nn.Linear(d, experts, bias=False), nn.Module()
            shapes = {"w1": (experts, hidden, d), "w2": (experts, hidden, d), "w3": (experts, d, hidden)}
            if gates:
                shapes |= {"u": (experts, 5, d), "v": (experts, 5, d)}
            for name, shape in shapes.items():
                block.ffn.experts.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return model


@pytest.mark.parametrize("name", ["adamw", "muon_adamw"])
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("extras", [{}, {"gates": True, "bias": True}, {"coefficients": True}])
def test_every_language_model_is_routed_completely_and_the_table_sums_to_the_total(name, moe, extras):
    model = language_model(moe=moe, **extras)
    config = OptimizerConfig(name=name, lr=1e-3)
    optimizer, table = build_optimizer(config, model.named_parameters(), optimizer_rules(config))
    assert sum(row["parameters"] for row in table) == sum(p.numel() for p in model.parameters())
    assert sum(row["tensors"] for row in table) == len(list(model.parameters()))
    assert len({row["group"] for row in table}) == len(table) == len(optimizer.param_groups)
    assert json.loads(json.dumps(table)) == table
    text = format_table(table)
    assert all(row["group"] in text for row in table)
    assert f"{sum(p.numel() for p in model.parameters()):,}" in text.splitlines()[-1]


def test_muon_takes_the_layers_matrices_and_adamw_all_else():
    model = language_model(moe=True, gates=True)
    config = OptimizerConfig(name="muon_adamw", lr=1e-3)
    _, table = build_optimizer(config, model.named_parameters(), optimizer_rules(config))
    halves = {row["group"]: row["optimizer"] for row in table}
    assert {group for group, half in halves.items() if half == "muon"} == {"attention", "ffn", "experts"}
    assert {group for group, half in halves.items() if half == "adamw"} == {"embed", "head", "norms", "router", "gates"}

    config = OptimizerConfig(name="muon_adamw", lr=1e-3, muon=MuonConfig(gates="muon"))
    _, table = build_optimizer(config, model.named_parameters(), optimizer_rules(config))
    assert {row["group"]: row["optimizer"] for row in table}["gates"] == "muon"


def test_everything_decays_by_default_and_only_matrices_on_request():
    model = language_model(gates=True, bias=True)
    config = OptimizerConfig(lr=1e-3)
    _, table = build_optimizer(config, model.named_parameters(), optimizer_rules(config))
    assert {row["weight_decay"] for row in table} == {0.1}
    config = OptimizerConfig(lr=1e-3, decay="matrices")
    _, table = build_optimizer(config, model.named_parameters(), optimizer_rules(config))
    assert {row["group"] for row in table if row["weight_decay"] == 0} == {"norms", "biases"}


def test_decay_rules_exempt_vectors_and_named_tables():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model.register_parameter("cls_token", nn.Parameter(torch.zeros(1, 1, 4)))
    config = OptimizerConfig(lr=1e-3, decay="matrices", weight_decay=0.05)
    _, table = build_optimizer(config, model.named_parameters(), decay_rules([r"^cls_token$"]))
    assert {row["group"]: (row["tensors"], row["weight_decay"]) for row in table} == {
        "no_decay": (4, 0.0),
        "decay": (1, 0.05),
    }


def test_a_rule_that_matches_nothing_is_an_error_unless_optional():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'router'.*matches no parameter"):
        assign_parameters(model.named_parameters(), [Rule("router", "router"), Rule("all")])
    [(rule, members)] = assign_parameters(
        model.named_parameters(), [Rule("router", "router", optional=True), Rule("all")]
    )
    assert rule.group == "all"
    assert len(members) == 2


def test_a_parameter_left_over_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"no optimizer rule matches bias \(2,\)"):
        assign_parameters(nn.Linear(2, 2).named_parameters(), [Rule("matrices", r"weight$")])


def test_the_first_rule_wins_and_rules_of_one_group_must_agree():
    model = nn.Linear(2, 2)
    groups = assign_parameters(model.named_parameters(), [Rule("first", "bias"), Rule("second")])
    assert [(rule.group, len(members)) for rule, members in groups] == [("first", 1), ("second", 1)]
    with pytest.raises(ValueError, match="disagree"):
        assign_parameters(model.named_parameters(), [Rule("a", "bias"), Rule("a", "weight", decay=False)])


def test_frozen_parameters_are_skipped_and_tied_ones_taken_once():
    model = language_model()
    model.head.weight = model.embed.weight
    model.norm.weight.requires_grad_(False)
    config = OptimizerConfig(lr=1e-3)
    names = model.named_parameters(remove_duplicate=False)
    optimizer, table = build_optimizer(config, names, optimizer_rules(config))
    members = [p for group in optimizer.param_groups for p in group["params"]]
    assert len({id(p) for p in members}) == len(members)
    assert sum(row["parameters"] for row in table) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_vector_sent_to_muon_is_an_error_that_names_it():
    with pytest.raises(ValueError, match=r"sends bias \(2,\) to Muon"):
        assign_parameters(nn.Linear(2, 2).named_parameters(), [Rule("all", optimizer="muon")])


def test_the_name_of_the_optimizer_and_the_rules_must_agree():
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="no rule sends a parameter to Muon"):
        build_optimizer(OptimizerConfig(name="muon_adamw", lr=1.0), model.named_parameters(), decay_rules())
    with pytest.raises(ValueError, match="some rules send parameters to Muon"):
        build_optimizer(OptimizerConfig(lr=1.0), model.named_parameters(), [Rule("all", optimizer="muon")])


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(OptimizerConfig(lr=1.0), [], [])


# --- configuration ----------------------------------------------------------------------------------------------------


def test_base_lr_is_per_256_samples_of_the_global_batch():
    assert OptimizerConfig(base_lr=1.5e-4).peak_lr(4096) == pytest.approx(2.4e-3)
    assert OptimizerConfig(lr=2e-3).peak_lr(4096) == 2e-3
    _, table = build_optimizer(OptimizerConfig(base_lr=1e-3), nn.Linear(2, 2).named_parameters(), decay_rules(), 512)
    assert {row["lr"] for row in table} == {2e-3}
    with pytest.raises(ValueError, match="needs a global batch size"):
        OptimizerConfig(base_lr=1e-3).peak_lr()


def test_a_group_may_have_a_learning_rate_multiplier():
    rules = [Rule("slow", "bias", lr_multiplier=0.1), Rule("rest")]
    _, table = build_optimizer(OptimizerConfig(lr=1.0), nn.Linear(2, 2).named_parameters(), rules)
    assert {row["group"]: row["lr"] for row in table} == {"slow": 0.1, "rest": 1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "neither is set"),
        ({"lr": 1.0, "base_lr": 1.0}, "both are set"),
        ({"lr": 0.0}, "positive"),
        ({"lr": float("nan")}, "positive"),
        ({"base_lr": -1.0}, "positive"),
        ({"lr": 1.0, "name": "sgd"}, "adamw, muon_adamw"),
        ({"lr": 1.0, "decay": "some"}, "all, matrices"),
        ({"lr": 1.0, "betas": (0.9, 1.0)}, "betas"),
        ({"lr": 1.0, "eps": 0.0}, "eps"),
        ({"lr": 1.0, "weight_decay": -0.1}, "weight_decay"),
        ({"lr": 1.0, "muon": MuonConfig()}, "use muon_adamw"),
    ],
)
def test_a_bad_setting_is_told_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        OptimizerConfig(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{"momentum": 1.0}, {"ns_steps": 0}, {"gates": "sgd"}])
def test_a_bad_muon_setting_is_told(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        MuonConfig(**settings)


def test_the_command_line_builds_the_config():
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(OptimizerConfig, "optimizer")
    args = ["--optimizer.name=muon_adamw", "--optimizer.lr=1e-3", "--optimizer.muon.momentum=0.9"]
    config = parser.instantiate_classes(parser.parse_args(args)).optimizer
    assert config == OptimizerConfig(name="muon_adamw", lr=1e-3, muon=MuonConfig(momentum=0.9))
    assert tuple(config.betas) == (0.9, 0.95)


# --- in Lightning -----------------------------------------------------------------------------------------------------


class TinyModule(L.LightningModule):
    """Two layers, MuonAdamW and a schedule; remembers what each step saw."""

    def __init__(self, name: str = "muon_adamw", lr: float = 0.01, total_steps: int = 10):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.config, self.total_steps = OptimizerConfig(name=name, lr=lr), total_steps
        self.used_lrs: list[float] = []
        self.gradients: list[list[torch.Tensor]] = []

    def training_step(self, batch, batch_index):
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_gradient_clipping(self, optimizer, **settings):
        super().configure_gradient_clipping(optimizer, **settings)
        self.gradients.append([p.grad.clone() for p in self.parameters()])
        self.used_lrs.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        matrices = "muon" if self.config.name == "muon_adamw" else "adamw"
        rules = [Rule("matrices", r"weight$", optimizer=matrices), Rule("rest", r"bias$")]
        optimizer, _ = build_optimizer(self.config, self.named_parameters(), rules)
        schedule = build_schedule(ScheduleConfig(warmup_steps=3), self.total_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, schedule), "interval": "step"},
        }


def fit(module: TinyModule, tmp_path, max_steps: int, batch_size: int = 4, resume=None, **settings) -> L.Trainer:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(40, 4, generator=generator), torch.randn(40, 4, generator=generator))
    trainer = L.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **settings,
    )
    trainer.fit(module, DataLoader(data, batch_size=batch_size), ckpt_path=resume, weights_only=True)
    return trainer


def test_the_schedule_reaches_every_step(tmp_path):
    module = TinyModule()
    trainer = fit(module, tmp_path, 10)
    schedule = build_schedule(ScheduleConfig(warmup_steps=3), 10)
    assert module.used_lrs == pytest.approx([0.01 * schedule(step) for step in range(10)], rel=1e-12)
    assert trainer.global_step == 10


@pytest.mark.parametrize("name", ["adamw", "muon_adamw"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_clipping_bounds_the_gradients_that_the_step_sees(tmp_path, name, precision):
    """Under bf16-mixed Lightning refuses to clip for torch's fused AdamW as torch builds it."""
    module = TinyModule(name)
    fit(module, tmp_path, 3, gradient_clip_val=0.01, precision=precision)
    for gradients in module.gradients:
        assert torch.stack([g.norm() for g in gradients]).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_fused_adamw_under_a_gradient_scaler_takes_the_steps_of_unscaled_gradients():
    """What precision 16-mixed does: unscale, clip, step; and leave out a step whose gradients overflow."""
    scaled, expected = (nn.Parameter(torch.ones(3)) for _ in range(2))
    ours, theirs = (build_optimizer(OptimizerConfig(lr=0.1), [("w", p)], [Rule("all")])[0] for p in (scaled, expected))
    assert ours.param_groups[0]["fused"]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, float("inf"), 3.0):
        for parameter, optimizer in ((scaled, ours), (expected, theirs)):
            optimizer.zero_grad()
            loss = (parameter * torch.arange(3.0)).sum() * factor
            is_scaled = parameter is scaled
            (scaler.scale(loss) if is_scaled else loss).backward()
            if is_scaled:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([parameter], 0.5)
            if is_scaled:
                scaler.step(optimizer)
                scaler.update()
            elif factor < float("inf"):
                optimizer.step()
    torch.testing.assert_close(scaled, expected)


def test_accumulation_equals_the_larger_batch(tmp_path):
    whole, accumulated = TinyModule(), TinyModule()
    fit(whole, tmp_path, 5, batch_size=8)
    fit(accumulated, tmp_path, 5, batch_size=4, accumulate_grad_batches=2)
    assert len(accumulated.used_lrs) == 5
    for p, q in zip(whole.parameters(), accumulated.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-3, rtol=0)  # bf16 directions magnify the last bits of the gradient
    torch.testing.assert_close(whole.gradients[0], accumulated.gradients[0])


@pytest.mark.parametrize("name", ["adamw", "muon_adamw"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_last_bit(tmp_path, name):
    # One batch an epoch, always the same: a plain DataLoader has no position that could be resumed.
    straight = TinyModule(name)
    fit(straight, tmp_path, 10, batch_size=40)
    first = TinyModule(name)
    fit(first, tmp_path, 5, batch_size=40).save_checkpoint(tmp_path / "half.ckpt")
    half = deepcopy(first.state_dict())
    second = TinyModule(name)
    fit(second, tmp_path, 10, batch_size=40, resume=tmp_path / "half.ckpt")
    assert first.used_lrs + second.used_lrs == straight.used_lrs
    for key, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[key])
        assert not torch.equal(value, half[key])


# --- sharded ----------------------------------------------------------------------------------------------------------


def parameters_to_shard():
    """Wide, tall, with an odd number of rows, with fewer rows than ranks; stacks, one of an odd number; a vector."""
    *matrices, vector = random_parameters((6, 4), (4, 6), (4, 6), (5, 3), (1, 8), (2, 4, 6), (3, 6, 4), (5,))
    return matrices, vector


def sharded_steps(rank: int, folder: str) -> None:
    """One of two processes: three MuonAdamW steps on parameters split over rows (a stack: over experts)."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    matrices, vector = parameters_to_shard()
    whole = [*matrices, vector]
    parameters = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole]
    optimizer = MuonAdamW([muon_group(parameters[:-1]), adamw_group(parameters[-1:])], lr=0.1)
    for step in range(3):
        set_random_gradients(whole, step)
        for parameter, reference in zip(parameters, whole, strict=True):
            parameter.grad = distribute_tensor(reference.grad, mesh, [Shard(0)])
        optimizer.step()
    gathered = [p.full_tensor().detach() for p in parameters]
    if rank == 0:
        torch.save(gathered, f"{folder}/result.pt")
    dist.barrier()  # a rank that leaves while the other still talks to it makes that one abort
    dist.destroy_process_group()


def test_the_matrices_of_a_model_are_shared_out_evenly():
    from pretrain.muon_shards import share_out

    shapes = [(64, 64)] * 8 + [(170, 64), (170, 64), (64, 170)] * 2 + [(8, 64)] * 4
    shares = share_out([torch.empty(shape) for shape in shapes], 4)
    assert sorted(tuple(matrix.shape) for share in shares for matrix in share) == sorted(shapes)
    work = [sum(min(m.shape) ** 2 * sum(m.shape) for m in share) for share in shares]
    assert max(work) < 1.3 * sum(work) / 4


def test_sharded_parameters_step_as_whole_ones(tmp_path):
    torch.multiprocessing.spawn(sharded_steps, args=(str(tmp_path),), nprocs=2)
    matrices, vector = parameters_to_shard()
    parameters = [*matrices, vector]
    optimizer = MuonAdamW([muon_group(matrices), adamw_group([vector])], lr=0.1)
    for step in range(3):
        set_random_gradients(parameters, step)
        optimizer.step()
    for parameter, gathered in zip(parameters, torch.load(tmp_path / "result.pt"), strict=True):
        torch.testing.assert_close(parameter.detach(), gathered, atol=1e-6, rtol=0)
