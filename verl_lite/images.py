"""Decodes image files from untrusted sources, and converts PIL images of every mode to RGB. Images may come with any
dataset."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Accepted formats. PIL reads further ones with external programs or rarely tested code."""
MOST_PIXELS = 64 << 20
"""Largest accepted width x height. A file of a few kilobytes can contain an image that fills the memory."""

_DAMAGE = (OSError, SyntaxError, LookupError, TypeError, ArithmeticError, AttributeError, MemoryError, struct.error)
"""Errors that PIL raises for damaged files."""
_EXIF_DAMAGE = (SyntaxError, LookupError, TypeError, ValueError, ArithmeticError, struct.error)
"""Errors that PIL raises for damaged EXIF data."""
_WHITE = (255, 255, 255, 255)
_MOST_8_BIT, _MOST_16_BIT = 0xFF, 0xFFFF


def open_image(data: bytes) -> Image:
    """Returns the image (the first frame of an animation) as `rgb_image` converts it.

    Raises ValueError if the data are no image of `FORMATS`, are damaged, or have more than `MOST_PIXELS` pixels.
    """
    # not at the top, because runs without images do not need it
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return rgb_image(image)
    except Image.UnidentifiedImageError:
        raise ValueError(f"is no image in one of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:
        # PIL's own limit, which comes first
        raise ValueError(f"has more than the {MOST_PIXELS:,} pixels allowed ({error})") from None
    except _DAMAGE as error:
        raise ValueError(f"cannot be decoded ({error})") from error


def rgb_image(image: Image) -> Image:
    """Returns an image, or the current frame of an animation, in RGB.

    The image is rotated as its EXIF data say, unless they are damaged. Transparent parts become white, as in Qwen's own
    preprocessing. Values of 16 bits are scaled to 8 bits; see `_eight_bit` for 32 bits.

    Raises ValueError for more than `MOST_PIXELS` pixels, and for values whose range is unknown.
    """
    from PIL import Image, ImageOps

    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ValueError(f"has {width} x {height} pixels, more than the {MOST_PIXELS:,} allowed")

    try:
        upright = ImageOps.exif_transpose(image)
    except _EXIF_DAMAGE:
        # the pixels are readable without the metadata, and viewers show such images as they are stored
        upright = image
    if upright.mode in ("I", "F") or upright.mode.startswith("I;16"):
        upright = _eight_bit(upright)
    if not upright.has_transparency_data:
        return upright.convert("RGB")

    if upright.mode == "La":
        # the premultiplied grey, which PIL converts only to LA
        upright = upright.convert("LA")
    background = Image.new("RGBA", upright.size, _WHITE)
    return Image.alpha_composite(background, upright.convert("RGBA")).convert("RGB")


def _eight_bit(image: Image) -> Image:
    """Returns a grey image with 8 bits per pixel. PIL's own conversion sets all values above 255 to white.

    Modes I;16 have 16 bits. Mode I has 16 bits, as PIL reads files of 16 bits, or 8 bits if no value exceeds 255. Mode
    F ranges from 0 to 1, or to 255 if a value exceeds 1.

    Raises ValueError for values outside these ranges.
    """
    from PIL import Image

    values = np.asarray(image, dtype=np.float64)
    smallest = float(values.min(initial=0))
    largest = float(values.max(initial=0))
    if image.mode.startswith("I;16"):
        white = _MOST_16_BIT
    elif image.mode == "I" and largest > _MOST_8_BIT:
        white = _MOST_16_BIT
    elif image.mode == "F" and largest <= 1:
        white = 1
    else:
        white = _MOST_8_BIT
    # NaN fails every comparison, and is refused too
    if not 0 <= smallest <= largest <= white:
        raise ValueError(
            f"has values from {smallest:g} to {largest:g} in PIL's mode {image.mode}; expected 0 to {white}: convert "
            "it to 8 bits per channel"
        )
    scaled = np.rint(values * (_MOST_8_BIT / white))
    return Image.fromarray(scaled.astype(np.uint8))
