"""Pictures in many formats, made by PIL, whose left half is red and right half blue (or dark and bright)."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

RED, BLUE = (255, 0, 0), (0, 0, 255)


def two_halves(width: int = 64, height: int = 32) -> Image.Image:
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[:, : width // 2], pixels[:, width // 2 :] = RED, BLUE
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def write_folder(root: Path, n_images: int = 6, classes: tuple[str, ...] = ("cat", "dog"), side: int = 32) -> Path:
    """Random pictures, in one sub-folder for each class."""
    generator = np.random.default_rng(0)
    for number in range(n_images):
        folder = root / classes[number % len(classes)] if classes else root
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (side, side + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return root
