"""Loads named data sets into memory: the digits of scikit-learn, and those that torchvision downloads.

CIFAR is read from its binary version, because the Python version, which torchvision reads, has pickles.
"""

import hashlib
import importlib.util
import os
import shutil
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from convoy.data.images import Labelled, Splits, in_memory
from convoy.errors import DataError, InputError
from convoy.files import cache_folder
from convoy.model.entry_points import import_package

CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_FILES = {"cifar10": CIFAR10_FILES, "cifar100": ("train.bin", "test.bin")}
_FOLDERS = {"fashion-mnist": "FashionMNIST/raw", "cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
_URLS = {
    "fashion-mnist": "https://github.com/zalandoresearch/fashion-mnist",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "cifar100": "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
}
_MD5 = {"cifar10": "c32a1d4ab5d03f1284b67883e8d87530", "cifar100": "03b5dce01913d631647c71ecec9e9cb8"}
TIMEOUT_S = 60.0  # for each answer of a server

FILE_ROWS = 10_000  # images in a file of CIFAR-10, and in the test file of CIFAR-100

_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def load_named(name: str, data_dir: Path | None, dtype: torch.dtype) -> Splits:
    """Return a data set from a folder; None: from the cache, after downloading missing files."""
    if name == "digits":
        return _digits(dtype)
    folder = cache_folder() / name if data_dir is None else data_dir
    files = _FILES.get(name, ())
    there = folder if any(os.path.isfile(folder / file) for file in files) else folder / _FOLDERS[name]
    if data_dir is not None and not os.path.isdir(there):
        met = f"holds no {_FOLDERS[name]}" if os.path.isdir(folder) else "is no folder"
        raise DataError(f"--data-dir {folder} {met}: unpack {_URLS[name]} there, or leave --data-dir out to download")
    try:
        if name == "fashion-mnist":
            mnist = import_package("torchvision.datasets", "images", f"--data {name}").FashionMNIST
            for file, md5 in mnist.resources if data_dir is None else ():
                if not os.path.isfile(there / file.removesuffix(".gz")):
                    _download(mnist.mirrors[0] + file, there, md5)
            parts = [mnist(folder, train, download=data_dir is None) for train in (True, False)]
            train, test = ((part.data[:, None], part.targets) for part in parts)
            return in_memory(name, train, test, dtype, parts[0].classes)
        if data_dir is None and not all(os.path.isfile(there / file) for file in files):
            utils = import_package("torchvision.datasets.utils", "images", f"to download --data {name}")
            _download(_URLS[name], folder, _MD5[name])
            utils.download_and_extract_archive(_URLS[name], folder, md5=_MD5[name])
    except InputError:
        raise
    except Exception as error:  # what urllib, tarfile, gzip or NumPy raise
        met = f"cannot load {name} from {there} ({error})"
        raise DataError(f"{met}: unpack {_URLS[name]} there, or name the folder with --data-dir") from error
    train, test = (_read_cifar(name, there, part) for part in (files[:-1], files[-1:]))
    class_names: Sequence[str] = _CIFAR10_CLASSES if name == "cifar10" else [str(label) for label in range(100)]
    if os.path.isfile(there / "fine_label_names.txt"):
        class_names = (there / "fine_label_names.txt").read_text().split()
    return in_memory(name, train, test, dtype, class_names)


def _download(url: str, folder: Path, md5: str) -> None:
    """Download a file with a time limit, which torchvision's download lacks. torchvision then checks and unpacks it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / url.rpartition("/")[2]
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as source, path.open("wb") as file:
        shutil.copyfileobj(source, file)
    with path.open("rb") as file:
        if hashlib.file_digest(file, "md5").hexdigest() != md5:
            raise OSError(f"{url} was not downloaded whole")


def _digits(dtype: torch.dtype) -> Splits:
    """Return the 1,797 handwritten digits, 1x8x8. The last 360, mostly by other writers, are the test images."""
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise InputError("digits ship inside scikit-learn, which is not installed: pip install 'convoy-train[digits]'")
    # Read the file directly: importing scikit-learn would take seconds.
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        table = np.loadtxt(path, delimiter=",").reshape(1797, 65)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}; run pip install --force-reinstall scikit-learn") from error
    x_NCHW = torch.from_numpy(np.rint(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8))
    y_N = torch.from_numpy(table[:, -1].astype(np.int64))
    return in_memory("digits", (x_NCHW[:-360], y_N[:-360]), (x_NCHW[-360:], y_N[-360:]), dtype, "0123456789")


def _read_cifar(name: str, folder: Path, files: Sequence[str]) -> Labelled:
    """Read binary files: rows of the label (for CIFAR-100 coarse, then fine) and the red, green and blue planes."""
    labels, classes = (1, 10) if name == "cifar10" else (2, 100)
    row_bytes, tables = labels + 3 * 32 * 32, []
    for path in (folder / file for file in files):
        try:
            raw = np.fromfile(path, dtype=np.uint8)
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error}): add it, or check its permissions and its disk"
            ) from error
        rows = 5 * FILE_ROWS if path.name == "train.bin" else FILE_ROWS
        if raw.size != rows * row_bytes or raw[labels - 1 :: row_bytes].max() >= classes:
            met = f"{path} holds {raw.size} bytes, not {rows} rows of {row_bytes} with labels below {classes}"
            raise DataError(f"{met}: it is damaged or another file; delete it, and fetch it again")
        tables.append(raw.reshape(rows, row_bytes))
    table = np.concatenate(tables)
    x_NCHW = np.ascontiguousarray(table[:, labels:]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(x_NCHW), torch.from_numpy(table[:, labels - 1].astype(np.int64))
