"""Decodes a picture, from a file or a PIL image, to bytes with a given number of channels and a given size.

Pillow is imported when the first picture is read. Rules, whatever the file holds:

- Colours and palettes become RGB. Grey among colours becomes RGB of three equal channels.
- Of 16 bits the upper 8 are kept.
- Transparent pixels are composited on white.
- A photograph that says by EXIF which way is up is turned.
- Resized, the shorter side fits and the middle of the longer one is kept (bilinear, smoothed where it shrinks).
"""

import struct
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from convoy.errors import DataError, InputError
from convoy.files import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_GREY = ("1", "L", "LA", "La", *_SIXTEEN_BITS)
_NOT_PIXELS = ("I", "F")
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
"""What Pillow's decoders raise at files that are cut short or damaged."""

_RULES = {
    "grey": "read as RGB of equal channels",
    "of 16 bits": "the upper 8 are kept",
    "partly transparent": "laid on white",
}


def is_picture(x: object) -> "TypeGuard[Image]":
    """Whether this is a PIL image. Does not import Pillow: where nothing has, nothing is one."""
    module: Any = sys.modules.get("PIL.Image")
    return module is not None and isinstance(x, module.Image)


def traits(image: "Image") -> tuple[str, ...]:
    """Unusual properties of a picture, in words, from its header."""
    met = {
        "grey": image.mode in _GREY,
        "of 16 bits": image.mode in _SIXTEEN_BITS,
        "partly transparent": image.has_transparency_data,
    }
    return tuple(trait for trait, holds in met.items() if holds)


def traits_of_file(path: Path) -> tuple[str, ...]:
    """`traits` of an image file.

    Raises:
        InputError: Pillow is not installed.
        DataError: the file is no image that can be read.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            "image files are read by Pillow, which is not installed: run pip install 'convoy-train[images]'"
        ) from None
    try:
        with open_regular(path) as file, Image.open(file) as image:
            return traits(image)
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise _damaged(path, error) from error


def survey(met: Mapping[str, tuple[str, ...]]) -> tuple[int, tuple[str, ...]]:
    """Choose the number of channels for pictures with these traits, and describe the traits.

    Args:
        met: the traits of some pictures, by name.

    Returns:
        1 where all are grey, else 3; one line for each trait that was met.
    """
    all_grey = all("grey" in each for each in met.values())
    notes = []
    for trait, rule in _RULES.items():
        names = [name for name, each in met.items() if trait in each]
        if names:
            done = "read as one channel" if all_grey and trait == "grey" else rule
            notes.append(f"{len(names)} of {len(met)} training images looked at are {trait}, first {names[0]}: {done}")
    return 1 if all_grey else 3, tuple(notes)


def read_file(path: Path, channels: int, side: int | None) -> torch.Tensor:
    """The pixels of an image file, uint8 of shape `(channels, H, W)`; see `pixels`.

    Raises:
        DataError: the file is damaged, missing or no image, or as `pixels` says; names the file.
    """
    from PIL import Image, ImageOps

    try:
        with open_regular(path) as file, Image.open(file) as image:
            if side is not None:
                # A large JPEG is decoded at a half, a quarter or an eighth, still twice as large as wanted.
                image.draft(None, (2 * side, 2 * side))
            ImageOps.exif_transpose(image, in_place=True)
            return pixels(image, str(path), channels, side)
    except DataError:
        raise
    except (*_BROKEN, Image.DecompressionBombError) as error:
        raise _damaged(path, error) from error


def pixels(image: "Image", what: str, channels: int, side: int | None = None) -> torch.Tensor:
    """A PIL image as uint8 of shape `(channels, H, W)`.

    Args:
        what: names the image in errors.
        channels: 1 for grey, 3 for colour.
        side: height and width to resize to; None: as it is.

    Raises:
        DataError: a colour image where grey is wanted, or values that are no pixels.
    """
    from PIL import Image, ImageOps

    if image.mode in _NOT_PIXELS:
        raise DataError(
            f"{what} holds numbers of 32 bits (mode {image.mode}): images have 8 or 16 bits per channel; "
            "convert it, so that its range is yours to choose"
        )
    if channels == 1 and image.mode not in _GREY:
        raise DataError(
            f"{what} is in colour (mode {image.mode}), and all images that were looked at are grey: convert it to grey, "
            "or the others to colour"
        )
    if image.mode in _SIXTEEN_BITS:
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    image = image.convert("L" if channels == 1 else "RGB")
    if side is not None:
        image = ImageOps.fit(image, (side, side), method=Image.Resampling.BILINEAR)
    x_HWC = torch.from_numpy(np.array(image)).reshape(image.height, image.width, channels)
    return x_HWC.permute(2, 0, 1).contiguous()


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read as an image ({error}): it is damaged, cut short or of another kind; "
        "replace it by a whole JPEG or PNG, or remove it"
    )
