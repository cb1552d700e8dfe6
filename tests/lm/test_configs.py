"""Every shipped configuration loads, builds its model and makes a plan."""

from pathlib import Path

import pytest

from lm.data.module import TextData
from lm.fit import PROG, config_folder
from lm.module import LanguageModule
from pretrain.cli import PretrainCLI
from pretrain.plan import make_plan

CONFIGS = sorted(config_folder().glob("lm_*.yaml"))


def parse(config: Path, *arguments: str) -> PretrainCLI:
    args = ["--config", str(config), "--trainer.accelerator=cpu", "--trainer.precision=32-true", *arguments]
    return PretrainCLI(LanguageModule, TextData, prog=PROG, description="", args=args)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_loads(config):
    cli = parse(config)
    model = cli.model.build_meta_model()
    counts = cli.model.parameter_counts()
    assert sum(parameter.numel() for parameter in model.parameters()) == counts["total"]
    cli.model.plan = make_plan(
        cli.trainer,
        n_samples=10**7,
        global_batch_size=cli.datamodule.global_batch_size,
        micro_batch_size=cli.datamodule.micro_batch_size,
        units_per_sample=cli.datamodule.units_per_sample,
        units_budget=cli.model.units_budget(),
    )
    cli.model.schedule()
    _, table = cli.model.build_optimizer(model)
    assert sum(group["parameters"] for group in table) == counts["total"]


@pytest.mark.parametrize(("name", "total"), [("0.12b", 119_744_256), ("0.25b", 254_018_560), ("0.5b", 502_359_040)])
def test_the_papers_configurations_follow_its_recipe(name, total):
    cli = parse(config_folder() / f"lm_{name}.yaml")
    optimizer, schedule, data = cli.model.optimizer_config, cli.model.schedule_config, cli.datamodule
    assert cli.model.parameter_counts()["total"] == total
    assert (optimizer.name, optimizer.betas, optimizer.weight_decay) == ("adamw", (0.9, 0.95), 0.1)
    assert (schedule.name, schedule.warmup_steps) == ("cosine", 1000)
    assert (data.global_batch_size, data.sequence_length) == (512, 1024)
    assert cli.trainer.gradient_clip_val == 1.0
    assert cli.model.units_budget() == {"tokens_per_parameter": 20.0 * total}
    # The data has to last for the run.
    assert data.max_tokens > 20 * total


def test_every_key_can_be_overridden_from_the_command_line():
    cli = parse(config_folder() / "lm_0.25b.yaml", "--model.ffn.kind=bi-moa", "--model.ffn.activations=gsr2lt")
    assert cli.model.config.ffn.kind == "bi-moa"
    names = ("id", "gelu", "silu", "relu2", "leaky_relu", "tanh")
    assert cli.model.build_meta_model().blocks[0].ffn.activations == names
