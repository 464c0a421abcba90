"""Decodes image files from untrusted sources into PIL images. Images may come with any dataset."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Accepted formats. PIL reads further ones with external programs or rarely tested code."""
MOST_PIXELS = 64 << 20
"""Largest accepted width x height. A file of a few kilobytes can contain an image that fills the memory."""

_DAMAGE = (OSError, SyntaxError, LookupError, TypeError, ArithmeticError, AttributeError, MemoryError, struct.error)
"""Errors that PIL raises for damaged files."""


def open_image(data: bytes) -> Image:
    """Returns the image (the first frame of an animation) in RGB, rotated as its EXIF data says.

    Raises ValueError if the data are no image of `FORMATS`, are damaged, or have more than `MOST_PIXELS` pixels.
    """
    from PIL import Image, ImageOps  # not needed in runs without images

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ValueError(f"has {width} x {height} pixels, more than the {MOST_PIXELS:,} allowed")
            return ImageOps.exif_transpose(image).convert("RGB")
    except Image.UnidentifiedImageError:
        raise ValueError(f"is no image in one of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:  # PIL's own limit, which comes first
        raise ValueError(f"has more than the {MOST_PIXELS:,} pixels allowed ({error})") from None
    except _DAMAGE as error:
        raise ValueError(f"cannot be decoded ({error})") from error
