"""Write generated files in the formats of the data sets, and check errors and folders."""

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convoy.data.named import CIFAR10_FILES


def assert_says(error: pytest.ExceptionInfo[BaseException], *parts: object) -> None:
    for part in parts:
        assert str(part) in str(error.value)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes in the format of MNIST and Fashion-MNIST."""
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes())


def write_cifar10(folder: Path, images: int = 10_000) -> None:
    """Write binary files: classes in turn, and three pixels that encode file, plane, row and column."""
    for number, name in enumerate(CIFAR10_FILES, start=1):
        rows = np.zeros((images, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(images) % 10
        rows[:, 1] = number
        rows[:, 1 + 1024 + 5] = 100
        rows[:, 1 + 2048 + 32] = 200
        rows.tofile(folder / name)


def write_images(root: Path, images: Mapping[str, Image.Image]) -> Path:
    """Write images at these names below a folder; return the folder."""
    for name, image in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / name)
    return root


def plain_image(colour: tuple[int, int, int] | int, width: int = 6, height: int = 4) -> Image.Image:
    """Return an image of one colour, or of one grey for a number."""
    return Image.new("L" if isinstance(colour, int) else "RGB", (width, height), colour)
