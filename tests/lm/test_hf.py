"""Our models inside transformers: loading, generating, training, and what padding and caches change: nothing."""

import json
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

from lm.foreign import read_foreign
from lm.hf import MoaLlamaConfig, MoaLlamaForCausalLM
from lm.hf_format import config_from_dict, config_to_dict
from lm.hf_write import write_model
from lm.model import Llama, LlamaConfig
from lm.module import LanguageModule
from lm.moe import MoEConfig
from lm.sampling import generate
from lm.tokenizers import load_tokenizer
from moa import FFNConfig

EXPERTS = MoEConfig(n_experts=4, top_k=2, bias_update_rate=0.01)
MODELS = {
    **{kind: (FFNConfig(kind), None) for kind in ("moa", "one-moa", "bi-moa", "qd-moa", "qd-la")},
    "gate bias": (FFNConfig("bi-moa", activations="gsr2", gate="tanh", gate_bias=True, bias=True), None),
    **{f"{kind} experts": (FFNConfig(kind), EXPERTS) for kind in ("moa", "one-moa", "bi-moa", "qd-moa")},
    "swiglu experts": (FFNConfig("swiglu"), EXPERTS),
    "shared gates": (FFNConfig("qd-moa"), MoEConfig(4, 2, shared_gates=True, scores="sigmoid", renormalise=True)),
}


def build(name: str, **changes) -> Llama:
    """A random model whose every number matters, the bias of balancing included."""
    ffn, moe = MODELS[name]
    torch.manual_seed(0)
    settings = {"vocab_size": 264, "d_model": 32, "n_layers": 2, "n_heads": 2, "init_std": 0.2} | changes
    model = Llama(LlamaConfig(ffn=ffn, moe=moe, **settings)).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    for block in model.blocks:
        if moe is not None:
            block.ffn.balance_bias.normal_(std=0.2)
    return model


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """A model, its exported folder, and what AutoModelForCausalLM loads from there."""
    model, folder = build(request.param), tmp_path_factory.mktemp("exported")
    write_model(model, load_tokenizer("bytes"), folder)
    loaded, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    return model, folder, loaded


@pytest.fixture(scope="module")
def qd(tmp_path_factory):
    model, folder = build("qd-moa"), tmp_path_factory.mktemp("qd")
    write_model(model, load_tokenizer("bytes"), folder)
    return model, folder, AutoModelForCausalLM.from_pretrained(folder)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def until_the_end(drawn: list[int]) -> list[int]:
    """Cut after the end-of-text token, where `generate` stops."""
    return drawn[: drawn.index(256) + 1] if 256 in drawn else drawn


@torch.no_grad()
def test_the_logits_are_the_models_own(pair):
    model, _, loaded = pair
    assert type(loaded) is MoaLlamaForCausalLM
    assert not loaded.training
    # The weights are the same; where a matrix begins in memory may decide the last bit of a product.
    torch.testing.assert_close(loaded(tokens(3, 17)).logits, model(tokens(3, 17)), atol=1e-6, rtol=0)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name


def test_saved_again_every_number_is_the_same(pair, tmp_path):
    _, folder, loaded = pair
    loaded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == again.state_dict().keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    for config in (ours, theirs):
        config["dtype"] = config.pop("torch_dtype", config.get("dtype"))
    assert ours.items() <= theirs.items()


def test_generate_draws_what_our_own_decoding_draws(pair):
    model, _, loaded = pair
    prompt = tokens(1, 7)
    greedy = until_the_end(*generate(model, prompt.tolist(), 10, temperature=0, n_vocab=257))
    for use_cache in (True, False):
        drawn = loaded.generate(prompt, max_new_tokens=10, do_sample=False, use_cache=use_cache)
        assert drawn[0, 7:].tolist() == greedy


def test_a_prompt_padded_on_the_left_draws_as_alone(pair):
    _, _, loaded = pair
    ids, mask = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, :5] = mask[1, :1] = 0
    together = loaded.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for row, start in enumerate((5, 1, 0)):
        alone = loaded.generate(ids[row : row + 1, start:], max_new_tokens=8, do_sample=False)
        assert until_the_end(together[row, 9:].tolist()) == alone[0, 9 - start :].tolist()


