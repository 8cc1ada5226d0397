"""The 1,797 handwritten digits inside scikit-learn: 1x8x8, ten classes, no download.

The last 360 are the test images: the digits come writer by writer, so these are mostly by people who wrote
none of the training digits, and the split depends on nothing but the order.
"""

from pathlib import Path

import numpy as np
import torch

from convoy.data.images import Splits, splits
from convoy.errors import InputError

TEST_IMAGES = 360
_INK_MAX = 16


def load(_data_dir: Path | None, dtype: torch.dtype) -> Splits:
    """All digits: 1,437 to train on, 360 to test on. The folder is not used.

    The ink of 0..16 is stored as the nearest of 0..255; the 17 values stay apart.

    Raises:
        InputError: scikit-learn is not installed.
    """
    try:
        # Here and not above: importing scikit-learn takes a second, and it is an optional extra.
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            f"the dataset digits ships inside scikit-learn, which cannot be imported ({error}): "
            "run pip install 'convoy-train[digits]', or choose another dataset"
        ) from error
    bunch = load_digits()
    x_NHW = np.rint(bunch.images * (255 / _INK_MAX)).astype(np.uint8)
    x_NCHW = torch.from_numpy(x_NHW).unsqueeze(1)
    y_N = torch.from_numpy(bunch.target.astype(np.int64))
    cut = len(y_N) - TEST_IMAGES
    return splits("digits", (x_NCHW[:cut], y_N[:cut]), (x_NCHW[cut:], y_N[cut:]), dtype)
