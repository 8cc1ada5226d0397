"""A folder of images with a subfolder for each class: finds the images, holds some out for the test, reads them on demand.

::

    pets/train/cat/*.jpg    pets/train/dog/*.png    pets/val/cat/*.jpg   ...     training and test images apart
    pets/cat/*.jpg          pets/dog/*.png                                       the test images are held out

Beside `train` stands `val` or `test`; where both do, `val` is what is tested after each epoch. Where neither does, or
there is no `train`, a fraction of each class is held out, chosen by the images' names alone. Classes are the subfolders
in alphabetical order. Hidden files and files with other endings are passed over.

Images are ordered by a hash of their names, so that any first part is a fair sample of all classes.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from convoy.data.images import LOOKED_AT, Samples, measured_scale
from convoy.data.picture import read_file, survey, traits_of_file
from convoy.data.splits import TEST_FRACTION, Splits, fair_order, held_out
from convoy.errors import DataError, InputError

ENDINGS = (".jpg", ".jpeg", ".png")
_TESTS = ("val", "test")

Named = tuple[str, int]
"""An image's name relative to its root, "class/file", and its label."""


@dataclass(frozen=True)
class Listing:
    """The images of a folder.

    Attributes:
        root, test_root: the folders of the class folders, for training and for the test; they may be one.
        class_names: by label.
        train, test: the images in a fair order.
        split: how the test images were told from the others, for people.
    """

    root: Path
    test_root: Path
    class_names: tuple[str, ...]
    train: tuple[Named, ...]
    test: tuple[Named, ...]
    split: str


def list_folder(path: Path, test_fraction: float | None = None) -> Listing:
    """Find the images of a folder; opens none of them.

    Args:
        test_fraction: of each class, to hold out where the folder has no test images; None: `TEST_FRACTION`.

    Raises:
        InputError: a fraction is given where the folder has test images of its own.
        DataError: the folder is missing or laid out in another way, a class has no images, or none are left for the test.
    """
    root, test_root = _roots(path)
    classes = _subfolders(root)
    if len(classes) < 2:
        listed = f" ({', '.join(classes)})" if classes else ""
        raise DataError(
            f"{root} holds {len(classes) or 'no'} folder{'s' * (len(classes) != 1)}{listed}: a classifier wants "
            "two classes or more, a folder of images for each; name the folder above them"
        )
    images = [(name, label) for label, folder in enumerate(classes) for name in _images(root / folder)]
    if test_root is None:
        return _held_out(root, classes, images, TEST_FRACTION if test_fraction is None else test_fraction)
    if test_fraction is not None:
        raise InputError(
            f"--test-fraction {test_fraction:g}, but {test_root} holds the test images: leave the fraction out, or name {root}"
        )
    test_classes = _subfolders(test_root)
    if not test_classes:
        raise DataError(
            f"{test_root} holds no class folders: give it those of {root}, or remove it to hold out a fraction of them"
        )
    unknown = [name for name in test_classes if name not in classes]
    if unknown:
        raise DataError(
            f"{test_root} holds {', '.join(unknown)}, which {root} does not: a class that is tested must be trained; "
            "add training images, or remove it"
        )
    test = [(name, classes.index(folder)) for folder in test_classes for name in _images(test_root / folder)]
    return Listing(root, test_root, classes, _fair(images), _fair(test), f"tested on {test_root.name}")


def _held_out(root: Path, classes: tuple[str, ...], images: Sequence[Named], fraction: float) -> Listing:
    order = fair_order([name for name, _ in images])
    train, test = held_out(order, [label for _, label in images], fraction)
    if not test:
        raise DataError(
            f"{root}: {fraction:g} of each class leaves no images for the test; give a larger --test-fraction, or more images"
        )
    return Listing(
        root, root, classes, tuple(images[i] for i in train), tuple(images[i] for i in test),
        f"{fraction:.0%} of each class held out for the test",
    )  # fmt: skip


def _fair(images: Sequence[Named]) -> tuple[Named, ...]:
    return tuple(images[position] for position in fair_order([name for name, _ in images]))


