"""From the bytes of a picture, whatever its format, to upright 8-bit grey or colour."""

import io
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

WIDE_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # 16 bits a pixel, which PIL's own conversion would clip at 255
WHITE = 255
# Named, because there are formats that are programs: PIL would let Ghostscript run one, whatever its suffix.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
MAX_PIXELS = 2**27  # 400 MB in colour; a file of some kB can state any number


class BadImage(Exception):
    """Why a file holds no usable picture."""


def decode_image(source: bytes | str | Path, channels: int, min_side: int = 1) -> Image.Image:
    """Read a picture: its first frame, turned as EXIF says, on white where it is transparent.

    Args:
        source: the content of a file, or its path.
        channels: 3 for colour, 1 for grey.
        min_side: smallest width and height to accept, in pixels.

    Returns:
        A picture of mode "RGB" or "L".

    Raises:
        BadImage: no picture, a damaged one, one of floating-point pixels, or one that is too small.
    """
    if not isinstance(source, bytes) and not Path(source).is_file():  # a pipe would keep us waiting
        raise BadImage("no such file")
    try:
        with warnings.catch_warnings(action="ignore"), _opened(source) as image:  # what is wrong is told once, by us
            if image.width * image.height > MAX_PIXELS:
                raise BadImage(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
            image.load()
            upright = ImageOps.exif_transpose(image)
            plain = _on_white(_eight_bits(upright))
    except BadImage:
        raise
    except Image.UnidentifiedImageError as error:
        raise BadImage("not a picture of any known format") from error
    except Image.DecompressionBombError as error:
        raise BadImage(f"more than {MAX_PIXELS:,} pixels") from error
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ..
        raise BadImage(f"damaged or cut short ({str(error).strip() or type(error).__name__})") from error
    if min(plain.size) < min_side:
        raise BadImage(f"{plain.width} x {plain.height} pixels, smaller than a patch of {min_side} x {min_side}")
    return plain.convert("L" if channels == 1 else "RGB")


def _opened(source: bytes | str | Path) -> Image.Image:
    Image.init()  # knows all formats from here on; what this PIL was built without is not among them
    known = [name for name in FORMATS if name in Image.OPEN]
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=known)


def _eight_bits(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise BadImage("floating-point pixels, whose range is unknown: save it with 8 or 16 bits")
    if image.mode not in WIDE_MODES:
        return image
    pixels = np.asarray(image).astype(np.int64)
    if pixels.min() < 0 or pixels.max() > 65_535:
        raise BadImage("pixels of more than 16 bits: save it with 8 or 16 bits")
    return Image.fromarray((pixels / 257).round().astype(np.uint8))


def _on_white(image: Image.Image) -> Image.Image:
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image
    image = image.convert("RGBA")
    background = Image.new("RGBA", image.size, (WHITE, WHITE, WHITE, WHITE))
    return Image.alpha_composite(background, image).convert("RGB")
