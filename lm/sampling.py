"""Draw text from a language model, for all who need it: `lm.generate`, samples in training, evaluation.

Shapes: B sequences, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lm.contexts import CachedContexts, Contexts
from lm.model import Llama
from pretrain.errors import UserError


@torch.no_grad()
def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float | None = None,
    n_vocab: int | None = None,
    end: int | None = None,
    seed: int = 0,
    first_row: int = 0,
    max_length: int = 1024,
    use_cache: bool = True,
    on_token: Callable[[int, int], bool | None] | None = None,
) -> list[list[int]]:
    """Return up to `n_tokens` tokens drawn one by one after each prompt.

    A prompt's tokens do not depend on the other prompts, nor on whether there is a cache (up to rounding: in bfloat16
    two likely tokens may change places). The noise of a token is a function of (seed, row, position) alone.

    Args:
        model: a Llama, in evaluation mode.
        prompts: token ids. An empty prompt stands for the start of a document, after `end`. Of a prompt longer than
            `max_length`, the last tokens count.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draw among the k most likely tokens only.
        top_p: of these, among the fewest that have this probability together.
        n_vocab: ids from here on are padding of the vocabulary and never drawn.
        end: the token that ends a text; it is not returned. None: texts have no end.
        seed: of the noise.
        first_row: number of the first prompt, when the prompts are a part of a longer list.
        max_length: the model sees at most so many tokens; see `lm.contexts` for what is dropped beyond.
        use_cache: keep keys and values, rather than computing all tokens anew for every one.
        on_token: told (index of the prompt, token) of each token as it is drawn; True ends that text after it.

    Raises:
        UserError: a setting out of range, an empty prompt without `end`, or logits that are not finite.
    """
    check_settings(n_tokens, temperature, top_k, top_p, seed, max_length)
    if end is None and not all(map(len, prompts)):
        raise UserError("a prompt is empty, and there is no end-of-text token to start from")
    start = [] if end is None else [end]
    sequences = [list(prompt)[-max_length:] or start.copy() for prompt in prompts]
    lengths = [len(sequence) for sequence in sequences]
    noise_BN = torch.tensor(np.array([row_noise(seed, first_row + row, n_tokens) for row in range(len(prompts))]))
    contexts = CachedContexts(model, max_length, n_tokens) if use_cache else Contexts(model, max_length)
    going = list(range(len(prompts)))
    for position in range(n_tokens):
        if not going:
            break
        logits_BV = contexts.next_logits([sequences[row] for row in going])[:, :n_vocab]
        drawn = choose(logits_BV, noise_BN[going, position], temperature, top_k, top_p)
        kept = []
        for index, (row, token) in enumerate(zip(going, drawn, strict=True)):
            if token == end:
                continue
            sequences[row].append(token)
            if on_token is None or not on_token(row, token):
                kept.append(index)
        if len(kept) < len(going):
            contexts.keep(kept)
            going = [going[index] for index in kept]
    return [sequence[length:] for sequence, length in zip(sequences, lengths, strict=True)]


def check_settings(
    n_tokens: int, temperature: float, top_k: int | None, top_p: float | None, seed: int, max_length: int
) -> None:
    """Raise a UserError for a value out of range."""
    for name, value, is_right, wanted in (
        ("n_tokens", n_tokens, n_tokens >= 1, "at least 1"),
        ("temperature", temperature, 0 <= temperature < math.inf, "0 (the most likely token) or more"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1, or null for all tokens"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1, or null"),
        ("seed", seed, seed >= 0, "0 or more"),
        ("max_length", max_length, max_length >= 1, "at least 1"),
    ):
        if not is_right:
            raise UserError(f"{name} is {value}: it has to be {wanted}")


def choose(
    logits_BV: torch.Tensor, noise_B: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> list[int]:
    """Return a token for each row of logits, given a number in [0, 1) for each; arguments as in `generate`."""
    if not logits_BV.isfinite().all():
        raise UserError("the model's logits are not finite: try float32, or an earlier checkpoint of the run")
    if temperature == 0:
        return logits_BV.argmax(-1).tolist()
    if logits_BV.device.type == "mps":  # knows no float64
        logits_BV = logits_BV.cpu()
    return draw(restrict(logits_BV.double(), temperature, top_k, top_p), noise_B).tolist()


def restrict(logits_BV: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Return logits over the temperature (above 0), -inf for tokens that must not be drawn: by top k, then by top p."""
    # Differences first: they stay finite when a tiny temperature divides them.
    logits_BV = (logits_BV - logits_BV.max(-1, keepdim=True).values) / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered_BV, order_BV = logits_BV.sort(descending=True, stable=True)
        probabilities_BV = ordered_BV.softmax(-1)
        # A token is needed as long as those before it have less than top_p: the first one always is.
        is_left_out_BV = probabilities_BV.cumsum(-1) - probabilities_BV >= top_p
        is_left_out_BV[:, 0] = False
        is_left_out_BV = is_left_out_BV.scatter(-1, order_BV, is_left_out_BV)
        logits_BV = logits_BV.masked_fill(is_left_out_BV, -torch.inf)
    return logits_BV


def draw(logits_BV: torch.Tensor, noise_B: torch.Tensor) -> torch.Tensor:
    """Return for each row the token at which the cumulated probability first exceeds the noise, (B,)."""
    cumulated_BV = logits_BV.softmax(-1).cumsum(-1)
    threshold_B1 = noise_B.to(cumulated_BV)[:, None] * cumulated_BV[:, -1:]
    return torch.searchsorted(cumulated_BV, threshold_B1, right=True)[:, 0]


def row_noise(seed: int, row: int, n_tokens: int) -> np.ndarray:
    """Return a number in [0, 1) for each token of a row, float64 (n_tokens,); a longer text begins with the same.

    52 raw bits each, which NumPy keeps the same over versions. A multiple of 2^-52 below 1 times a positive number is
    below that number after rounding, too: `draw` relies on it.
    """
    bits = np.random.PCG64(np.random.SeedSequence((seed, row))).random_raw(n_tokens)
    return (bits >> np.uint64(12)) * 2.0**-52
