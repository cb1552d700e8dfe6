"""What a Llama is called in the files of Hugging Face transformers: config.json and the names of the weights.

Plain data both ways; transformers itself is not needed. A dense `swiglu` model is a `llama` there, which transformers
knows. Every other one is a `moa_llama`, which `lm.hf` teaches it; its config.json holds our own configuration under the
key `llama`, and its weights have our own names behind "model.".
"""

from dataclasses import asdict, fields, replace
from typing import Any

from lm.model import LlamaConfig
from lm.moe import MoEConfig
from moa import FFNConfig

PLAIN, OWN = "llama", "moa_llama"
OWN_PREFIX = "model."
_PLAIN_ENDS = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_PLAIN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w2": "mlp.up_proj",
    "ffn.w3": "mlp.down_proj",
}


def config_to_dict(config: LlamaConfig) -> dict[str, Any]:
    """Return the configuration as nested dictionaries of plain values."""
    return asdict(config)


def config_from_dict(data: dict[str, Any]) -> LlamaConfig:
    """Return the configuration that `config_to_dict` gave.

    Raises:
        ValueError: an unknown key, or a value that cannot be.
    """
    if not isinstance(data, dict):
        raise ValueError(f"the model's configuration is {data!r}: it has to hold keys and values")
    parts = dict(data)
    for name, part in (("ffn", FFNConfig), ("moe", MoEConfig)):
        if parts.get(name) is not None:
            parts[name] = _strictly(part, parts[name], f"{name}.")
    return _strictly(LlamaConfig, parts, "")


def _strictly(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where.rstrip('.')} is {data!r}: it has to hold keys and values")
    unknown = sorted(set(data) - {field.name for field in fields(kind)})
    if unknown:
        raise ValueError(f"unknown keys {', '.join(where + name for name in unknown)} in a model's configuration")
    try:
        return kind(**data)
    except TypeError as error:  # a value of another type, met in a comparison
        raise ValueError(f"{where or 'model.'}* has a value of another type: {error}") from error


def is_plain(config: LlamaConfig) -> bool:
    """Return whether transformers' own Llama is this model."""
    return config.moe is None and config.ffn.kind == "swiglu"


def exported_name(config: LlamaConfig, name: str) -> str:
    """Return what a parameter or buffer of `lm.model.Llama` is called in an exported file."""
    if not is_plain(config):
        return OWN_PREFIX + name
    stem, _, leaf = name.rpartition(".")  # leaf: weight or bias
    if stem in _PLAIN_ENDS:
        return f"{_PLAIN_ENDS[stem]}.{leaf}"
    _, number, layer = stem.split(".", 2)
    return f"model.layers.{number}.{_PLAIN_BLOCK[layer]}.{leaf}"


def anywhere(config: LlamaConfig) -> LlamaConfig:
    """Return the configuration without the choices of how one machine computes it, which another may not have."""
    moe = None if config.moe is None else replace(config.moe, dispatch="auto")
    return replace(config, ffn=replace(config.ffn, implementation="auto"), moe=moe)


def exported_config(config: LlamaConfig, max_length: int, eot: int, dtype: str) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        max_length: tokens of the sequences that the model has been trained on.
        eot: the token between two documents: it ends one, and the next begins after it.
        dtype: type of the weights, by torch's name.
    """
    common = {"bos_token_id": eot, "eos_token_id": eot, "max_position_embeddings": max_length, "torch_dtype": dtype}
    if not is_plain(config):
        return {
            "architectures": ["MoaLlamaForCausalLM"],
            "model_type": OWN,
            "llama": config_to_dict(anywhere(config)),
            **common,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": PLAIN,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.ffn.width(config.d_model),
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": config.ffn.bias,
        "tie_word_embeddings": False,
        "initializer_range": config.init_std,
        "use_cache": True,
        **common,
    }
