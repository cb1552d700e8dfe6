"""Pictures of any bytes and shapes: decoded, or told in one line; never a program, a pipe or more than memory holds."""

import contextlib
import os
import struct
import subprocess
import zlib

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from pretrain.errors import UserError
from pretrain.loader import TrainLoader
from tests.vision_mae.pictures import encoded, two_halves, write_folder
from tests.vision_mae.test_data import open_data
from vision_mae.data.dataset import without_far_ends
from vision_mae.data.decode import MAX_PIXELS, BadImage, decode_image
from vision_mae.data.source import open_images

SOUND = [encoded(two_halves(), kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")]


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A grey PNG that states any size."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@settings(max_examples=200, deadline=None)
@example(0, 0, 0, 0)
@given(st.integers(0, len(SOUND) - 1), st.integers(0, 5000), st.integers(0, 255), st.integers(0, 5000))
def test_a_picture_with_any_byte_changed_and_cut_anywhere_is_decoded_or_told(kind, place, value, length):
    data = bytearray(SOUND[kind])
    data[place % len(data)] = value
    with contextlib.suppress(BadImage):
        assert decode_image(bytes(data[: 1 + length % len(data)]), channels=3).mode == "RGB"


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes_are_told(data):
    with pytest.raises(BadImage):
        decode_image(data, channels=3)


@pytest.mark.parametrize("side", [12_000, 100_000, 2**31 - 1])
def test_a_picture_that_states_too_many_pixels_is_told_before_they_are_made(side, recwarn):
    with pytest.raises(BadImage, match=f"pixels, more than {MAX_PIXELS:,}|more than {MAX_PIXELS:,} pixels"):
        decode_image(png(side, side), channels=1)
    assert not recwarn.list


def test_a_picture_that_is_a_program_is_never_run(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **_: pytest.fail(f"started {args}"))
    monkeypatch.setattr(subprocess, "call", lambda *args, **_: pytest.fail(f"started {args}"))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\nquit\n"
    with pytest.raises(BadImage, match="not a picture of any known format"):
        decode_image(postscript, channels=3)


def test_a_name_in_a_table_that_is_no_file_is_told(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    for name in (tmp_path / "a.png", "/dev/zero", tmp_path / "missing.png", "", "a\0b"):
        with pytest.raises(BadImage, match="no such file"):
            decode_image(str(name), channels=3)


def test_a_source_that_is_a_pipe_or_a_device_is_told(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    for source in ("pipe", str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(UserError, match="a pipe or a device"):
            open_images(source)


@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1), (16, 20_000)])
def test_the_longest_pictures_cost_no_more_than_others(tmp_path, size):
    """What evaluation cuts out of the middle is the same as without the far ends."""
    picture = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (size[1], size[0] // 256 + 1))[:, : size[0]])
    slim = without_far_ends(picture)
    assert max(slim.size) <= 16 * min(slim.size)
    middle = np.asarray(picture)[(size[1] - 1) // 2, (size[0] - 1) // 2]
    assert abs(int(np.asarray(slim)[(slim.height - 1) // 2, (slim.width - 1) // 2]) - int(middle)) <= 1
    if min(size) < 16:
        with pytest.raises(BadImage, match="smaller than a patch"):
            decode_image(encoded(picture, "PNG"), channels=1, min_side=16)
    assert without_far_ends(two_halves()).size == (64, 32)


@pytest.mark.parametrize("workers", [0, 1])
def test_pictures_of_every_mode_and_broken_ones_go_through_a_loader(tmp_path, workers, capsys):
    """CMYK, palette, 16 bits, animated, turned by EXIF, transparent, long, of a wrong suffix; and three broken."""
    write_folder(tmp_path, n_images=2, classes=())
    picture = two_halves()
    exif = Image.Exif()
    exif[0x0112] = 6
    sound = {
        "cmyk.jpg": encoded(picture.convert("CMYK"), "JPEG"),
        "palette.png": encoded(picture.convert("P"), "PNG"),
        "wide.png": encoded(Image.fromarray(np.full((40, 40), 40_000, dtype=np.uint16)), "PNG"),
        "moving.gif": encoded(picture, "GIF", save_all=True, append_images=[picture.rotate(180)]),
        "turned.jpg": encoded(picture, "JPEG", exif=exif),
        "alpha.png": encoded(picture.convert("RGBA"), "PNG"),
        "suffix.png": encoded(picture, "JPEG"),
        "elongated.png": encoded(picture.resize((20_000, 16)), "PNG"),
    }
    broken = {"a.png": b"", "b\nc.jpg": SOUND[1][:100], "d.png": png(60_000, 60_000)}
    for name, content in (sound | broken).items():
        (tmp_path / name).write_bytes(content)
    data = open_data(tmp_path, max_bad=3)
    loader = TrainLoader(
        data.train_dataset, seed=0, global_batch_size=4, micro_batch_size=4, total_steps=8, num_workers=workers
    )
    batches = [data.on_before_batch_transfer(batch, 0) for batch in loader]
    assert all(batch["images"].isfinite().all() and batch["present"].all() for batch in batches)
    assert len(data.bad.seen) == len(broken)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(broken)
    assert sum(1 for batch in data.evaluation_batches(data.train_dataset) for there in batch["present"] if there) == 10
