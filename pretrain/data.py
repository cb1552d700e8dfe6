"""The data module both domains derive from: batch sizes, order and loaders."""

from typing import Any

import lightning as L

from pretrain.errors import UserError
from pretrain.loader import EvaluationLoader, TrainLoader, WeightedDataset
from pretrain.order import global_seed
from pretrain.plan import Plan

MAX_WORKERS = 1024  # processes of one device


class PretrainData(L.LightningDataModule):
    """Loaders over `train_dataset` and `val_dataset`, which a domain's `setup` provides.

    Args:
        global_batch_size: samples per optimizer step, over all devices.
        micro_batch_size: samples per forward pass on one device; accumulation is derived from the two.
        num_workers: loader processes per device.
        seed: decides the order of the samples; default: the value of seed_everything.
    """

    #: settings that a resumed run may change: where the same samples lie, and how a step is cut
    may_change_on_resume: tuple[str, ...] = (
        "source",
        "val_source",
        "val_fraction",
        "max_bad",
        "cache_dir",
        "global_batch_size",
        "micro_batch_size",
        "num_workers",
    )
    train_dataset: WeightedDataset
    val_dataset: WeightedDataset | None = None

    def __init__(self, global_batch_size: int, micro_batch_size: int, num_workers: int, seed: int | None) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.num_workers = num_workers
        self.seed = seed
        for name, value in (("num_workers", num_workers), ("seed", seed or 0)):
            if value < 0:
                raise UserError(f"data.{name} is {value}: it has to be 0 or more")
        if num_workers > MAX_WORKERS:
            raise UserError(f"data.num_workers is {num_workers}: it has to be at most {MAX_WORKERS}")

    @property
    def units_per_sample(self) -> int:
        """What one sample counts for in throughput: tokens per sequence, 1 for an image."""
        return 1

    @property
    def order_seed(self) -> int:
        """The seed of the order of the samples."""
        return global_seed() if self.seed is None else self.seed

    def known_samples(self) -> int | None:
        """Return how many training samples there are, at most; None if only reading the source would tell."""
        return None

    def train_dataloader(self) -> TrainLoader:
        trainer = self._running_trainer()
        plan: Plan = trainer.lightning_module.plan  # type: ignore[assignment]
        return TrainLoader(
            self.train_dataset,
            seed=self.order_seed,
            global_batch_size=plan.global_batch_size,
            micro_batch_size=plan.micro_batch_size,
            total_steps=plan.total_steps,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            num_workers=self.num_workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )

    def val_dataloader(self) -> EvaluationLoader | list:
        if self.val_dataset is None:
            return []
        trainer = self._running_trainer()
        return EvaluationLoader(
            self.val_dataset,
            batch_size=self.micro_batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            num_workers=self.num_workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )

    def _running_trainer(self) -> L.Trainer:
        if self.trainer is None:
            raise RuntimeError("loaders exist within a run: pass the data module to Trainer.fit")
        return self.trainer


def check_vendored(source: str, vendored: dict[str, Any]) -> None:
    """Raise a UserError for a source that is called like data in the package, but is none."""
    if source.startswith("demo:") and source not in vendored:
        raise UserError(f"{source} is not in the package: there are {', '.join(vendored)}")
