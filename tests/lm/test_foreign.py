"""Pre-training that starts from a Llama in the format of transformers: the same function, or a reason why not."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

from lm.foreign import read_foreign
from lm.hf_write import write_model
from lm.model import Llama, LlamaConfig
from lm.module import LanguageModule
from lm.moe import MoEConfig
from lm.tokenizers import load_tokenizer
from moa import FFNConfig
from pretrain.errors import UserError
from tests.lm.runs import train
from tests.lm.test_hf import MODELS, build
from tests.runs import state_of

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
OURS = LlamaConfig(97, 32, 2, 2, FFNConfig("swiglu", hidden_features=44), norm_eps=1e-5)
TOKENS = torch.arange(24).reshape(2, 12)


@pytest.fixture
def saved(tmp_path):
    """Save a random Llama of transformers, with changes, and return it and its folder."""

    def call(folder="theirs", shards="5GB", **changes):
        torch.manual_seed(0)
        model = LlamaForCausalLM(HFConfig(**(SIZES | changes))).eval()
        model.save_pretrained(tmp_path / folder, max_shard_size=shards)
        return model, tmp_path / folder

    return call


def start(folder, config: LlamaConfig) -> Llama:
    model = Llama(config).eval()
    model.load_state_dict(read_foreign(folder, config))
    return model


@torch.no_grad()
@pytest.mark.parametrize("shards", ["5GB", "20KB"])
def test_a_llama_of_transformers_gives_the_same_logits(saved, shards):
    theirs, folder = saved(shards=shards)
    assert (folder / "model.safetensors.index.json").exists() == (shards == "20KB")
    torch.testing.assert_close(start(folder, OURS)(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_another_base_and_biases_in_the_ffn_are_taken_over(saved):
    theirs, folder = saved(rope_theta=500.0, mlp_bias=True)
    for layer in theirs.model.layers:
        layer.mlp.up_proj.bias.normal_()
    theirs.save_pretrained(folder)
    config = replace(OURS, rope_base=500.0, ffn=replace(OURS.ffn, bias=True))
    torch.testing.assert_close(start(folder, config)(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match=r"rope_theta 500.0 \(model.rope_base is 10000.0\), mlp_bias True"):
        read_foreign(folder, OURS)


@torch.no_grad()
def test_one_matrix_for_embedding_and_head_becomes_two_with_a_word(saved):
    theirs, folder = saved(tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="one matrix for embedding and head"):
        model = start(folder, OURS)
    torch.testing.assert_close(model(TOKENS), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)
    assert model.head.weight.data_ptr() != model.embed.weight.data_ptr()


@torch.no_grad()
@pytest.mark.parametrize("name", ["swiglu", *MODELS])
def test_what_was_exported_comes_back_with_every_number(name, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "swiglu", (FFNConfig("swiglu"), None))
    model = build(name)
    write_model(model, load_tokenizer("bytes"), tmp_path)
    again = start(tmp_path, model.config)
    assert torch.equal(again(TOKENS), model(TOKENS))
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)


def test_a_run_starts_from_an_exported_folder(tmp_path):
    model = build("bi-moa", n_layers=1)
    (tmp_path / "out").mkdir()
    write_model(model, load_tokenizer("bytes"), tmp_path / "out")
    changes = {"model__vocab_size": 264, "model__n_layers": 1, "model__ffn__kind": "bi-moa", "trainer__max_steps": 1}
    run = train(tmp_path, f"--init_from=hf:{tmp_path / 'out'}", model__optimizer__lr=1e-12, **changes).folder
    after = state_of(run / "checkpoints" / "last.ckpt")["weights"]
    for name, weight in model.state_dict().items():
        assert abs(weight - after[f"model.{name}"]).max() < 1e-9


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_key_value_heads": 1}, ["grouped queries (num_key_value_heads 1 of 2 heads)"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["scaled rotary positions (linear)"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"hidden_act": "gelu"}, ["hidden_act gelu"]),
        ({"head_dim": 8}, ["head_dim 8"]),
        ({"rms_norm_eps": 1e-6}, ["rms_norm_eps 1e-06 (model.norm_eps is 1e-05)"]),
        (
            {"vocab_size": 90, "hidden_size": 48},
            ["vocab_size 90 (model.vocab_size is 97)", "hidden_size 48 (model.d"],
        ),
        ({"num_hidden_layers": 3}, ["num_hidden_layers 3 (model.n_layers is 2)"]),
        ({"num_attention_heads": 4}, ["num_attention_heads 4 (model.n_heads is 2)"]),
        ({"intermediate_size": 45}, ["intermediate_size 45 (model.ffn.hidden_features is 44)"]),
    ],
)
def test_a_llama_that_computes_something_else_is_refused_by_name(saved, changes, parts):
    _, folder = saved(**changes)
    with pytest.raises(UserError) as error:
        read_foreign(folder, OURS)
    for part in (str(folder), *parts):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_other_kinds_and_other_models_are_refused(saved, tmp_path):
    _, folder = saved()
    with pytest.raises(UserError, match=r"set model.ffn.kind to swiglu"):
        read_foreign(folder, replace(OURS, ffn=FFNConfig("qd-moa")))
    with pytest.raises(UserError, match=r"a mixture of swiglu experts: set .* and model.moe to null"):
        read_foreign(folder, replace(OURS, ffn=FFNConfig(), moe=MoEConfig(4, 2)))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}))
    with pytest.raises(UserError, match="'qwen2': only llama and moa_llama"):
        read_foreign(folder, OURS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": None, "rope_scaling": "linear"},
            "rope_scaling is 'linear': it has to hold keys and values",
        ),
        ({"rope_parameters": [1]}, "rope_parameters is [1]: it has to hold keys and values"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2', not a number"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2', not a number"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta is '1e4', not a number"),
    ],
)
def test_values_of_another_type_are_named(saved, changes, message):
    _, folder = saved()
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError) as error:
        read_foreign(folder, OURS)
    assert str(error.value) == f"{file}: {message}"


def test_weights_that_are_no_finite_numbers_are_refused_before_a_run_begins(tmp_path):
    model = build("bi-moa", n_layers=1)
    (tmp_path / "out").mkdir()
    write_model(model, load_tokenizer("bytes"), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    whole = load_file(file)
    norm = whole["model.norm.weight"]
    changes = {"model__vocab_size": 264, "model__n_layers": 1, "model__ffn__kind": "bi-moa"}
    for value, message in (
        (norm.int(), "has model.norm.weight as int32, no floating-point numbers"),
        (norm * float("nan"), "has values in model.norm.weight that are not finite"),
        (norm.double() * 1e300, "has values in model.norm.weight that are not finite"),
    ):
        save_file(whole | {"model.norm.weight": value}, file)
        with pytest.raises(UserError, match=message):
            train(tmp_path, f"--init_from=hf:{tmp_path / 'out'}", **changes)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(UserError, match="hf: names no folder: give a folder"):
        read_foreign("", OURS)


def test_settings_of_the_model_may_not_differ_but_those_of_training_may(tmp_path):
    model = build("qd-moa experts")
    write_model(model, load_tokenizer("bytes"), tmp_path)
    of_training = LanguageModule.settings_of_training
    moe = replace(model.config.moe, balance_loss=0.5, bias_update_rate=0.0)
    assert read_foreign(tmp_path, replace(model.config, init_std=0.1, moe=moe), of_training)
    with pytest.raises(UserError, match=r"has moe.top_k 2, but model.moe.top_k is 1"):
        read_foreign(tmp_path, replace(model.config, moe=replace(moe, top_k=1)), of_training)
    with pytest.raises(UserError, match=r"has ffn.gate sigmoid, but model.ffn.gate is tanh"):
        read_foreign(tmp_path, replace(model.config, ffn=FFNConfig("qd-moa", gate="tanh")), of_training)


def test_damaged_incomplete_and_pickled_checkpoints_are_refused(saved, tmp_path):
    def refusal() -> str:
        with pytest.raises(UserError) as error:
            read_foreign(folder, OURS)
        assert "\n" not in str(error.value)
        return str(error.value)

    _, folder = saved()
    file = folder / "model.safetensors"
    whole = load_file(file)
    save_file({name: value for name, value in whole.items() if "up_proj" not in name}, file)
    assert "lacks model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight" in refusal()
    save_file(whole | {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, file)
    assert "holds model.layers.0.self_attn.q_norm.weight" in refusal()
    save_file(whole | {"lm_head.weight": torch.ones(97, 16)}, file)
    assert "lm_head.weight in the shape (97, 16) instead of (97, 32)" in refusal()
    file.write_bytes(file.read_bytes()[:1000])
    assert "cannot be read" in refusal()
    file.rename(folder / "pytorch_model.bin")
    assert "only safetensors are read" in refusal()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../outside.safetensors"}}')
    assert "no file of that folder" in refusal()
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal()
    folder = tmp_path / "nothing"
    assert f"hf:{folder}: no such folder" in refusal()
