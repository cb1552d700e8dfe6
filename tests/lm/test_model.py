"""The Llama: its mathematics against transformers', its counts against the specification."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

import moa
from lm.cache import KeyValueCache
from lm.model import Llama, LlamaConfig, document_mask, document_positions, flops_per_token, num_parameters
from moa import FFNConfig

SIZES = {"0.12b": (768, 6, 12), "0.25b": (1024, 12, 16), "0.5b": (1280, 19, 20)}


def tiny(kind: str = "swiglu", **changes) -> LlamaConfig:
    settings = {"vocab_size": 97, "d_model": 48, "n_layers": 3, "n_heads": 4, "ffn": FFNConfig(kind)} | changes
    return LlamaConfig(**settings)


def transformers_twin(model: Llama) -> LlamaForCausalLM:
    """Return transformers' Llama with the same weights."""
    c = model.config
    hf = LlamaForCausalLM(
        HFConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            intermediate_size=c.ffn.width(c.d_model),
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.n_heads,
            num_key_value_heads=c.n_heads,
            rms_norm_eps=c.norm_eps,
            rope_theta=c.rope_base,
            tie_word_embeddings=False,
            max_position_embeddings=256,
        )
    )
    names = dict(zip(hf_names(c.n_layers), our_names(c.n_layers), strict=True))
    weights = model.state_dict()
    hf.load_state_dict({theirs: weights[ours] for theirs, ours in names.items()}, strict=True)
    return hf


def our_names(n_layers: int) -> list[str]:
    block = "attn_norm attn.q attn.k attn.v attn.o ffn_norm ffn.w1 ffn.w2 ffn.w3".split()
    return ["embed.weight", "norm.weight", "head.weight"] + [
        f"blocks.{i}.{name}.weight" for i in range(n_layers) for name in block
    ]


def hf_names(n_layers: int) -> list[str]:
    block = (
        "input_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
        "post_attention_layernorm mlp.gate_proj mlp.up_proj mlp.down_proj"
    ).split()
    return ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"] + [
        f"model.layers.{i}.{name}.weight" for i in range(n_layers) for name in block
    ]


def test_logits_and_every_gradient_equal_transformers_llama():
    torch.manual_seed(0)
    model = Llama(tiny(init_std=0.2))
    hf = transformers_twin(model)
    tokens = torch.randint(0, 97, (3, 33))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    logits, hf_logits = model(inputs), hf(input_ids=inputs).logits
    torch.testing.assert_close(logits, hf_logits, atol=1e-5, rtol=1e-5)

    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    F.cross_entropy(hf_logits.flatten(0, 1), targets.flatten()).backward()
    ours, theirs = dict(model.named_parameters()), dict(hf.named_parameters())
    assert len(ours) == len(theirs)
    for our_name, hf_name in zip(our_names(3), hf_names(3), strict=True):
        torch.testing.assert_close(ours[our_name].grad, theirs[hf_name].grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["swiglu", "qd-moa", "bi-la"])
def test_a_document_under_the_mask_is_computed_as_if_it_were_alone(kind):
    torch.manual_seed(0)
    model = Llama(tiny(kind)).double()
    first, second = torch.randint(0, 97, (1, 9)), torch.randint(0, 97, (1, 12))
    segments = torch.tensor([[0] * 9 + [1] * 12])
    together = model(torch.cat((first, second), dim=1), segments)
    torch.testing.assert_close(together[:, :9], model(first))
    torch.testing.assert_close(together[:, 9:], model(second))


def test_mask_and_positions_equal_a_loop_over_pairs():
    segments = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3]])
    mask, positions = document_mask(segments), document_positions(segments)
    for b in range(2):
        for query in range(6):
            same = [key for key in range(query + 1) if segments[b, key] == segments[b, query]]
            assert mask[b, 0, query].nonzero().flatten().tolist() == same
            assert positions[b, query] == len(same) - 1


def test_no_logit_depends_on_a_later_token():
    torch.manual_seed(0)
    model = Llama(tiny("qd-moa", init_std=0.2)).double()
    tokens = torch.randint(0, 97, (1, 20))
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 97
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], atol=0, rtol=0)
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize(("size", "total"), [("0.12b", 119_744_256), ("0.25b", 254_018_560), ("0.5b", 502_359_040)])
def test_the_papers_sizes_have_the_papers_counts(size, total):
    d, layers, heads = SIZES[size]
    assert sum(num_parameters(LlamaConfig(50_304, d, layers, heads)).values()) == total


