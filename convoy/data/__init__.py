"""Images to train on: digits, Fashion-MNIST and CIFAR-10, held in memory.

::

    splits = load("digits")
    x_NCHW, y_N = splits.train.__getitems__([4, 8, 15])

| name            | images          | where they come from                                             |
|-----------------|-----------------|------------------------------------------------------------------|
| `digits`        | 1,797 of 1x8x8  | inside scikit-learn (`pip install 'convoy-train[digits]'`)       |
| `fashion-mnist` | 70,000 of 1x28x28 | four gzipped IDX files: a folder, Debian's package, or download |
| `cifar10`       | 60,000 of 3x32x32 | six binary files or their archive: a folder, or download        |

A folder that you name is only read; an archive that lies in it is unpacked there. The network is used only
when no folder is named, and then the files go to `$XDG_CACHE_HOME/convoy/<name>` (`~/.cache` by default).
"""

from collections.abc import Callable
from pathlib import Path

import torch

from convoy.data import cifar10, digits, fashion_mnist
from convoy.data.images import Images, Splits
from convoy.errors import DataError, unknown_name

__all__ = ["NAMES", "Images", "Splits", "load"]

_LOADERS: dict[str, Callable[[Path | None, torch.dtype], Splits]] = {
    "digits": digits.load,
    "fashion-mnist": fashion_mnist.load,
    "cifar10": cifar10.load,
}

NAMES = tuple(_LOADERS)


def load(name: str, data_dir: Path | None = None, *, dtype: torch.dtype = torch.float32) -> Splits:
    """The training and test images of one dataset.

    Args:
        name: one of `NAMES`.
        data_dir: folder that holds the files; nothing is downloaded then. `digits` needs no files and reads none.
        dtype: of the normalised images, float32 or float64.

    Raises:
        InputError: an unknown name or dtype, or scikit-learn is missing.
        DataError: the folder, or files in it, are missing or damaged, or a download failed.
    """
    if name not in _LOADERS:
        raise unknown_name("dataset", name, _LOADERS)
    if data_dir is not None and not data_dir.is_dir():
        met = "is not a folder" if data_dir.exists() else "does not exist"
        raise DataError(f"data folder {data_dir} {met}: --data-dir wants the folder that holds the {name} files")
    return _LOADERS[name](data_dir, dtype)
