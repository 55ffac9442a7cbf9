"""Image files of strangers: what is no image, too large, cut short or odd never gets as far as the encoder."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from troupellm.models.media.decode import BadImage, decode, pixels_digest

PIXELS = 1_000_000


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(width: int, height: int) -> bytes:
    """A file whose header has this size, and next to no pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


SOLID = Image.new("RGB", (40, 30), (10, 200, 30))
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>'
JPEG = encoded(SOLID, "JPEG")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_every_format_that_is_taken_gives_rgb(kind):
    image = decode(encoded(SOLID, kind), PIXELS)
    assert (image.mode, image.size) == ("RGB", (40, 30))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no bytes"),
        (b"GIF89a", "no image|cannot be decoded"),
        (SVG, "no image"),
        (b"%PDF-1.7\n", "no image"),
        (encoded(SOLID, "BMP"), "no image"),
        (encoded(SOLID, "TIFF"), "no image"),
        (JPEG[: len(JPEG) // 2], "cannot be decoded"),
        (png(32_000, 32_000), "pixels"),
        (png(1, 2_000_000), "pixels"),
        (png(900, 900), "cannot be decoded"),
        (png(0, 5), "no image|cannot be decoded"),
    ],
    ids=["empty", "headless", "svg", "pdf", "bmp", "tiff", "truncated", "bomb", "line", "missing pixels", "no width"],
)  # fmt: skip
def test_a_file_that_is_no_sound_image_is_refused(data, reason):
    with pytest.raises(BadImage, match=reason):
        decode(data, PIXELS)


def test_an_image_has_its_first_frame_alone():
    frames = [Image.new("RGB", (8, 8), (red, 0, 0)) for red in (255, 0, 128)] * 50
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data, PIXELS).getpixel((0, 0)) == (255, 0, 0)


def test_a_picture_taken_sideways_stands_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(SOLID, "JPEG", exif=exif), PIXELS).size == (30, 40)


def test_transparent_pixels_are_white():
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert decode(encoded(clear, "PNG"), PIXELS).getpixel((1, 1)) == (255, 255, 255)


def test_a_picture_of_16_bits_of_grey_keeps_its_shades():
    shades = Image.fromarray(np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16))
    found = np.asarray(decode(encoded(shades, "PNG"), PIXELS))[..., 0].reshape(-1)
    assert found.tolist() == list(range(256))


def test_a_file_behind_an_image_changes_nothing():
    assert decode(JPEG + b"<script>alert(1)</script>" + SVG, PIXELS).tobytes() == decode(JPEG, PIXELS).tobytes()


def test_images_of_equal_bytes_and_another_shape_have_other_names():
    wide, high = Image.new("RGB", (150, 30)), Image.new("RGB", (30, 150))
    assert wide.tobytes() == high.tobytes()
    assert pixels_digest(wide, b"") != pixels_digest(high, b"")
    assert pixels_digest(wide, b"a") != pixels_digest(wide, b"b")