@torch.no_grad()
def test_padding_on_either_side_changes_no_logit(qd):
    _, _, loaded = qd
    text, other = tokens(1, 6), tokens(1, 10)
    alone = loaded(text).logits[0]
    for at in (0, 4):
        ids, mask = other.clone(), torch.zeros(1, 10, dtype=torch.long)
        ids[:, at : at + 6], mask[:, at : at + 6] = text, 1
        torch.testing.assert_close(loaded(ids, attention_mask=mask).logits[0, at : at + 6], alone)


def test_beams_equal_those_without_a_cache_and_samples_follow_the_seed(qd):
    _, _, loaded = qd
    beams = [loaded.generate(tokens(2, 5), max_new_tokens=6, num_beams=3, use_cache=use) for use in (True, False)]
    assert torch.equal(*beams)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(loaded.generate(tokens(2, 5), max_new_tokens=6, do_sample=True, top_p=0.9))
    assert torch.equal(*drawn)
    assert drawn[0].max() <= 256  # rows of the padded vocabulary are never drawn


def test_a_pipeline_writes_text(qd):
    model, folder, _ = qd
    write = pipeline("text-generation", model=str(folder))
    (answer,) = write("Once upon", max_new_tokens=5, do_sample=False)
    tokenizer = load_tokenizer("bytes")
    drawn = until_the_end(*generate(model, [tokenizer.encode("Once upon")], 5, temperature=0, n_vocab=257))
    assert answer["generated_text"] == AutoTokenizer.from_pretrained(folder).decode(
        [*tokenizer.encode("Once upon"), *drawn], skip_special_tokens=True
    )


@torch.no_grad()
def test_the_last_logits_alone_are_those_of_all(qd):
    _, _, loaded = qd
    whole = loaded(tokens(2, 8)).logits
    assert torch.allclose(loaded(tokens(2, 8), logits_to_keep=3).logits, whole[:, -3:], atol=1e-6)
    assert torch.allclose(loaded(tokens(2, 8), logits_to_keep=torch.tensor([1, 5])).logits, whole[:, [1, 5]], atol=1e-6)
    assert isinstance(loaded(tokens(2, 8), return_dict=False), tuple)


