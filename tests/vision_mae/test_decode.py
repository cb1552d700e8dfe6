"""Pictures of every format come out upright, in 8 bits, in colour or grey."""

import numpy as np
import pytest
from PIL import Image

from tests.vision_mae.pictures import encoded, two_halves
from vision_mae.data.decode import BadImage, decode_image

TOLERANCE = 12  # of JPEG, out of 255


def assert_red_then_blue(data: bytes) -> None:
    image = decode_image(data, channels=3)
    assert image.mode == "RGB"
    assert image.size == (64, 32)
    pixels = np.asarray(image).astype(int)
    assert abs(pixels[16, 8] - (255, 0, 0)).max() <= TOLERANCE
    assert abs(pixels[16, 56] - (0, 0, 255)).max() <= TOLERANCE


def test_a_gif():
    assert_red_then_blue(encoded(two_halves(), "GIF"))


def test_the_first_frame_of_a_moving_gif():
    other = two_halves().transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert_red_then_blue(encoded(two_halves(), "GIF", save_all=True, append_images=[other]))


def test_a_png_with_a_palette():
    assert_red_then_blue(encoded(two_halves().quantize(4), "PNG"))


def test_a_palette_with_a_transparent_entry_lies_on_white():
    image = two_halves().quantize(4)
    data = encoded(image, "PNG", transparency=image.getpixel((0, 0)))
    pixels = np.asarray(decode_image(data, 3))
    assert pixels[16, 8].tolist() == [255, 255, 255]
    assert pixels[16, 56].tolist() == [0, 0, 255]


def test_transparency_lies_on_white():
    image = two_halves().convert("RGBA")
    image.putalpha(128)
    pixel = np.asarray(decode_image(encoded(image, "PNG"), 3))[16, 8].astype(int)
    assert abs(pixel - (255, 127, 127)).max() <= 1
    grey = Image.new("LA", (20, 20), (0, 0))
    assert np.asarray(decode_image(encoded(grey, "PNG"), 1)).min() == 255


def test_a_cmyk_jpeg():
    assert_red_then_blue(encoded(two_halves().convert("CMYK"), "JPEG", quality=95, subsampling=0))


def test_a_16_bit_grey_png_keeps_its_range():
    pixels = np.linspace(0, 65_535, 32 * 64).round().astype(np.uint16).reshape(32, 64)
    for channels, mode in ((1, "L"), (3, "RGB")):
        image = decode_image(encoded(Image.fromarray(pixels), "PNG"), channels)
        assert image.mode == mode
        shown = np.asarray(image.convert("L")).astype(float)
        assert abs(shown - pixels / 257).max() <= 0.5 + 1e-6


def test_an_exif_rotated_jpeg_stands_upright():
    """Orientation 6: the camera was turned, so the stored picture has to be turned by 90 degrees clockwise."""
    stored = two_halves().transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    assert_red_then_blue(encoded(stored, "JPEG", exif=exif, quality=95, subsampling=0))


def test_black_and_white_and_grey():
    bits = encoded(two_halves().convert("L").point(lambda value: 255 if value > 50 else 0).convert("1"), "PNG")
    assert np.asarray(decode_image(bits, 3))[16, 8].tolist() == [255, 255, 255]
    assert decode_image(encoded(two_halves(), "PNG"), channels=1).mode == "L"


def test_a_truncated_jpeg():
    data = encoded(two_halves(200, 200), "JPEG")
    with pytest.raises(BadImage, match="damaged or cut short"):
        decode_image(data[: len(data) // 2], 3)


def test_a_truncated_png():
    data = encoded(Image.effect_noise((64, 64), 50), "PNG")
    with pytest.raises(BadImage, match="damaged or cut short"):
        decode_image(data[: len(data) // 2], 3)


def test_a_text_file_named_jpg(tmp_path):
    file = tmp_path / "notes.jpg"
    file.write_text("no picture")
    with pytest.raises(BadImage, match="not a picture"):
        decode_image(file, 3)


def test_floating_point_pixels_are_refused():
    with pytest.raises(BadImage, match="floating-point"):
        decode_image(encoded(Image.new("F", (20, 20), 0.5), "TIFF"), 3)


def test_a_picture_smaller_than_a_patch():
    with pytest.raises(BadImage, match="64 x 32 pixels, smaller than a patch of 40 x 40"):
        decode_image(encoded(two_halves(), "PNG"), 3, min_side=40)
