"""Loads images to train on: data sets by name, folders of images, data sets of one's own.

::

    splits = load("digits")
    x_NCHW, y_N = splits.train.__getitems__([4, 8, 15])

| data              | images            | where they come from                                             |
|-------------------|-------------------|------------------------------------------------------------------|
| `digits`          | 1,797 of 1x8x8    | inside scikit-learn (`pip install 'convoy-train[digits]'`)       |
| `fashion-mnist`   | 70,000 of 1x28x28 | four gzipped IDX files: a folder, Debian's package, or download  |
| `cifar10`         | 60,000 of 3x32x32 | six binary files or their archive: a folder, or download         |
| `cifar100`        | 60,000 of 3x32x32 | two binary files or their archive: a folder, or download         |
| `folder:PATH`     | JPEG and PNG      | a folder per class, see `folder`; a path without `folder:` too   |
| `module:function` | your own          | data sets that the function returns, see `datasets`              |

The named ones are held in memory, the others are read when they are wanted. A folder that you name is only read; an archive
that lies in it is unpacked there. The network is used only for the named ones when no folder is named, and then the files go
to `$XDG_CACHE_HOME/convoy/<name>` (`~/.cache` by default).
"""

import os
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convoy.errors import DataError, InputError, unknown_name
from convoy.model.entry_points import call, find_callable, names_callable

if TYPE_CHECKING:  # names are checked, and devices started, before torch is imported
    import torch

    from convoy.data.datasets import from_datasets
    from convoy.data.images import Images, Samples
    from convoy.data.splits import Splits

__all__ = ["FETCHED", "NAMES", "Images", "Samples", "Splits", "check", "folder_of", "from_datasets", "load"]

_HOMES = {
    "Images": "convoy.data.images",
    "Samples": "convoy.data.images",
    "Splits": "convoy.data.splits",
    "from_datasets": "convoy.data.datasets",
}

_LOADERS = {
    "digits": ("convoy.data.digits", "load"),
    "fashion-mnist": ("convoy.data.fashion_mnist", "load"),
    "cifar10": ("convoy.data.cifar", "CIFAR10.load"),
    "cifar100": ("convoy.data.cifar", "CIFAR100.load"),
}
"""Of each data set by name, the module and the function in it: (data_dir, dtype) -> Splits."""

NAMES = tuple(_LOADERS)

FETCHED = tuple(name for name in NAMES if name != "digits")
"""Those that are downloaded, where no folder is named."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'convoy.data' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


_FOLDER = "folder:"
_WANTED = "a function that takes nothing and returns a data set, or two: to train and to test on"


def load(
    data: str,
    data_dir: Path | None = None,
    *,
    dtype: "torch.dtype | None" = None,
    image_size: int | None = None,
    test_fraction: float | None = None,
) -> "Splits":
    """The training and test images of one data set.

    Args:
        data: one of `NAMES`, `folder:PATH` or a path, or `module:function`.
        data_dir: for a named one, the folder that holds its files; nothing is downloaded then. `digits` reads none.
        dtype: of the normalised images, float32 (None: that) or float64.
        image_size: for a folder of images, the side in pixels of the square that each is resized to; None: all have one size.
        test_fraction: of each class, held out where there are no test images; None: `splits.TEST_FRACTION`.

    Raises:
        InputError: as `check`; an unknown dtype; scikit-learn or Pillow is missing.
        DataError: folders or files are missing, damaged or laid out in another way; samples that cannot be used; a download
            failed.
    """
    import torch

    from convoy.data.datasets import from_datasets
    from convoy.data.folder import load_folder

    check(data, data_dir, image_size, test_fraction)
    dtype = torch.float32 if dtype is None else dtype
    if (folder := folder_of(data)) is not None:
        return load_folder(folder, dtype, image_size, test_fraction)
    if names_callable(data):
        given = call(data, find_callable(data, _WANTED))
        train, test = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        return from_datasets(train, test, name=data, dtype=dtype, test_fraction=test_fraction)
    if data_dir is not None and not os.path.isdir(data_dir):
        met = "is not a folder" if os.path.exists(data_dir) else "does not exist"
        raise DataError(f"data folder {data_dir} {met}: --data-dir wants the folder that holds the {data} files")
    module, function = _LOADERS[data]
    made: Splits = attrgetter(function)(import_module(module))(data_dir, dtype)
    return made


def check(
    data: str, data_dir: Path | None = None, image_size: int | None = None, test_fraction: float | None = None
) -> None:
    """Refuse what `load` would refuse without reading anything.

    Raises:
        InputError: an unknown name, or an option that does not fit the data or its range.
    """
    if not data.removeprefix(_FOLDER).strip():
        raise InputError(f"--data {data!r}: name a data set ({', '.join(NAMES)}), folder:PATH or module:function")
    named, folder = data in NAMES, folder_of(data)
    if not named and folder is None and not names_callable(data):
        raise unknown_name("data set", data, (*NAMES, "folder:PATH", "module:function"))
    for option, given, fits, rule in (
        ("--data-dir", data_dir, named, "only the data sets by name have files of their own there"),
        ("--image-size", image_size, folder is not None, "only images of a folder are resized"),
        ("--test-fraction", test_fraction, not named, "this data set has test images of its own"),
    ):
        if given is not None and not fits:
            raise InputError(f"{option} {given} with --data {data}: {rule}; leave {option} out")
    if image_size is not None and image_size < 1:
        raise InputError(f"--image-size {image_size}: give a side of 1 pixel or more")
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise InputError(f"--test-fraction {test_fraction:g}: give a fraction between 0 and 1, e.g. 0.2")


def folder_of(data: str) -> Path | None:
    """The folder that `data` names, or None where it names something else: a data set's name goes before a folder's."""
    if data.startswith(_FOLDER):
        return Path(data.removeprefix(_FOLDER)).expanduser()
    if data not in NAMES and (os.sep in data or os.path.isdir(data)):
        return Path(data)
    return None
