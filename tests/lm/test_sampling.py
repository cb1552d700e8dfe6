"""Drawing tokens: with a cache as without, in a batch as alone, and as transformers does."""

import itertools

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lm.contexts import CachedContexts, Contexts, window_start
from lm.model import Llama, LlamaConfig
from lm.moe import MoEConfig
from lm.sampling import draw, generate, restrict, row_noise
from moa import FFNConfig
from pretrain.errors import UserError
from tests.lm.test_model import tiny, transformers_twin

V, END = 40, 7


def model_of(kind: str = "swiglu", moe: MoEConfig | None = None) -> Llama:
    """A tiny model, in float64, so that rounding decides nothing, and with weights large enough to have opinions."""
    torch.manual_seed(0)
    config = LlamaConfig(V, d_model=16, n_layers=2, n_heads=2, ffn=FFNConfig(kind), init_std=0.3, moe=moe)
    return Llama(config).double().eval()


def prompts_of(*lengths: int) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(0, V, (length,)).tolist() for length in lengths]


MODELS = {"dense": model_of(), "moe": model_of("qd-moa", MoEConfig(n_experts=4, top_k=2))}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("temperature", "max_length"), [(0.0, 7), (0.8, 1), (0.8, 6), (0.8, 200)])
def test_with_a_cache_as_without_and_in_a_batch_as_alone(name, temperature, max_length):
    prompts = prompts_of(1, 5, 9, 3)
    settings = {"temperature": temperature, "top_p": 0.95, "end": END, "max_length": max_length}
    together = generate(MODELS[name], prompts, 25, **settings)
    assert together == generate(MODELS[name], prompts, 25, use_cache=False, **settings)
    for row, prompt in enumerate(prompts):
        assert generate(MODELS[name], [prompt], 25, use_cache=False, first_row=row, **settings) == [together[row]]


@pytest.mark.parametrize("contexts", [Contexts(MODELS["moe"], 8), CachedContexts(MODELS["moe"], 8, 20)])
@torch.no_grad()
def test_logits_of_a_row_are_those_of_its_window_alone(contexts):
    sequences = prompts_of(2, 8, 5)
    following = itertools.cycle(range(V))
    for step in range(20):
        if step == 9:  # one text has ended
            contexts.keep([0, 2])
            sequences = [sequences[0], sequences[2]]
        for row, sequence in zip(contexts.next_logits(sequences), sequences, strict=True):
            seen = sequence[window_start(len(sequence), 8) :]
            torch.testing.assert_close(row, MODELS["moe"](torch.tensor([seen]))[0, -1], rtol=0, atol=1e-10)
        sequences = [[*sequence, next(following)] for sequence in sequences]


