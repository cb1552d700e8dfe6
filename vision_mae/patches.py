"""Pictures as patches, the mask over them, and the loss: small pure functions.

Shapes: B batch, C channels, H and W picture, P patch side, N patches (row by row), K visible patches, D width,
V = P * P * C values of a patch, ordered (row, column, channel).
"""

import torch
from torch import Tensor

VARIANCE_EPS = 1e-6  # of normalised targets, as in the public MAE: a patch of one colour becomes 0, not infinite


def patchify(images_BCHW: Tensor, patch_size: int) -> Tensor:
    """Cut pictures into patches: (B, C, H, W) -> (B, N, V)."""
    B, C, H, W = images_BCHW.shape
    P = patch_size
    cut = images_BCHW.reshape(B, C, H // P, P, W // P, P)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(B, (H // P) * (W // P), P * P * C)


def unpatchify(patches_BNV: Tensor, patch_size: int, channels: int) -> Tensor:
    """Put the patches of square pictures together again: (B, N, V) -> (B, C, H, W), the inverse of `patchify`."""
    B, N, _ = patches_BNV.shape
    P, side = patch_size, round(N**0.5)
    cut = patches_BNV.reshape(B, side, side, P, P, channels)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(B, channels, side * P, side * P)


def random_masking(noise_BN: Tensor, n_visible: int) -> tuple[Tensor, Tensor]:
    """Choose the patches that the encoder sees: those of least noise, so that uniform noise draws them uniformly.

    Returns:
        (visible, mask): indices of the visible patches in ascending noise, (B, K); and 1 for every masked patch, 0 for
        every visible one, (B, N) float32.
    """
    visible_BK = noise_BN.argsort(dim=1, stable=True)[:, :n_visible]
    mask_BN = torch.ones_like(noise_BN, dtype=torch.float32).scatter_(1, visible_BK, 0.0)
    return visible_BK, mask_BN


def take_patches(x_BND: Tensor, indices_BK: Tensor) -> Tensor:
    """Gather rows by their index: (B, N, D), (B, K) -> (B, K, D)."""
    return x_BND.gather(1, indices_BK[:, :, None].expand(-1, -1, x_BND.shape[-1]))


def patch_statistics(patches_BNV: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (of V - 1 degrees of freedom) of every patch, each (B, N, 1)."""
    mean = patches_BNV.mean(dim=-1, keepdim=True)
    variance = patches_BNV.var(dim=-1, keepdim=True)
    return mean, (variance + VARIANCE_EPS).sqrt()


def patch_targets(images_BCHW: Tensor, patch_size: int, normalise: bool) -> Tensor:
    """What the decoder is to predict, (B, N, V): the patches, each normalised by its own mean and variance if asked."""
    patches = patchify(images_BCHW.float(), patch_size)
    if not normalise:
        return patches
    mean, deviation = patch_statistics(patches)
    return (patches - mean) / deviation


def masked_mean_squared_error(predictions_BNV: Tensor, targets_BNV: Tensor, mask_BN: Tensor) -> Tensor:
    """Mean squared error over the masked patches of each picture, (B,), in float32."""
    per_patch = (predictions_BNV.float() - targets_BNV).square().mean(dim=-1)
    return (per_patch * mask_BN).sum(dim=1) / mask_BN.sum(dim=1)


def sincos_table(width: int, side: int, class_token: bool = True) -> Tensor:
    """The fixed position table of a side x side grid, (1, N + 1, width), zeros for the class token first.

    The first half of the channels encodes the column, the second half the row; each half is sin, then cos, of the
    coordinate times 10000^(-4i / width) (He et al. 2021, public code).

    Raises:
        ValueError: width is no multiple of 4.
    """
    if width % 4:
        raise ValueError(f"a two-dimensional sin-cos table needs a width that is a multiple of 4, not {width}")
    frequencies = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64, device="cpu") / (width / 4))
    rows, columns = torch.meshgrid(*[torch.arange(side, dtype=torch.float64, device="cpu")] * 2, indexing="ij")
    halves = []
    for coordinate in (columns, rows):
        angles = coordinate.reshape(-1, 1) * frequencies
        halves += [angles.sin(), angles.cos()]
    table = torch.cat(halves, dim=1).float()
    if class_token:
        table = torch.cat((torch.zeros(1, width, device="cpu"), table))
    return table[None]
