"""The masked autoencoder once more, from its definition: loops over samples, blocks and heads, and nothing shared."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / (variance + 1e-6).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def attention(x: Tensor, w: dict[str, Tensor], name: str, heads: int) -> Tensor:
    qkv = F.linear(x, w[f"{name}.qkv.weight"], w[f"{name}.qkv.bias"])
    width, size = x.shape[-1], x.shape[-1] // heads
    outputs = []
    for head in range(heads):
        q, k, v = (qkv[:, part * width + head * size : part * width + (head + 1) * size] for part in range(3))
        outputs.append(torch.softmax(q @ k.T / math.sqrt(size), dim=-1) @ v)
    return F.linear(torch.cat(outputs, dim=-1), w[f"{name}.proj.weight"], w[f"{name}.proj.bias"])


def feed_forward(x: Tensor, w: dict[str, Tensor], name: str, kind: str) -> Tensor:
    if kind == "mlp":
        hidden = F.gelu(F.linear(x, w[f"{name}.w1.weight"], w[f"{name}.w1.bias"]))
        return F.linear(hidden, w[f"{name}.w2.weight"], w[f"{name}.w2.bias"])
    y, z = F.linear(x, w[f"{name}.w1.weight"]), F.linear(x, w[f"{name}.w2.weight"])
    if kind == "swiglu":
        return F.linear(F.silu(y) * z, w[f"{name}.w3.weight"])
    assert kind == "qd-moa"
    gates = torch.sigmoid(F.linear(x, w[f"{name}.u.weight"]))
    sigmas = [lambda t: t, F.gelu, F.silu, lambda t: F.relu(t) ** 2]
    hidden, row = torch.zeros_like(y), 0
    for k in range(4):
        for m in range(k, 4):
            hidden = hidden + gates[:, row : row + 1] * sigmas[k](y) * sigmas[m](z)
            row += 1
    return F.linear(hidden, w[f"{name}.w3.weight"])


def blocks(x: Tensor, w: dict[str, Tensor], name: str, depth: int, heads: int, kind: str) -> Tensor:
    for block in range(depth):
        x = x + attention(norm(x, w, f"{name}.{block}.norm1"), w, f"{name}.{block}.attn", heads)
        x = x + feed_forward(norm(x, w, f"{name}.{block}.norm2"), w, f"{name}.{block}.mlp", kind)
    return x


def position(width: int, row: int, column: int) -> Tensor:
    values = []
    for coordinate in (column, row):
        for wave in (math.sin, math.cos):
            values += [wave(coordinate / 10_000 ** (i / (width / 4))) for i in range(width // 4)]
    return torch.tensor(values)


def cut(image: Tensor, patch: int) -> Tensor:
    """Patches row by row, each ordered (row, column, channel)."""
    side = image.shape[-1] // patch
    patches = []
    for row in range(side):
        for column in range(side):
            square = image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            patches.append(
                torch.stack([square[c, i, j] for i in range(patch) for j in range(patch) for c in range(len(square))])
            )
    return torch.stack(patches)


def reconstruct(
    w: dict[str, Tensor],
    image: Tensor,
    masked: list[int],
    *,
    patch: int,
    depth: int,
    heads: int,
    decoder_depth: int,
    decoder_heads: int,
    kind: str,
    normalise: bool,
) -> tuple[Tensor, Tensor]:
    """Return (predicted patches (N, V), loss) of one picture, of which the patches `masked` are hidden."""
    side = image.shape[-1] // patch
    width, decoder_width = w["encoder.norm.weight"].numel(), w["decoder.norm.weight"].numel()
    patches = cut(image, patch)
    visible = [n for n in range(side * side) if n not in masked]
    tokens = [w["encoder.cls_token"][0, 0]]
    kernel = w["encoder.patch_embed.proj.weight"].permute(0, 2, 3, 1).flatten(1)
    for n in visible:
        embedded = kernel @ patches[n] + w["encoder.patch_embed.proj.bias"]
        tokens.append(embedded + position(width, n // side, n % side))
    x = norm(blocks(torch.stack(tokens), w, "encoder.blocks", depth, heads, kind), w, "encoder.norm")

    x = F.linear(x, w["decoder.embed.weight"], w["decoder.embed.bias"])
    tokens = [x[0]]
    for n in range(side * side):
        token = x[1 + visible.index(n)] if n in visible else w["decoder.mask_token"][0, 0]
        tokens.append(token + position(decoder_width, n // side, n % side))
    x = norm(blocks(torch.stack(tokens), w, "decoder.blocks", decoder_depth, decoder_heads, kind), w, "decoder.norm")
    predictions = F.linear(x, w["decoder.head.weight"], w["decoder.head.bias"])[1:]

    losses = []
    for n in masked:
        target = patches[n]
        if normalise:
            target = (target - target.mean()) / torch.sqrt(target.var() + 1e-6)
        losses.append(((predictions[n] - target) ** 2).mean())
    return predictions, torch.stack(losses).mean()
