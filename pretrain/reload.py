"""A trained module from its checkpoint alone, for what comes after training: evaluation, export."""

from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch.cli import LightningArgumentParser

from pretrain.checkpoint import check_same_architecture, find_checkpoint, model_weights, read_checkpoint
from pretrain.errors import UserError
from pretrain.module import PretrainModule

Module = TypeVar("Module", bound=PretrainModule)


def load_module(
    module_class: type[Module], run_or_file: str | Path, weights: bool = True
) -> tuple[Module, dict[str, Any]]:
    """Return the module of a run with its weights, in evaluation mode on the CPU, and the run's configuration.

    Args:
        module_class: the domain's module.
        run_or_file: the folder of a run, or one of its checkpoints.
        weights: False leaves the module without a model: its configuration alone.

    Raises:
        UserError: no checkpoint there, a damaged one, or one of another kind of model.
    """
    file = find_checkpoint(run_or_file)
    checkpoint = read_checkpoint(file)
    config = checkpoint.get("config")
    if not config:
        raise UserError(f"{file} holds no configuration: use a checkpoint that the command line of fit has written")
    module = _instantiate(module_class, config["model"], file)
    if weights:
        module.model = module.build_model()
        check_same_architecture(module.model, checkpoint, str(file))
        module.model.load_state_dict(model_weights(checkpoint))
        module.eval()
    return module, config


def _instantiate(module_class: type[Module], settings: dict[str, Any], file: Path) -> Module:
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_lightning_class_args(module_class, "model")
    try:
        return parser.instantiate_classes(parser.parse_object({"model": settings})).model
    except Exception as error:  # jsonargparse's ArgumentError, or the ValueError of a configuration
        reason = " ".join(str(error).split())
        raise UserError(
            f"{file} was written by another kind of model, not {module_class.__name__} ({reason})"
        ) from error
