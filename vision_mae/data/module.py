"""Pictures for a run: from a source to batches, with account of those that cannot be read."""

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain.data import PretrainData, check_vendored
from pretrain.errors import UserError
from pretrain.loader import EvaluationLoader, WeightedDataset
from pretrain.order import global_seed, permutation
from pretrain.paths import user_path
from vision_mae.data.dataset import ImageDataset, Subset, Views
from vision_mae.data.decode import BadImage
from vision_mae.data.source import ImageRows, open_images

ASSETS = Path(__file__).parent.parent / "assets"
# Pictures that travel with the package.
VENDORED = {f"demo:{split}": ASSETS / "emoji64" / f"{split}.parquet" for split in ("train", "val")}
# Mean and standard deviation of ImageNet's channels, and of their grey.
CHANNEL_STATISTICS = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.449,), (0.226,))}
CHECKED_AHEAD = 64
MIN_CROP_RATIO = 0.1  # the shorter side becomes image_size / ratio before the crop


class ImageData(PretrainData):
    """Pictures, decoded in the loader's processes.

    Args:
        source: pictures to train on: a folder (with or without one sub-folder for each class), .parquet files with an
            image column, a Hugging Face dataset NAME[:SUBSET[:SPLIT]], or demo:train.
        val_source: pictures to validate on; null: held out of `source`.
        global_batch_size: pictures per optimizer step, over all devices.
        micro_batch_size: pictures per forward pass on one device.
        num_workers: processes that decode, per device.
        crop_scale: range of the share of the picture that a training crop covers.
        flip: mirror half of the training crops.
        val_crop_ratio: share of the picture's side that evaluation cuts from the middle.
        mean: of each channel, for pixels in [0, 1]; null: ImageNet's.
        std: the same for the standard deviation.
        rand_augment: magnitude of RandAugment on training crops, for fine-tuning; 0: none.
        random_erasing: probability of erasing a part of a training crop, for fine-tuning.
        val_fraction: share of the pictures held out when val_source is null; 0: no validation.
        max_bad: broken pictures to pass over before giving up.
        image_field: column of the pictures in .parquet files and Hugging Face datasets.
        label_field: column of the labels there, used by probes and fine-tuning only.
        cache_dir: where what `datasets` makes of .parquet files is kept; null: $MOA_CACHE, or ~/.cache/moa-pretrain.
        seed: decides order, crops, flips and masks; null: seed_everything.
        image_size: side of a sample, in pixels; follows from the model.
        patch_size: side of a patch, in pixels; follows from the model.
        in_channels: 3 for colour, 1 for grey; follows from the model.
    """

    def __init__(
        self,
        source: str,
        val_source: str | None = None,
        global_batch_size: int = 4096,
        micro_batch_size: int = 64,
        num_workers: int = 0,
        crop_scale: tuple[float, float] = (0.2, 1.0),
        flip: bool = True,
        val_crop_ratio: float = 0.875,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        rand_augment: int = 0,
        random_erasing: float = 0.0,
        val_fraction: float = 0.01,
        max_bad: int = 0,
        image_field: str = "image",
        label_field: str = "label",
        cache_dir: str | None = None,
        seed: int | None = None,
        image_size: int = 224,
        patch_size: int = 16,
        in_channels: int = 3,
    ) -> None:
        super().__init__(global_batch_size, micro_batch_size, num_workers, seed)
        self.source = source
        self.val_source = val_source
        self.val_fraction = val_fraction
        self.image_field = image_field
        self.label_field = label_field
        self.cache_dir = cache_dir
        self.image_size = image_size
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.bad = BadImages(max_bad)
        default_mean, default_std = CHANNEL_STATISTICS[in_channels]
        self.views = Views(
            image_size,
            mean=_for_channels("mean", mean, default_mean),
            std=_for_channels("std", std, default_std),
            crop_scale=crop_scale,
            flip=flip,
            val_crop_ratio=val_crop_ratio,
            rand_augment=rand_augment,
            random_erasing=random_erasing,
        )
        self._check_ranges()
        self.train_rows: ImageRows | None = None
        self.val_rows: ImageRows | None = None

    def _check_ranges(self) -> None:
        low, high = self.views.crop_scale
        if not 0 < low <= high <= 1:
            raise UserError(f"data.crop_scale is [{low}, {high}]: two ascending numbers in (0, 1] are needed")
        if not MIN_CROP_RATIO <= self.views.val_crop_ratio <= 1:
            raise UserError(f"data.val_crop_ratio is {self.views.val_crop_ratio}: it has to lie in [0.1, 1]")
        for name, value in (("val_fraction", self.val_fraction), ("random_erasing", self.views.random_erasing)):
            if not 0 <= value < 1:
                raise UserError(f"data.{name} is {value}: it has to lie in [0, 1)")
        if not 0 <= self.views.rand_augment <= 30:
            raise UserError(f"data.rand_augment is {self.views.rand_augment}: it has to lie in 0 .. 30")

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of the training data; () without labels, or where all are the same."""
        classes = self.train_rows.classes if self.train_rows is not None else ()
        return classes if len(classes) > 1 else ()

    def prepare_data(self) -> None:
        """Let `datasets` convert what it has not yet; one process does it, the others wait for it."""
        for source in (self.source, self.val_source):
            if source is not None:
                self._open(source)

    def setup(self, stage: str) -> None:
        if self.train_rows is not None:
            return
        rows = self._open(self.source)
        if self.val_source is not None:
            self.val_rows = self._open(self.val_source).with_classes(rows.classes)
        else:
            rows, self.val_rows = _hold_out(rows, self.val_fraction, self.source)
        self.train_rows = rows
        self.train_dataset = self.dataset(rows)
        self.val_dataset = None if self.val_rows is None else self.dataset(self.val_rows)
        self._check_ahead()

    def dataset(self, rows: ImageRows) -> ImageDataset:
        """Return the samples of some pictures."""
        return ImageDataset(
            rows,
            self.views,
            channels=self.in_channels,
            patch_size=self.patch_size,
            seed=global_seed() if self.seed is None else self.seed,
            max_bad=self.bad.limit,
        )

    def bank(self, max_images: int | None) -> Subset:
        """Return training pictures as evaluation sees them, evenly spread: what nearest neighbours are sought in."""
        n_images = len(self.train_dataset)
        n_taken = n_images if max_images is None else min(max_images, n_images)
        return Subset(self.train_dataset, [i * n_images // n_taken for i in range(n_taken)])  # type: ignore[arg-type]

    def evaluation_batches(
        self, dataset: WeightedDataset, rank: int = 0, world_size: int = 1
    ) -> Iterator[dict[str, Any]]:
        """Yield this rank's share of a dataset in order, with broken pictures told and counted."""
        loader = EvaluationLoader(
            dataset,
            batch_size=self.micro_batch_size,
            rank=rank,
            world_size=world_size,
            num_workers=self.num_workers,
        )
        for batch in loader:
            yield self.on_before_batch_transfer(batch, 0)

    def on_before_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        # Here, and not where they are decoded: an error of a worker process would arrive as a traceback.
        for problems in batch.pop("problem", ()):
            self.bad.report(problems)
        return batch

    def _open(self, source: str) -> ImageRows:
        check_vendored(source, VENDORED)
        root = self.cache_dir or os.environ.get("MOA_CACHE") or "~/.cache/moa-pretrain"
        return open_images(
            str(VENDORED.get(source, source)), self.image_field, self.label_field, user_path(root) / "images"
        )

    def _check_ahead(self) -> None:
        """Decode some pictures, evenly spread, so that what is wrong with all shows before a run begins."""
        for dataset in (self.train_dataset, self.val_dataset):
            if not isinstance(dataset, ImageDataset):
                continue
            for index in np.linspace(0, len(dataset) - 1, min(CHECKED_AHEAD, len(dataset)), dtype=int):
                try:
                    dataset.decode(int(index))
                except BadImage as error:
                    self.bad.report(str(error))


