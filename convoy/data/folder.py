"""A folder of images, a subfolder for each class: what lies in it, and which images are for the test.

::

    pets/train/cat/*.jpg    pets/train/dog/*.png    pets/val/cat/*.jpg   ...     training and test images apart
    pets/cat/*.jpg          pets/dog/*.png                                       the test images are held out

Beside `train` stands `val` or `test`; where both do, `val` is what is tested after each epoch. Where neither does, or
there is no `train`, a fraction of each class is held out: which images, their names alone decide. Classes are the subfolders
in alphabetical order. Hidden files and files with other endings are passed over.

The order of the images is by a hash of their names, so that the first so many are a fair sample of all classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.data.splits import TEST_FRACTION, fair_order, held_out
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
        raise DataError(
            f"{root} holds {len(classes) or 'no'} folder{'s' * (len(classes) != 1)}{_brackets(classes)}: a classifier wants "
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
    tests = [path / name for name in _TESTS if (path / name).is_dir()]
    if (path / "train").is_dir():
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


def _brackets(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""
