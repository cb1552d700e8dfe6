"""Draw tokens from a language model."""

import torch
from torch import nn


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: list[int],
    n_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    n_vocab: int | None = None,
    max_length: int = 1024,
    seed: int = 0,
) -> list[int]:
    """Return `n_tokens` tokens drawn one by one after `prompt` (at least one token).

    Args:
        temperature: 0 takes the most likely token.
        top_k: draw among the k most likely tokens only.
        n_vocab: ids from here on are padding of the vocabulary and never drawn.
        max_length: the model sees at most this many of the last tokens.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([prompt], device=device)
    for _ in range(n_tokens):
        logits = model(tokens[:, -max_length:])[0, -1, :n_vocab].float()
        if temperature == 0:
            choice = logits.argmax()[None]
        else:
            if top_k is not None and top_k < logits.numel():
                logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
            choice = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, choice[None]), dim=1)
    return tokens[0, len(prompt) :].tolist()