class BadImages:
    """Names every broken picture once, and gives up when there are more than `limit` in this process's share."""

    def __init__(self, limit: int) -> None:
        if limit < 0:
            raise UserError(f"data.max_bad is {limit}: it has to be 0 or more")
        self.limit = limit
        self.seen: set[str] = set()

    def report(self, problems: str) -> None:
        """Take note of "FILE: REASON" lines.

        Raises:
            UserError: one broken picture too many.
        """
        for problem in problems.splitlines():
            if problem in self.seen:
                continue
            self.seen.add(problem)
            if len(self.seen) > self.limit:
                raise UserError(
                    f"{problem}; {len(self.seen)} broken pictures, and data.max_bad allows {self.limit}: "
                    "mend or remove it, or raise data.max_bad to leave such pictures out"
                )
            print(f"left out {problem}", file=sys.stderr)


def _hold_out(rows: ImageRows, fraction: float, source: str) -> tuple[ImageRows, ImageRows | None]:
    if fraction == 0:
        return rows, None
    if len(rows) == 1:
        raise UserError(
            f"{source} holds one picture, none can be held out: give data.val_source, or set data.val_fraction to 0"
        )
    n_held_out = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
    order = permutation(0, 0, len(rows))
    return rows.select(sorted(order[n_held_out:].tolist())), rows.select(sorted(order[:n_held_out].tolist()))


def _for_channels(name: str, values: list[float] | None, default: tuple[float, ...]) -> tuple[float, ...]:
    if values is None:
        return default
    if len(values) != len(default):
        raise UserError(f"data.{name} has {len(values)} values for {len(default)} channels")
    if not all(map(math.isfinite, values)):
        raise UserError(f"data.{name} is {values}: every value has to be a number")
    if name == "std" and min(values) <= 0:
        raise UserError(f"data.std is {values}: every value has to be positive")
    return tuple(values)


def denormalise(images: torch.Tensor, views: Views) -> torch.Tensor:
    """Undo the normalisation by channel: (.., C, H, W) to pixels in [0, 1]."""
    mean, std = (torch.tensor(values, device=images.device)[:, None, None] for values in (views.mean, views.std))
    return (images.float() * std + mean).clamp(0, 1)
