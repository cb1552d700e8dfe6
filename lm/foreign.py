"""Weights of a Llama in the format of Hugging Face transformers, to start pre-training from: `--init_from hf:DIR`.

Only safetensors are read: nothing in the folder is executed.
"""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from safetensors import SafetensorError, safe_open

from lm.hf_format import OWN, PLAIN, config_from_dict, config_to_dict, exported_name, is_plain
from lm.model import Llama, LlamaConfig
from pretrain.errors import UserError
from pretrain.paths import user_path
from pretrain.preflight import flat

PREFIX = "hf:"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
# What transformers takes a key for that a config.json of its Llama lacks.
_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
}
_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
)


def read_foreign(folder: str | Path, config: LlamaConfig, may_differ: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Return the state dict of `Llama(config)` from a folder with config.json and safetensors, whole or in shards.

    The tensors are views of the files, in the files' types.

    Args:
        may_differ: beginnings of the settings of `config` that say nothing of what the weights compute.

    Raises:
        UserError: no such folder, a damaged file, a model that computes something else, or weights that are no
            finite floating-point numbers.
    """
    if not str(folder).strip():
        raise UserError(f"{PREFIX} names no folder: give a folder, {PREFIX}DIR, with config.json and {_WEIGHTS}")
    folder = user_path(folder)
    if not folder.is_dir():
        raise UserError(
            f"{PREFIX}{folder}: no such folder; give one with config.json and {_WEIGHTS}, downloaded before"
        )
    described = _read_json(folder / "config.json")
    kind = described.get("model_type")
    if kind == OWN:
        _check_own(folder, described, config, may_differ)
        tied = False
    elif kind == PLAIN:
        _check_plain(folder, described, config)
        tied = bool(described.get("tie_word_embeddings"))
    else:
        raise UserError(f"{folder} holds a model of the type {kind!r}: only {PLAIN} and {OWN} can be read")
    return _fit(folder, _read_tensors(folder), config, tied)


def _check_own(folder: Path, described: dict[str, Any], config: LlamaConfig, may_differ: tuple[str, ...]) -> None:
    try:
        then = flat(config_to_dict(config_from_dict(described.get("llama", {}))))
    except ValueError as error:
        raise UserError(f"{folder}/config.json: {error}") from error
    now = flat(config_to_dict(config))
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) != now.get(key) and not key.startswith(may_differ):
            raise UserError(f"{folder} has {key} {then.get(key)}, but model.{key} is {now.get(key)}: set it as there")


def _check_plain(folder: Path, described: dict[str, Any], config: LlamaConfig) -> None:
    """Raise a UserError that names everything in which a Llama of transformers differs from ours."""
    if not is_plain(config):
        ours = f"a mixture of {config.ffn.kind} experts" if config.moe else f"one with {config.ffn.kind}"
        remedy = "set model.ffn.kind to swiglu" + (" and model.moe to null" if config.moe else "")
        raise UserError(f"{folder} is a dense Llama with swiglu, and the model {ours}: {remedy}")
    rope = _rope(folder, described)
    theirs: dict[str, Any] = _DEFAULTS | {key: value for key, value in described.items() if value is not None}
    theirs["rope_theta"] = rope.get("rope_theta", theirs["rope_theta"])
    for key in _NUMBERS:
        if key in theirs and (isinstance(theirs[key], bool) or not isinstance(theirs[key], int | float)):
            raise UserError(f"{folder}/config.json: {key} is {theirs[key]!r}, not a number")
    if absent := _absent_parts(theirs, rope.get("rope_type", rope.get("type", "default"))):
        raise UserError(f"{folder} has {', '.join(absent)}, which this Llama does not: use another checkpoint")
    settings = {
        "vocab_size": ("vocab_size", config.vocab_size),
        "hidden_size": ("d_model", config.d_model),
        "num_hidden_layers": ("n_layers", config.n_layers),
        "num_attention_heads": ("n_heads", config.n_heads),
        "intermediate_size": ("ffn.hidden_features", config.ffn.width(config.d_model)),
        "rope_theta": ("rope_base", config.rope_base),
        "rms_norm_eps": ("norm_eps", config.norm_eps),
        "mlp_bias": ("ffn.bias", config.ffn.bias),
    }
    different = [
        f"{key} {theirs[key]} (model.{name} is {value})"
        for key, (name, value) in settings.items()
        if theirs[key] != value
    ]
    if different:
        raise UserError(f"{folder} has {', '.join(different)}: set the model's keys as there")


def _rope(folder: Path, described: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of rotary positions, under either name."""
    for key in ("rope_parameters", "rope_scaling"):
        if value := described.get(key):
            if not isinstance(value, dict):
                raise UserError(f"{folder}/config.json: {key} is {value!r}: it has to hold keys and values")
            return value
    return {}


def _absent_parts(theirs: dict[str, Any], rope_type: str) -> list[str]:
    """Return what a Llama of transformers may have and ours never has, as far as this one has it."""
    heads = theirs["num_attention_heads"]
    key_heads = theirs.get("num_key_value_heads", heads)
    has = {
        f"grouped queries (num_key_value_heads {key_heads} of {heads} heads)": key_heads != heads,
        f"scaled rotary positions ({rope_type})": rope_type != "default",
        f"hidden_act {theirs['hidden_act']}": theirs["hidden_act"] not in ("silu", "swish"),
        "attention_bias": theirs["attention_bias"],
        f"head_dim {theirs.get('head_dim')}": theirs.get("head_dim", 0) * heads not in (0, theirs["hidden_size"]),
        "quantised weights": "quantization_config" in theirs,
    }
    return [part for part, present in has.items() if present]


def _fit(folder: Path, tensors: dict[str, torch.Tensor], config: LlamaConfig, tied: bool) -> dict[str, torch.Tensor]:
    """Rename the tensors and check that they are all that the model has, in its shapes, and finite."""
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in Llama(config).state_dict().items()}
    theirs = {name: exported_name(config, name) for name in wanted}
    tensors = {name: value for name, value in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    if tied and theirs["head.weight"] not in tensors and theirs["embed.weight"] in tensors:
        tensors[theirs["head.weight"]] = tensors[theirs["embed.weight"]]
        rank_zero_warn(f"{folder} has one matrix for embedding and head: here they are two, which start equal")
    if missing := sorted(set(theirs.values()) - set(tensors)):
        raise UserError(f"{folder} lacks {_some(missing)}: it is no whole checkpoint of its config.json")
    if unknown := sorted(set(tensors) - set(theirs.values())):
        raise UserError(f"{folder} holds {_some(unknown)}, for which this Llama has no place: use another checkpoint")
    for name, shape in wanted.items():
        found = tuple(tensors[theirs[name]].shape)
        if found != shape:
            raise UserError(
                f"{folder} has {theirs[name]} in the shape {found} instead of {shape}: "
                "its weights are not those of its config.json"
            )
    for name in theirs.values():
        value = tensors[name]
        if not value.is_floating_point():
            kind = str(value.dtype).removeprefix("torch.")
            raise UserError(f"{folder} has {name} as {kind}, no floating-point numbers: use another checkpoint")
        if not value.float().isfinite().all():  # float: what the model holds, and a type that has the test
            raise UserError(f"{folder} has values in {name} that are not finite: use another checkpoint")
    return {name: tensors[theirs[name]] for name in wanted}


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / _INDEX).is_file():
        places = _read_json(folder / _INDEX).get("weight_map")
        files = sorted(set(map(str, places.values()))) if isinstance(places, dict) else []
    elif (folder / _WEIGHTS).is_file():
        files = [_WEIGHTS]
    else:
        raise UserError(
            f"{folder} holds no {_WEIGHTS}: only safetensors are read, which execute nothing; "
            "save the model again with transformers' save_pretrained"
        )
    tensors = {}
    for file in files:
        if Path(file).name != file:
            raise UserError(f"{folder}/{_INDEX} names {file}, which is no file of that folder")
        try:
            with safe_open(folder / file, framework="pt") as content:
                tensors.update({name: content.get_tensor(name) for name in content.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{folder / file} cannot be read ({reason}): download it again") from error
    return tensors


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): give a folder that transformers has saved") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no keys and values: give a folder that transformers has saved")
    return content


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''}"
