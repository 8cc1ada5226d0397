"""Loads a folder of images with a subfolder per class, with torchvision's `ImageFolder`.

Test images are in `val`, or else `test`, next to `train`; otherwise some images are held out. Images are ordered by a hash of
their names, so that the first N are a random sample of all classes.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from convoy.data.images import Samples, Splits, fair_order, grey_or_rgb, when_needed
from convoy.errors import DataError, InputError
from convoy.files import open_regular


def load_folder(path: Path, dtype: torch.dtype, image_size: int | None, test_fraction: float | None) -> Splits:
    """Return the training and test images of a folder; arguments and errors as for `convoy.data.load`."""
    root = path / "train" if os.path.isdir(path / "train") else path
    test_root = next((path / name for name in ("val", "test") if os.path.isdir(path / name)), None)
    if test_root is not None and test_fraction is not None:
        raise InputError(
            f"--test-fraction {test_fraction:g}, but {test_root} holds the test images: leave the fraction out"
        )
    if test_root is not None and root == path:
        raise DataError(f"{path} holds {test_root.name} but no train: put the training images into {path / 'train'}")
    found = _images(root, image_size)
    train = _samples(found, found.classes, str(path), dtype)
    test = None if test_root is None else _samples(_images(test_root, image_size), found.classes, str(path), dtype)
    return when_needed(train, test, range(len(train)), found.classes, test_fraction)


def _images(root: Path, size: int | None) -> ImageFolder:
    def wanted(path: str) -> bool:
        return "/." not in path.removeprefix(str(root)) and path.lower().endswith(IMG_EXTENSIONS)

    resize = v2.Compose([v2.Resize(size), v2.CenterCrop(size)]) if size is not None else None
    try:
        return ImageFolder(root, resize, loader=partial(_open, size=size), is_valid_file=wanted)
    except OSError as error:  # torchvision names the classes without images
        raise DataError(f"{root}: {error}; give a folder of images for each class, and remove other folders") from error


def _samples(found: ImageFolder, classes: Sequence[str], name: str, dtype: torch.dtype) -> Samples:
    """Return the images ordered by hash, with labels numbered by the classes of the training images."""
    if len(classes) < 2 or set(found.classes) - set(classes):
        met = f"{found.root} has the classes {', '.join(found.classes)}, trained are {', '.join(classes)}"
        raise DataError(f"{met}: train two or more, and each that is tested")
    known = [classes.index(each) for each in found.classes]
    found.target_transform = known.__getitem__
    order = fair_order([os.path.relpath(path, found.root) for path, _ in found.samples])
    labels = torch.tensor([known[label] for label in found.targets])
    return Samples(found, order, labels[order], len(classes), name, dtype=dtype)


def _open(path: str, size: int | None) -> Image.Image:
    """Return an image in grey or RGB, rotated as its EXIF data say."""
    try:
        with open_regular(Path(path)) as file, Image.open(file) as image:
            if size is not None:
                image.draft(None, (2 * size, 2 * size))  # decodes a large JPEG at a half, a quarter or an eighth
            upright = ImageOps.exif_transpose(image)
    except Exception as error:  # Pillow's decoders raise nearly everything at damaged files
        raise DataError(f"{path} cannot be read as an image ({error}): replace or remove it") from error
    grey: Image.Image = grey_or_rgb(upright, path)
    return grey
