"""What only a masked autoencoder can show: its pictures, and what its features know of the classes."""

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from pretrain.callbacks import log_figure
from pretrain.metrics import log_metrics
from vision_mae.data.module import denormalise
from vision_mae.patches import patch_statistics, patchify, unpatchify
from vision_mae.probes import ProbeConfig, accuracies, extract_features, knn_votes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTION = {
    True: "masked patches: the prediction in units of each target patch's own mean and deviation,\n"
    "which the model does not know; visible patches: pasted from the input",
    False: "masked patches: the prediction; visible patches: pasted from the input",
}
GREY = 0.5  # of a masked patch


class Reconstructions(L.Callback):
    """Draw, at every validation, the first validation pictures as `reconstruction`: input, masked, reconstruction.

    Args:
        n_images: how many.
    """

    def __init__(self, n_images: int = 8) -> None:
        self.n_images = n_images

    @torch.no_grad()
    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx > 0 or trainer.sanity_checking:
            return
        images = batch["images"][: self.n_images]
        with trainer.precision_plugin.forward_context(), torch.compiler.set_stance("force_eager"):
            predictions, mask = pl_module.model(images, batch["noise"][: self.n_images])
        patch, normalised = pl_module.config.patch_size, pl_module.norm_pixel_loss
        masked, filled = reconstruct(images, predictions, mask, patch, normalised)
        views = trainer.datamodule.views  # type: ignore[attr-defined]
        columns = [denormalise(column, views) for column in (images, masked, filled)]
        columns[1] = torch.where(_pixel_mask(mask, patch) > 0, GREY, columns[1])
        if trainer.is_global_zero:
            log_figure(trainer, "reconstruction", picture_figure(columns, CAPTION[normalised]))


def reconstruct(
    images_BCHW: Tensor, predictions_BNV: Tensor, mask_BN: Tensor, patch_size: int, normalised: bool
) -> tuple[Tensor, Tensor]:
    """Return the masked pictures (masked patches 0) and the reconstructions, each (B, C, H, W).

    The reconstruction is the prediction where masked and the picture itself elsewhere. A prediction of normalised
    patches is brought back to pixels with the mean and deviation of the patch that it predicts.
    """
    targets = patchify(images_BCHW.float(), patch_size)
    predictions = predictions_BNV.float()
    if normalised:
        mean, deviation = patch_statistics(targets)
        predictions = predictions * deviation + mean
    is_masked = mask_BN[:, :, None] > 0
    channels = images_BCHW.shape[1]
    masked = unpatchify(targets.masked_fill(is_masked, 0.0), patch_size, channels)
    return masked, unpatchify(torch.where(is_masked, predictions, targets), patch_size, channels)


def _pixel_mask(mask_BN: Tensor, patch_size: int) -> Tensor:
    """1 at every pixel of a masked patch, (B, 1, H, W)."""
    return unpatchify(mask_BN[:, :, None].expand(-1, -1, patch_size**2), patch_size, 1)


def picture_figure(columns: list[Tensor], caption: str) -> "Figure":
    """Draw pictures side by side, one row each: input, masked, reconstruction, each (B, C, H, W) in [0, 1]."""
    from matplotlib.figure import Figure

    n_rows = len(columns[0])
    figure = Figure(figsize=(6, 2 * n_rows + 1), layout="constrained")
    axes = figure.subplots(n_rows, 3, squeeze=False)
    for column, (title, pictures) in enumerate(zip(("input", "masked", "reconstruction"), columns, strict=True)):
        axes[0][column].set_title(title)
        for row, picture in enumerate(pictures.permute(0, 2, 3, 1).cpu().numpy()):
            axes[row][column].imshow(picture.squeeze(), cmap="gray", vmin=0, vmax=1)
            axes[row][column].set_axis_off()
    figure.suptitle(caption, fontsize=8)
    return figure


class KnnProbe(L.Callback):
    """Log `probe/knn`, the nearest-neighbour accuracy on the validation pictures, at an interval and at the end.

    It needs labelled pictures for training and validation, and is silent otherwise.
    """

    def __init__(self, config: ProbeConfig) -> None:
        self.config = config
        self.latest: dict[str, float] = {}
        self._probed_step = -1

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        step, every = trainer.global_step, self.config.every_n_steps
        if every == 0 or step == self._probed_step or step == 0:
            return
        if step % every and step != trainer.max_steps:
            return
        # Micro-batches between two steps see the same number; only the one that ends a step comes first.
        self._probed_step = step
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not data.classes or data.val_rows is None or data.val_rows.labels is None:
            return
        self.latest = {f"probe/{name}": value for name, value in self.measure(trainer, pl_module, data).items()}
        log_metrics(trainer, self.latest)

    def measure(self, trainer: L.Trainer, pl_module: Any, data: Any) -> dict[str, float]:
        """Return `knn` and `knn_top5`, the same on every rank."""
        model, config = pl_module.model, self.config

        def embed(images: Tensor) -> Tensor:
            with trainer.precision_plugin.forward_context():
                return model.features(images, config.pool)

        def gathered(dataset: Any) -> tuple[Tensor, Tensor]:
            batches = data.evaluation_batches(dataset, trainer.global_rank, trainer.world_size)
            parts = extract_features(embed, batches, pl_module.device)
            features, labels, present = (pl_module.all_gather(part).reshape(-1, *part.shape[1:]) for part in parts)
            return features[present], labels[present]

        was_training = model.training
        model.eval()
        with torch.compiler.set_stance("force_eager"):  # unmasked pictures are of another length
            bank, bank_labels = gathered(data.bank(config.max_images))
            queries, labels = gathered(data.val_dataset)
        model.train(was_training)
        votes = knn_votes(queries, bank, bank_labels, len(data.classes), config.k, config.temperature)
        return {name.replace("accuracy", "knn"): value for name, value in accuracies(votes, labels).items()}