@pytest.mark.parametrize(
    ("ffn", "total"),
    [
        ({"kind": "swiglu"}, 119_744_256),
        ({"kind": "one-moa"}, 119_776_512),
        ({"kind": "bi-moa"}, 119_808_768),
        ({"kind": "bi-moa", "activations": "gsr2lt"}, 119_799_552),
        ({"kind": "qd-moa"}, 119_790_336),
        ({"kind": "relu2"}, 119_744_256),
        ({"kind": "moa"}, 119_767_296),
        ({"kind": "swiglu", "hidden_features": 2053}, 119_813_376),
    ],
)
def test_every_variant_of_the_0_12b_model_has_the_specified_count(ffn, total):
    config = LlamaConfig(50_304, 768, 6, 12, FFNConfig(**ffn))
    assert sum(num_parameters(config).values()) == total
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Llama(config).parameters()) == total


@pytest.mark.parametrize("kind", moa.kinds())
def test_counts_by_role_equal_the_models_own(kind):
    model = Llama(tiny(kind))
    gates = {"u", "v", "alpha", "beta"}
    found = dict.fromkeys(num_parameters(model.config), 0)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if "norm" in name:
            role = "norm"
        elif parts[0] in ("embed", "head"):
            role = {"embed": "embedding", "head": "head"}[parts[0]]
        else:
            role = "attention" if "attn" in parts else "gates" if gates & set(parts) else "ffn"
        found[role] += parameter.numel()
    assert found == num_parameters(model.config)


@pytest.mark.parametrize("kind", ["swiglu", "bi-moa", "relu2"])
def test_flops_equal_those_that_torch_counts(kind):
    model, length = Llama(tiny(kind)), 16
    # Attention in plain matrix products: the counter knows nothing of the CPU's fused kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randint(0, 97, (1, length))).sum().backward()
    assert counter.get_total_flops() == flops_per_token(model.config, length) * length


def test_initial_weights_follow_the_table():
    torch.manual_seed(0)
    ffn = FFNConfig("qd-moa", gate_init_std=0.0)
    model = Llama(LlamaConfig(500, 256, 2, 4, ffn, init_std=0.05))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        elif ".u." in name:
            assert (parameter == 0).all()
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.03), name
    assert (Llama(tiny("la", ffn=FFNConfig("la", coefficient_init=0.25))).blocks[0].ffn.alpha == 0.25).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"n_heads": 5}, "even head size"), ({"d_model": 0}, "at least 1"), ({"d_model": 12}, "even head size")],
)
def test_impossible_sizes_are_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        tiny(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("with_segments", [False, True])
def test_in_pieces_through_a_cache_the_logits_are_those_of_the_whole(with_segments):
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=2)).double().eval()
    tokens = torch.randint(0, 50, (3, 12))
    # Each row changes its document elsewhere: in a piece, between two, and as left padding would.
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 8 + [1] * 4, [-1] * 2 + [0] * 10]) if with_segments else None
    cache, pieces = KeyValueCache(2, capacity=12), []
    for start, end in [(0, 1), (1, 8), (8, 9), (9, 12)]:
        pieces.append(model(tokens[:, start:end], None if segments is None else segments[:, start:end], cache=cache))
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(tokens, segments), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="13 tokens do not fit into a cache for 12"):
        model(tokens[:, :1], None if segments is None else segments[:, -1:], cache=cache)


@pytest.mark.parametrize("kind", ["moa", "one-moa", "bi-moa", "qd-moa"])
def test_trained_with_the_fused_mixture_the_losses_are_those_of_the_reference(kind):
    generator = torch.Generator().manual_seed(0)
    batches = (
        torch.randint(0, 64, (50, 4, 17), generator=generator) // 4 * 4
    )  # a quarter of the ids: something to learn

    def losses(implementation):
        torch.manual_seed(0)
        model = Llama(tiny(kind, ffn=FFNConfig(kind, implementation=implementation)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = []
        for batch in batches:
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    found = losses("auto")
    assert found[-1] < found[0] - 1
    assert found == pytest.approx(losses("reference"), abs=1e-3)
