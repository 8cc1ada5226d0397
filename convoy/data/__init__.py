"""Loads training images: named data sets into memory, folders of images and the user's data sets sample by sample."""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.errors import InputError, unknown_name
from convoy.model.entry_points import call, find_callable, import_package, names_callable

if TYPE_CHECKING:  # names are checked, and devices started, before torch is imported
    import torch

    from convoy.data.boxed import BoxedImage, open_image
    from convoy.data.datasets import from_datasets
    from convoy.data.images import Images, Samples, Splits

__all__ = [
    "FETCHED", "NAMES", "BoxedImage", "Images", "Samples", "Splits", "check", "folder_of", "from_datasets", "load", "open_image"
]  # fmt: skip

_HOMES = {
    "BoxedImage": "boxed", "open_image": "boxed", "Images": "images", "Samples": "images", "Splits": "images",
    "from_datasets": "datasets",
}  # fmt: skip

FETCHED = ("fashion-mnist", "cifar10", "cifar100")  # downloaded if no folder is named

NAMES = ("digits", *FETCHED)

_FOLDER = "folder:"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'convoy.data' has no attribute {name!r}")
    return getattr(import_module(f"convoy.data.{_HOMES[name]}"), name)


def load(
    data: str,
    data_dir: Path | None = None,
    *,
    dtype: "torch.dtype | None" = None,
    image_size: int | None = None,
    test_fraction: float | None = None,
) -> "Splits":
    """Return the training and test images of one data set.

    Args:
        data: one of `NAMES`, `folder:PATH` or a path, or `module:function`.
        data_dir: for a named data set, the folder of its files; None: they are downloaded to `$XDG_CACHE_HOME/convoy/<name>`.
        dtype: of the normalised images: float32 (also for None) or float64.
        image_size: for a folder of images, resize each to a square with sides of this many pixels; None: all have one size.
        test_fraction: fraction of each class to hold out if there are no test images; None: 0.2.

    Raises:
        InputError: as `check`; an unknown dtype; scikit-learn or torchvision is missing or does not import.
        DataError: files are missing, damaged or in another format, or samples cannot be used.
    """
    import torch

    check(data, data_dir, image_size, test_fraction)
    dtype, folder = dtype or torch.float32, folder_of(data)
    if folder is not None:
        import_package("torchvision", "images", f"--data {data}")
        from convoy.data.folder import load_folder

        return load_folder(folder, dtype, image_size, test_fraction)
    if names_callable(data):
        from convoy.data.datasets import from_datasets

        wanted = "a function that takes nothing and returns a data set, or two: to train and to test on"
        given = call(data, find_callable(data, wanted))
        train, test = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        return from_datasets(train, test, name=data, dtype=dtype, test_fraction=test_fraction)
    from convoy.data.named import load_named

    return load_named(data, data_dir, dtype)


def check(
    data: str, data_dir: Path | None = None, image_size: int | None = None, test_fraction: float | None = None
) -> None:
    """Raise InputError for arguments that `load` would refuse, without reading files."""
    if not data.removeprefix(_FOLDER).strip():
        raise InputError(f"--data {data!r}: name a data set ({', '.join(NAMES)}), folder:PATH or module:function")
    named, folder = data in NAMES, folder_of(data)
    if not named and folder is None and not names_callable(data):
        raise unknown_name("data set", data, (*NAMES, "folder:PATH", "module:function"))
    for option, given, fits, rule in (
        ("--data-dir", data_dir, named, "only the data sets by name have files of their own there; leave it out"),
        ("--image-size", image_size, folder is not None, "only images of a folder are resized; leave it out"),
        ("--image-size", image_size, (image_size or 0) >= 1, "give a side of 1 pixel or more"),
        ("--test-fraction", test_fraction, not named, "this data set has test images of its own; leave it out"),
        ("--test-fraction", test_fraction, 0 < (test_fraction or 0) < 1, "give a fraction between 0 and 1, e.g. 0.2"),
    ):
        if given is not None and not fits:
            raise InputError(f"{option} {given} with --data {data}: {rule}")


def folder_of(data: str) -> Path | None:
    """Return the folder that `data` names; None if it names a data set or a function."""
    if data.startswith(_FOLDER):
        return Path(data.removeprefix(_FOLDER)).expanduser()
    if data not in NAMES and (os.sep in data or os.path.isdir(data)):
        return Path(data)
    return None
