"""What is checked before a run leaves anything: recipe, data, model and weights have to go together."""

from typing import Any

from torch import nn

from pretrain.checkpoint import check_same_architecture, find_checkpoint, read_checkpoint
from pretrain.errors import NothingLeft, UserError
from pretrain.loader import check_same_data
from pretrain.module import PretrainModule
from pretrain.policy import SETTINGS
from pretrain.strategy import check_strategy

# Besides what model and data name in `may_change_on_resume`.
MAY_CHANGE_ON_RESUME = ("trainer.", "resume", "tokens_per_parameter", *SETTINGS)


def check_run(cli: Any) -> None:
    """Set the module's plan, and raise a UserError if recipe, data, model and weights do not go together."""
    module = cli.model
    check_strategy(cli.trainer)
    module.check_data(cli.datamodule)
    module.plan = module.make_plan(cli.trainer, cli.datamodule)
    try:
        preview = module.build_meta_model()
        _, module.optimizer_table = module.build_optimizer(preview)
        module.schedule()
    except (ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error
    if cli.checkpoint is not None:
        check_resume(cli, preview, read_checkpoint(cli.checkpoint, resumable=True, lazy=True))
    elif module.init_from is not None and module.read_foreign(module.init_from) is None:
        file = find_checkpoint(module.init_from)
        checkpoint = read_checkpoint(file, lazy=True)
        check_same_architecture(preview, checkpoint, str(file))
        check_same_function(module, checkpoint, str(file))


def check_resume(cli: Any, preview: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Raise a UserError unless the run goes on as it was: the same model and recipe on the same data."""
    where, plan = str(cli.checkpoint), cli.model.plan
    then, now = flat(checkpoint["config"]), flat(cli.model.run_config)
    may_change = (
        *MAY_CHANGE_ON_RESUME,
        *(f"model.{key}" for key in cli.model.may_change_on_resume),
        *(f"data.{key}" for key in cli.datamodule.may_change_on_resume),
    )
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) != now.get(key) and not key.startswith(may_change):
            raise UserError(
                f"{key} was {then.get(key)} and is now {now.get(key)}, but --resume goes on as before: leave it, or "
                "start a new run from the weights with --init_from"
            )
    check_same_architecture(preview, checkpoint, where)
    (loader_state,) = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    data = cli.datamodule
    check_same_data(loader_state, n_samples=len(data.train_dataset), seed=data.order_seed)
    if checkpoint["global_step"] >= plan.total_steps:
        raise NothingLeft(
            f"{where} is at step {checkpoint['global_step']}, and the run ends at {plan.total_steps} ({plan.limit}): "
            "raise that limit to go on"
        )


def check_same_function(module: PretrainModule, checkpoint: dict[str, Any], where: str) -> None:
    """Raise a UserError if weights of equal shapes would compute something else: another kind, gate or head size."""
    if module.run_config is None or "config" not in checkpoint:
        return
    then, now = flat(checkpoint["config"]["model"]), flat(module.run_config["model"])
    for key in sorted(then.keys() & now.keys()):
        if then[key] != now[key] and not key.startswith(module.settings_of_training):
            raise UserError(
                f"{where} was trained with model.{key} {then[key]}, now it is {now[key]}: its weights mean something "
                "else there; set the model's keys as in the run that wrote it (its config.yaml)"
            )


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested dictionary as one of dotted keys."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        key: value for name, child in tree.items() for key, value in flat(child, f"{prefix}.{name}".lstrip(".")).items()
    }