def _roots(path: Path) -> tuple[Path, Path | None]:
    """Where the class folders are, for training and for the test."""
    tests = [path / name for name in _TESTS if os.path.isdir(path / name)]
    if os.path.isdir(path / "train"):
        return path / "train", tests[0] if tests else None
    if tests:
        raise DataError(
            f"{path} holds {tests[0].name} but no train: put the training images into {path / 'train'}, a folder for each "
            f"class; a class may not be called {tests[0].name}"
        )
    return path, None


def _subfolders(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."))
    except OSError as error:
        raise DataError(f"{folder} cannot be read ({error}): name a folder with a subfolder for each class") from error


def _images(folder: Path) -> list[str]:
    """The images of one class, "class/file", in alphabetical order."""
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.name[0] != ".")
    except OSError as error:
        raise DataError(f"{folder} cannot be read ({error}): check its permissions and its disk") from error
    images = [f"{folder.name}/{name}" for name in names if name.lower().endswith(ENDINGS)]
    if not images:
        raise DataError(
            f"{folder} holds no image ({', '.join(ENDINGS)}): every class folder holds one at least, in itself; add some, or "
            "remove the folder"
        )
    return images


# ------------------------------------------------------------------------------------------------ the images


@dataclass(frozen=True)
class Files:
    """Image files of one shape, by index.

    Attributes:
        names: relative to `root`.
        image_shape: `(C, H, W)` that every image has, or is resized to.
        resized: whether images are brought to that size; else another size is an error.
    """

    root: Path
    names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    resized: bool

    def __call__(self, index: int) -> torch.Tensor:
        """Pixels of one image, uint8 of `image_shape`.

        Raises:
            DataError: names the file that is damaged, or of another size.
        """
        path = self.root / self.names[index]
        channels, height, width = self.image_shape
        x_CHW = read_file(path, channels, height if self.resized else None)
        if x_CHW.shape != self.image_shape:
            raise DataError(
                f"{path} is {x_CHW.shape[2]} pixels wide and {x_CHW.shape[1]} high, others {width} and {height}: a net takes "
                f"images of one size; resize all of them, e.g. --image-size {min(height, width)}"
            )
        return x_CHW


def load_folder(
    path: Path, dtype: torch.dtype, image_size: int | None = None, test_fraction: float | None = None
) -> Splits:
    """Training and test images of a folder; see `folder` for how it may be laid out and `picture` for how images are read.

    Mean and deviation are those of the first `LOOKED_AT` training images, exactly. The images are grey if all of these are.

    Args:
        image_size: side in pixels of the square that every image is resized to; None: they have one size already.
        test_fraction: of each class, held out for the test where the folder has no test images; None: `TEST_FRACTION`.

    Raises:
        InputError: Pillow is missing, or a fraction is given where the folder has test images of its own.
        DataError: as `list_folder` says, or an image that was looked at cannot be used.
    """
    listing = list_folder(path, test_fraction)
    looked_at = [name for name, _ in listing.train[:LOOKED_AT]]
    channels, remarks = survey({name: traits_of_file(listing.root / name) for name in looked_at})
    if image_size is not None:
        shape = (channels, image_size, image_size)
    else:
        _, height, width = read_file(listing.root / looked_at[0], channels, None).shape
        shape = (channels, height, width)
    files = [
        Files(root, tuple(name for name, _ in images), shape, image_size is not None)
        for root, images in ((listing.root, listing.train), (listing.test_root, listing.test))
    ]
    scale = measured_scale(files[0], len(looked_at), dtype)
    train, test = (
        Samples(read, torch.tensor([label for _, label in images]), len(listing.class_names), shape, scale)
        for read, images in zip(files, (listing.train, listing.test), strict=True)
    )
    return Splits(
        name=str(path),
        train=train,
        test=test,
        class_names=listing.class_names,
        notes=(_found(listing), f"mean and deviation of {len(looked_at)} training images", *remarks),
    )


def _found(listing: Listing) -> str:
    counts = Counter(label for _, label in listing.train + listing.test)
    classes = ", ".join(f"{name} {counts[label]}" for label, name in enumerate(listing.class_names[:10]))
    more = ", ..." if len(listing.class_names) > 10 else ""
    return (
        f"{len(listing.class_names)} classes ({classes}{more}); {len(listing.train)} images to train on, "
        f"{len(listing.test)} to test on; {listing.split}"
    )
