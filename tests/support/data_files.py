"""Made-up files in the formats of the data sets that tests read, and what tests say about errors and folders."""

import gzip
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convoy.data.cifar import Cifar

FASHION_FILES = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip


def assert_says(error: pytest.ExceptionInfo[BaseException], *parts: object) -> None:
    for part in parts:
        assert str(part) in str(error.value)


def content(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def linked(source: Path, target: Path, but: str) -> Path:
    """A folder of links to all files but one."""
    for path in source.iterdir():
        if path.name != but:
            (target / path.name).symlink_to(path)
    return target


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_fashion(folder: Path) -> None:
    """Files of Fashion-MNIST's names and shapes, three gzipped and one not: two pixels per image, one tells the label."""
    for part, images in (("train", 60_000), ("t10k", 10_000)):
        labels_N = (np.arange(images) % 10).astype(np.uint8)
        x_NHW = np.zeros((images, 28, 28), dtype=np.uint8)
        x_NHW[:, 0, 3] = labels_N
        x_NHW[:, 27, 0] = 255
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x_NHW), 1, mtime=0))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels_N), 1, mtime=0))
    plain = gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())
    (folder / "t10k-labels-idx1-ubyte").write_bytes(plain)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()


def write_cifar(kind: Cifar, folder: Path) -> None:
    """The binary files in full size: classes in turn, and three pixels that tell file, plane, row and column apart."""
    for number, name in enumerate(kind.files, start=1):
        images = kind.file_images if name in kind.train else 10_000
        rows = np.zeros((images, kind.label_bytes + 3072), dtype=np.uint8)
        rows[:, 0] = 77  # the coarse label, where there is one
        rows[:, kind.label_bytes - 1] = np.arange(images) % len(kind.class_names)
        rows[:, kind.label_bytes] = number
        rows[:, kind.label_bytes + 1024 + 5] = 100
        rows[:, kind.label_bytes + 2048 + 32] = 200
        rows.tofile(folder / name)


def write_images(root: Path, images: Mapping[str, Image.Image]) -> Path:
    """Images at these names below a folder; gives the folder."""
    for name, image in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / name)
    return root


def plain_image(colour: tuple[int, int, int] | int, width: int = 6, height: int = 4) -> Image.Image:
    """An image of one colour; of one grey where that is a number."""
    return Image.new("L" if isinstance(colour, int) else "RGB", (width, height), colour)