@pytest.mark.parametrize("max_length", [1, 2, 3, 8, 9])
def test_a_window_that_is_full_drops_its_older_half(max_length):
    window: list[int] = []
    for length in range(1, 50):
        window.append(length - 1)
        if len(window) > max_length:
            window = window[-(max_length // 2) - 1 :]
        assert window[0] == window_start(length, max_length)


@pytest.mark.parametrize("lengths", [(20,), (3, 9, 14, 20)])
def test_the_cost_of_a_token_does_not_grow_with_the_text(lengths):
    """Beyond the window, each half of it is read once more: two tokens computed for each one drawn."""
    model, computed = model_of(), []
    model.embed.register_forward_hook(lambda module, inputs, output: computed.append(inputs[0].numel()))
    generate(model, prompts_of(*lengths), 150, max_length=20)
    assert sum(computed) < len(lengths) * (20 + 150 * 2.3)


def test_greedy_text_equals_that_of_transformers_also_in_a_batch():
    torch.manual_seed(0)
    model = Llama(tiny(init_std=0.2)).double().eval()
    peer = transformers_twin(model).double().eval()
    prompts = prompts_of(4, 11, 7)
    end = generate(model, prompts, 12, temperature=0)[1][5]  # a token that ends a text early
    tokens = torch.tensor([[0] * (11 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (11 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": end, "pad_token_id": end}
    expected = peer.generate(input_ids=tokens, attention_mask=mask, **settings)[:, 11:].tolist()
    expected = [row[: row.index(end)] if end in row else row for row in expected]
    assert generate(model, prompts, 30, temperature=0, end=end) == expected
    assert len(expected[1]) <= 5


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 500])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.3, 0.95, 1.0])
def test_the_tokens_left_are_those_of_transformers(temperature, top_k, top_p):
    torch.manual_seed(0)
    logits = 3 * torch.randn(20, 300, dtype=torch.float64)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p else expected
    torch.testing.assert_close(restrict(logits, temperature, top_k, top_p).softmax(-1), expected.softmax(-1))


def test_top_p_takes_the_smallest_set_that_reaches_it():
    logits = torch.tensor([[0.125, 0.5, 0.25, 0.125]], dtype=torch.float64).log()
    for top_p, kept in [(0.5, {1}), (0.51, {1, 2}), (0.75, {1, 2}), (0.76, {0, 1, 2}), (0.88, {0, 1, 2, 3})]:
        assert set(restrict(logits, 1.0, None, top_p)[0].isfinite().nonzero().flatten().tolist()) == kept


def test_each_token_is_drawn_as_often_as_its_probability_says():
    logits = torch.tensor([1.0, -torch.inf, 0.0, 2.5, -torch.inf], dtype=torch.float64)
    noise = torch.arange(10_000, dtype=torch.float64) / 10_000
    counts = draw(logits.expand(10_000, -1), noise).bincount(minlength=5)
    torch.testing.assert_close(counts.double() / 10_000, logits.softmax(-1), rtol=0, atol=2e-4)
    assert counts[1] == counts[4] == 0
    extremes = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    assert draw(logits.roll(1).expand(2, -1), extremes).tolist() == [1, 4]


def test_noise_is_a_function_of_seed_row_and_position():
    assert (row_noise(3, 5, 100)[:10] == row_noise(3, 5, 10)).all()
    many = np.stack([row_noise(seed, row, 1000) for seed in range(5) for row in range(5)])
    assert len(np.unique(many)) == many.size
    assert ((many >= 0) & (many < 1)).all()
    assert abs(many.mean() - 0.5) < 4 / np.sqrt(12 * many.size)


def test_what_is_never_drawn_ends_or_begins_a_text():
    model, prompts = MODELS["dense"], prompts_of(3, 4)
    whole = generate(model, prompts, 40, temperature=2.0, top_k=None)
    assert [len(row) for row in whole] == [40, 40]
    assert max(map(max, whole)) >= 30
    assert max(map(max, generate(model, prompts, 40, temperature=2.0, top_k=None, n_vocab=30))) < 30

    end = whole[0][5]
    seen: list[tuple[int, int]] = []
    ended = generate(
        model, prompts, 40, temperature=2.0, top_k=None, end=end, on_token=lambda *drawn: seen.append(drawn)
    )
    assert ended == [row[: row.index(end)] if end in row else row for row in whole]
    assert [[token for index, token in seen if index == row] for row in range(2)] == ended
    stopped = generate(model, prompts, 40, temperature=2.0, top_k=None, on_token=lambda row, token: row == 0)
    assert stopped == [whole[0][:1], whole[1]]

    assert generate(model, [[], [1]], 9, end=END)[0] == generate(model, [[END]], 9, end=END)[0]
    (long,) = prompts_of(30)
    assert generate(model, [long], 9, max_length=8) == generate(model, [long[-8:]], 9, max_length=8)
    assert generate(model, [], 9) == []


def test_a_tiny_temperature_is_the_most_likely_token():
    prompts = prompts_of(3, 4)
    greedy = generate(MODELS["dense"], prompts, 9, temperature=0)
    assert generate(MODELS["dense"], prompts, 9, temperature=1e-320) == greedy
    assert generate(MODELS["dense"], prompts, 9, top_p=1e-9, seed=5) == greedy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"n_tokens": 0}, "n_tokens is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"max_length": 0}, "max_length is 0"),
        ({"prompts": [[1], []]}, "a prompt is empty"),
    ],
)
def test_bad_settings_are_one_line(settings, message):
    with pytest.raises(UserError, match=message) as error:
        generate(MODELS["dense"], **{"prompts": [[1]], "n_tokens": 3} | settings)
    assert "\n" not in str(error.value)


def test_a_broken_model_is_told():
    model = model_of()
    model.head.weight.data[3] = torch.nan
    with pytest.raises(UserError, match="logits are not finite"):
        generate(model, [[1]], 3)
