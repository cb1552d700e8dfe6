"""Pictures as training samples: augmentation and masks that are pure functions of (seed, position)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from pretrain.order import noise_seed
from vision_mae.data.decode import BadImage, decode_image
from vision_mae.data.source import ImageRows

# Third entry of the seeds: training draws never meet the evaluation's.
TRAINING, EVALUATION = 0, 1
MAX_ELONGATION = 16
Transform = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Views:
    """How a picture becomes a tensor (channels, image_size, image_size), normalised by channel.

    Attributes:
        image_size: side in pixels.
        mean, std: of each channel, for pixels in [0, 1].
        crop_scale: range of the share of the picture that a training crop covers.
        flip: mirror half of the training crops.
        val_crop_ratio: evaluation crops this share from the middle of the picture, by side.
        rand_augment: magnitude of RandAugment on training crops; 0: none.
        random_erasing: probability of erasing a part of a training crop.
    """

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_scale: tuple[float, float] = (0.2, 1.0)
    flip: bool = True
    val_crop_ratio: float = 0.875
    rand_augment: int = 0
    random_erasing: float = 0.0

    def training(self) -> Transform:
        """Random resized crop and flip, then what fine-tuning adds."""
        steps: list[Any] = [
            v2.RandomResizedCrop(self.image_size, scale=self.crop_scale, interpolation=InterpolationMode.BICUBIC)
        ]
        if self.flip:
            steps.append(v2.RandomHorizontalFlip())
        if self.rand_augment:
            steps.append(v2.RandAugment(magnitude=self.rand_augment, interpolation=InterpolationMode.BILINEAR))
        steps += self._to_tensor()
        if self.random_erasing:
            steps.append(v2.RandomErasing(self.random_erasing))
        return v2.Compose(steps)

    def evaluation(self) -> Transform:
        """Resize the shorter side and cut out the middle."""
        return v2.Compose(
            [
                without_far_ends,
                v2.Resize(round(self.image_size / self.val_crop_ratio), interpolation=InterpolationMode.BICUBIC),
                v2.CenterCrop(self.image_size),
                *self._to_tensor(),
            ]
        )

    def _to_tensor(self) -> list[Any]:
        return [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(self.mean, self.std),
            v2.ToPureTensor(),
        ]


class ImageDataset:
    """Samples {images (C, H, W), noise (N,), label, present, problem}.

    `noise` decides which patches are masked. For training (`draw`), crop, flip and noise are a function of (seed,
    position in the stream), so of (seed, epoch, picture); for evaluation (`[index]`) there is no randomness but the
    mask, which belongs to the index.

    A broken picture is told in `problem` ("" if there is none). In training the next sound one stands in for it, so
    that a step keeps its size; in evaluation the sample has `present` False.

    Args:
        rows: the pictures.
        views: how they become tensors.
        channels: 1 or 3.
        patch_size: side of a patch; no picture may be smaller.
        seed: of crops, flips and masks.
        max_bad: how many pictures to try in place of a broken one.
    """

    def __init__(
        self, rows: ImageRows, views: Views, *, channels: int, patch_size: int, seed: int, max_bad: int = 0
    ) -> None:
        self.rows = rows
        self.views = views
        self.channels = channels
        self.patch_size = patch_size
        self.seed = seed
        self.max_bad = max_bad
        self.n_patches = (views.image_size // patch_size) ** 2
        self._training, self._evaluation = views.training(), views.evaluation()

    def __len__(self) -> int:
        return len(self.rows)

    def n_targets(self, indices: np.ndarray) -> np.ndarray:
        """One for each sample: the loss of a picture is the mean over its masked patches, all of equal number."""
        return np.ones(len(indices), dtype=np.int64)

    def draw(self, index: int, position: int) -> dict[str, Any]:
        """Return the training sample at a position of the stream."""
        problems = []
        for offset in range(self.max_bad + 1):
            try:
                picture, label = self.decode((index + offset) % len(self))
            except BadImage as error:
                problems.append(str(error))
                continue
            with seeded(noise_seed(self.seed, position, TRAINING)):
                images, noise = self._training(picture), torch.rand(self.n_patches)
            return self._sample(images, noise, label, "\n".join(problems))
        return self._absent("\n".join(problems))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an evaluation sample; index -1 is one without a picture."""
        if index < 0:
            return self._absent("")
        try:
            picture, label = self.decode(index)
        except BadImage as error:
            return self._absent(str(error))
        with seeded(noise_seed(0, index, EVALUATION)):
            return self._sample(self._evaluation(picture), torch.rand(self.n_patches), label, "")

    def decode(self, index: int) -> tuple[Any, int]:
        """Return a picture and its label.

        Raises:
            BadImage: with the name of the file and the reason.
        """
        name, source, label = self.rows.read(index)
        try:
            return decode_image(source, self.channels, self.patch_size), label
        except BadImage as error:
            raise BadImage(" ".join(f"{name}: {error}".split())) from error  # one line is one picture

    def _absent(self, problem: str) -> dict[str, Any]:
        size = self.views.image_size
        images, noise = torch.zeros(self.channels, size, size), torch.arange(self.n_patches).float()
        return self._sample(images, noise, -1, problem) | {"present": False}

    def _sample(self, images: Tensor, noise: Tensor, label: int, problem: str) -> dict[str, Any]:
        return {"images": images, "noise": noise, "label": label, "present": True, "problem": problem}


class Subset:
    """Some samples of a dataset, as evaluation sees them."""

    def __init__(self, dataset: ImageDataset, indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def n_targets(self, indices: np.ndarray) -> np.ndarray:
        return self.dataset.n_targets(indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.dataset[self.indices[index] if index >= 0 else -1]


def without_far_ends(picture: Image.Image) -> Image.Image:
    """Cut what evaluation would never show off a very long picture, which would become a huge one when resized."""
    width, height = (min(side, MAX_ELONGATION * min(picture.size)) for side in picture.size)
    if (width, height) == picture.size:
        return picture
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw torch's random numbers on the CPU from a seed, and leave the generator outside as it was."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
