"""A trained module from its checkpoint alone, for what comes after training: evaluation, export."""

from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import ArgumentParser, Namespace

from pretrain.checkpoint import check_same_architecture, find_checkpoint, model_weights, read_checkpoint
from pretrain.data import PretrainData
from pretrain.errors import UserError
from pretrain.module import PretrainModule

Module = TypeVar("Module", bound=PretrainModule)


def load_module(
    module_class: type[Module],
    run_or_file: str | Path,
    weights: bool = True,
    data_class: type[PretrainData] | None = None,
) -> tuple[Module, dict[str, Any]]:
    """Return the module of a run with its weights, in evaluation mode on the CPU, and the run's configuration.

    Args:
        module_class: the domain's module.
        run_or_file: the folder of a run, or one of its checkpoints.
        weights: False leaves the module without a model: its configuration alone.
        data_class: the domain's data, for who reads the "data" of the configuration: its values then are of its types.

    Raises:
        UserError: no checkpoint there, a damaged one, or one of another kind of model.
    """
    file = find_checkpoint(run_or_file)
    checkpoint = read_checkpoint(file)
    config = checkpoint.get("config")
    if not config:
        raise UserError(f"{file} holds no configuration: use a checkpoint that the command line of fit has written")
    module = _parsed(module_class, "model", config, file, build=True)
    if data_class is not None:
        config = config | {"data": _parsed(data_class, "data", config, file, build=False)}
    if weights:
        # Sizes are compared before memory is taken for them.
        try:
            preview = module.build_meta_model()
        except (ValueError, RuntimeError) as error:  # sizes that do not fit together, or into 64 bits
            raise UserError(f"{file} holds a configuration of no model ({error})") from error
        check_same_architecture(preview, checkpoint, str(file))
        module.model = module.build_model()
        module.model.load_state_dict(model_weights(checkpoint))
        module.eval()
    return module, config


def _parsed(kind: type, part: str, config: dict[str, Any], file: Path, build: bool) -> Any:
    """Return the part of a configuration that says what `kind` is built from: built, or as checked values."""
    parser = ArgumentParser(exit_on_error=False)
    # Without `sub_configs`, since a value that names a file would have that file read.
    parser.add_class_arguments(kind, part, sub_configs=False)
    try:
        _check_no_class(config[part])
        parsed = parser.parse_object({part: config[part]})
        return parser.instantiate_classes(parsed)[part] if build else _plain(parsed[part])
    except Exception as error:  # jsonargparse's ArgumentError, or the ValueError of a configuration
        reason = " ".join(str(error).split())
        raise UserError(f"{file} was written by another kind of model, not {kind.__name__} ({reason})") from error


def _check_no_class(value: Any) -> None:
    """Raise ValueError for the name of a class, whose module the parser would import."""
    if isinstance(value, dict):
        if "class_path" in value:
            raise ValueError(f"it names the class {value['class_path']!r}")
        for child in value.values():
            _check_no_class(child)


def _plain(value: Any) -> Any:
    return value.as_dict() if isinstance(value, Namespace) else value
