"""The 1,797 handwritten digits inside scikit-learn: 1x8x8, ten classes, no download.

The last 360 are the test images: the digits come writer by writer, so these are mostly by people who wrote
none of the training digits, and the split depends on nothing but the order.
"""

import importlib.util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from convoy.data.splits import Splits, splits
from convoy.errors import DataError, InputError

IMAGES = 1797
TEST_IMAGES = 360
_INK_MAX = 16


def load(_data_dir: Path | None, dtype: torch.dtype) -> Splits:
    """All digits: 1,437 to train on, 360 to test on. The folder is not used.

    The ink of 0..16 is stored as the nearest of 0..255; the 17 values stay apart.

    Raises:
        InputError: scikit-learn is not installed.
        DataError: its file is missing or damaged.
    """
    pixels_NF = _table()
    x_NHW = np.rint(pixels_NF[:, :-1].reshape(-1, 8, 8) * (255 / _INK_MAX)).astype(np.uint8)
    x_NCHW = torch.from_numpy(x_NHW).unsqueeze(1)
    y_N = torch.from_numpy(pixels_NF[:, -1].astype(np.int64))
    cut = len(y_N) - TEST_IMAGES
    return splits("digits", (x_NCHW[:cut], y_N[:cut]), (x_NCHW[cut:], y_N[cut:]), dtype)


def _table() -> npt.NDArray[np.float64]:
    """64 pixels and the label of each digit. The file is read where it lies: importing scikit-learn would take seconds."""
    package = importlib.util.find_spec("sklearn")
    folders = package.submodule_search_locations if package is not None else None
    if not folders:
        raise InputError(
            "the dataset digits ships inside scikit-learn, which is not installed: "
            "run pip install 'convoy-train[digits]', or choose another dataset"
        )
    path = Path(folders[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        table = np.loadtxt(path, delimiter=",")
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"cannot read {path}: {error}; reinstall scikit-learn (pip install --force-reinstall scikit-learn)"
        ) from None
    if table.shape != (IMAGES, 65):
        raise DataError(f"{path} holds a table of {table.shape}, expected ({IMAGES}, 65): reinstall scikit-learn")
    return table