@pytest.mark.parametrize("name", ["qd-moa", "qd-moa experts"])
def test_the_losses_of_micro_batches_sum_to_that_of_the_step(name):
    """Labels of -100 are left out. The balance loss, which depends on how a step is cut, is off here."""
    model = build(name)
    if model.config.moe is not None:
        model.config.moe.balance_loss = 0.0
    wrapped = MoaLlamaForCausalLM(MoaLlamaConfig(llama=config_to_dict(model.config))).train()
    wrapped.model.load_state_dict(model.state_dict())
    ids = tokens(4, 9)
    labels = ids.clone()
    labels[:, 3:5] = -100
    items = 4 * 6  # of eight targets in a row, two are left out
    whole = wrapped(ids, labels=labels, num_items_in_batch=items).loss
    parts = [wrapped(ids[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=items).loss for i in (0, 2)]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(whole, wrapped(ids, labels=labels).loss)
    logits, routing = model(ids, with_routing=True)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(wrapped.eval()(ids, labels=labels).loss, expected)
    if routing is not None:
        torch.testing.assert_close(whole, expected + 1e-3 * routing.z_loss.sum())


def test_three_steps_of_the_trainer_lower_the_loss(pair, tmp_path):
    from transformers import Trainer, TrainingArguments

    _, folder, _ = pair
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = [{"input_ids": row, "labels": row} for row in tokens(4, 16)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["qd-moa", "qd-moa experts"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_recomputes_the_blocks_and_changes_no_gradient(name, reentrant, monkeypatch):
    model = build(name)
    wrapped = MoaLlamaForCausalLM(MoaLlamaConfig(llama=config_to_dict(model.config))).train()
    wrapped.model.load_state_dict(model.state_dict())
    forwards = []
    for block in wrapped.model.blocks:
        block.attn.register_forward_hook(lambda *_: forwards.append(1))

    def gradients() -> tuple[int, dict[str, torch.Tensor]]:
        forwards.clear()
        wrapped.zero_grad()
        wrapped(tokens(2, 9), labels=tokens(2, 9)).loss.backward()
        return len(forwards), {key: value.grad.clone() for key, value in wrapped.named_parameters()}

    plain_count, plain = gradients()
    wrapped.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert wrapped.is_gradient_checkpointing
    count, recomputed = gradients()
    assert (plain_count, count) == (2, 4)
    for key, value in plain.items():
        torch.testing.assert_close(recomputed[key], value)
    assert wrapped(tokens(1, 4), use_cache=True, return_dict=False)[1].get_seq_length() == 4
    wrapped.gradient_checkpointing_disable()
    assert gradients()[0] == 2


def test_the_trainers_label_smoothing_shifts_the_labels(qd, tmp_path):
    from transformers import Trainer, TrainingArguments

    model, _, loaded = qd
    arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    ids = tokens(2, 9)
    loss = Trainer(model=loaded, args=arguments).compute_loss(loaded, {"input_ids": ids, "labels": ids})
    expected = torch.nn.functional.cross_entropy(
        model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1
    )
    torch.testing.assert_close(loss, expected)


def test_fresh_weights_follow_our_table():
    llama = build("qd-moa experts").config
    fresh = AutoModelForCausalLM.from_config(MoaLlamaConfig(llama=config_to_dict(llama)))
    for name, value in fresh.state_dict().items():
        if "norm" in name:
            assert (value == 1).all()
        elif "bias" in name:
            assert (value == 0).all()
        else:
            assert value.std().item() == pytest.approx(0.2, rel=0.25), name


def test_another_type_is_cast_on_loading(qd):
    _, folder, _ = qd
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert {value.dtype for value in half.state_dict().values()} == {torch.bfloat16}
    assert half(tokens(1, 4)).logits.isfinite().all()


def test_a_larger_vocabulary_survives_saving(tmp_path):
    model = MoaLlamaForCausalLM(MoaLlamaConfig(llama=config_to_dict(build("bi-moa").config)))
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == 300
    assert AutoModelForCausalLM.from_pretrained(tmp_path)(tokens(1, 4)).logits.shape == (1, 4, 300)


@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_survives_json(name):
    config = build(name).config
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


def test_how_one_machine_computes_is_not_exported(tmp_path):
    model = build("qd-moa experts")
    model.config.ffn.implementation, model.config.moe.dispatch = "reference", "loop"
    write_model(model, load_tokenizer("bytes"), tmp_path)
    exported = AutoConfig.from_pretrained(tmp_path).llama_config()
    assert (exported.ffn.implementation, exported.moe.dispatch) == ("auto", "auto")
    assert read_foreign(tmp_path, model.config, LanguageModule.settings_of_training)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_modle": 3}, "unknown keys d_modle"),
        ({"ffn": {"kind": "moa", "gates": "tanh"}}, "unknown keys ffn.gates"),
        ({"moe": {"topk": 1}}, "unknown keys moe.topk"),
        ({"ffn": {"kind": "moar"}}, "moar"),
        ({"ffn": 3}, "ffn is 3"),
        ({"d_model": "48"}, "another type"),
    ],
)
def test_what_a_configuration_cannot_say_is_an_error(change, message):
    with pytest.raises(ValueError, match=message):
        MoaLlamaConfig(llama=change)


def test_what_the_model_cannot_do_is_an_error(qd):
    _, _, loaded = qd
    with pytest.raises(TypeError, match="does not take output_attentions"):
        loaded(tokens(1, 4), output_attentions=True)
    with pytest.raises(ValueError, match="a gap inside a text"):
        loaded(tokens(1, 4), attention_mask=torch.tensor([[1, 0, 1, 1]]))
    with pytest.raises(ValueError, match=r"\(1, 3\) instead of \(1, 4\)"):
        loaded(tokens(1, 4), attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="static cache"):
        loaded.generate(tokens(1, 4), max_new_tokens=3, cache_implementation="static")
    with pytest.raises(ValueError, match="two matrices"):
        MoaLlamaConfig(tie_word_embeddings=True)


def test_without_transformers_the_import_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "lm.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'moa-pretrain\[hf\]'"):
        import lm.hf  # noqa: F401


def test_a_configuration_of_another_form_is_told():
    with pytest.raises(ValueError, match="the model's configuration is 3: it has to hold keys and values"):
        config_from_dict(3)
    with pytest.raises(ValueError, match="ffn is 'swiglu': it has to hold keys and values"):
        config_from_dict({"ffn": "swiglu"})
