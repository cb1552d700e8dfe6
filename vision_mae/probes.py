"""What the features of an encoder are worth, without training it: k nearest neighbours.

The protocol is that of instance discrimination (Wu et al. 2018, section 3.4) as DINO uses it (Caron et al. 2021,
section 4.1): features of unmasked pictures, made unit vectors; the k = 20 training pictures of largest cosine
similarity s each vote for their class with weight exp(s / 0.07); the class of most weight wins.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from pretrain.errors import UserError
from vision_mae.model import KnnPool

CHUNK = 1024  # queries compared with the bank at once


@dataclass
class ProbeConfig:
    """The online probe: nearest-neighbour accuracy on the validation pictures, with training pictures as neighbours.

    Raises:
        ValueError: a value out of range.
    """

    every_n_steps: int = 1000
    """Optimizer steps between two probes; the last step is probed too. 0: no probe."""

    k: int = 20
    """Neighbours that vote."""

    temperature: float = 0.07
    """Weight of a vote: exp(cosine similarity / temperature)."""

    pool: KnnPool = "avg"
    """`token`: the class token's features; `avg`: the mean over the patches; `patches`: all patches side by side."""

    max_images: int | None = 20_000
    """Training pictures to seek neighbours in, evenly spread; null: all."""

    def __post_init__(self) -> None:
        if self.every_n_steps < 0 or self.k < 1 or not self.temperature > 0:
            raise ValueError("model.probe: every_n_steps has to be 0 or more, k at least 1 and temperature positive")
        if self.max_images is not None and self.max_images < 1:
            raise ValueError(f"model.probe.max_images is {self.max_images}: it has to be at least 1, or null")


@torch.no_grad()
def extract_features(
    embed: Callable[[Tensor], Tensor], batches: Iterable[dict[str, Any]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Embed pictures.

    Args:
        embed: (B, C, H, W) -> (B, D).
        batches: samples of an `ImageDataset`, batched.

    Returns:
        features (n, D) float32, labels (n,), present (n,): False for what is no picture.
    """
    features, labels, present = [], [], []
    for batch in batches:
        features.append(embed(batch["images"].to(device, non_blocking=True)).float())
        labels.append(batch["label"])
        present.append(batch["present"])
    return torch.cat(features), torch.cat(labels).to(device), torch.cat(present).to(device)


@torch.no_grad()
def knn_votes(
    queries: Tensor, bank: Tensor, bank_labels: Tensor, n_classes: int, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Return the votes of the k nearest neighbours for each class, (n, n_classes), see the top of this file.

    Args:
        queries: (n, D).
        bank: (m, D); all of them vote when there are fewer than k.
        bank_labels: (m,), in 0 .. n_classes - 1.
    """
    bank = F.normalize(bank.float(), dim=1)
    votes = []
    for chunk in F.normalize(queries.float(), dim=1).split(CHUNK):
        similarity, nearest = (chunk @ bank.T).topk(min(k, len(bank)), dim=1)
        # From the nearest one's weight down, so that a low temperature does not overflow.
        weights = ((similarity - similarity[:, :1]) / temperature).exp()
        votes.append(weights.new_zeros(len(chunk), n_classes).scatter_add_(1, bank_labels[nearest], weights))
    return torch.cat(votes)


def accuracies(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the shares of pictures whose class is the best, and among the five best, of (n, n_classes) scores."""
    n_classes = scores.shape[1]
    found = {}
    for name, top_k in (("accuracy", 1), ("accuracy_top5", 5)):
        if n_classes > top_k or top_k == 1:
            metric = MulticlassAccuracy(n_classes, top_k=top_k, average="micro").to(scores.device)
            found[name] = float(metric(scores, labels))
    return found


def knn_accuracies(
    embed: Callable[[Tensor], Tensor], data: Any, device: torch.device, k: int = 20, temperature: float = 0.07
) -> dict[str, float]:
    """Return the `accuracies` of classifying the validation pictures by their neighbours among all training pictures.

    Args:
        embed: (B, C, H, W) -> (B, D).
        data: an `ImageData` that is set up.

    Raises:
        UserError: pictures without labels, or none to validate on.
    """
    if data.val_rows is None or not data.classes or data.val_rows.labels is None:
        raise UserError(
            "knn needs pictures of two classes or more in data.source, and labelled ones to validate on in "
            "data.val_source, or held out by data.val_fraction"
        )
    sets = []
    for dataset in (data.bank(None), data.val_dataset):
        features, labels, present = extract_features(embed, data.evaluation_batches(dataset), device)
        sets.append((features[present], labels[present]))
    (bank, bank_labels), (queries, labels) = sets
    return accuracies(knn_votes(queries, bank, bank_labels, len(data.classes), k, temperature), labels)
