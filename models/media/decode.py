"""Decodes an image file, by Pillow, within bounds that are checked before any pixel is decoded."""

import io
import warnings
from hashlib import sha256
from typing import Any

import numpy as np

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_WHITE = (255, 255, 255, 255)
_CLEAR = ("RGBA", "LA", "PA")


class BadImage(Exception):
    """The file is at fault; the text is fit for clients."""


def decode(data: bytes, max_pixels: int) -> Any:
    """The image as RGB, upright, its first frame, on white where it is transparent.

    Args:
        max_pixels: known from the header: an image with more is not decoded.

    Raises:
        BadImage: no image of a format that is taken, too large, cut short or damaged.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise BadImage("it has no bytes")
    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > max_pixels:
                raise BadImage(f"it has {width} x {height} pixels, at most {max_pixels} are taken")
            image.load()
            return _on_white(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        raise BadImage(f"it is no image of a format that is taken ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImage(f"it has more pixels than are taken ({max_pixels})") from None
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # decoders raise anything for damaged files
        raise BadImage(f"it cannot be decoded ({type(error).__name__})") from None


def pixels_digest(image: Any, options: bytes) -> bytes:
    """SHA-256 of what the processor sees: mode, size, pixels, and the processor's own settings."""
    head = f"{image.mode} {image.width} {image.height} {len(options)} ".encode()
    return sha256(head + options + image.tobytes()).digest()


def _on_white(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255: almost all of them white
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in _CLEAR or "transparency" in image.info:
        clear = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", clear.size, _WHITE), clear)
    return image.convert("RGB")
