"""Fashion-MNIST: 60,000 + 10,000 grey images of clothes, 1x28x28, ten classes (MIT licence).

H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning
algorithms", 2017. Four IDX files, each gzipped or not. MNIST comes in files of the same names and shapes.
"""

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from convoy.data.fetch import cache_folder, download
from convoy.data.images import Labelled, check_labels
from convoy.data.splits import Splits, splits
from convoy.errors import DataError

# Checksums of the authors' files, as github.com/zalandoresearch/fashion-mnist and torchvision list them. They guard
# downloads only: Debian compresses the same bytes anew.
_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
_MIRRORS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
_DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_CLASS_NAMES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_SIDE = 28
_UINT8 = 0x08


def load(data_dir: Path | None, dtype: torch.dtype) -> Splits:
    """Fashion-MNIST from a folder; without one from Debian's package, else from the cache, downloading what it lacks.

    Raises:
        DataError: a file is missing or damaged, or a download failed.
    """
    folder = data_dir if data_dir is not None else _folder_of_this_machine()
    missing = _missing(folder)
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(missing)}: Fashion-MNIST is four IDX files, gzipped or not. Put them there "
            f"(from {_MIRRORS[0]}; on Debian: apt install dataset-fashion-mnist), or name no folder to download them"
        )
    train = _read(folder, "train", images=60_000)
    test = _read(folder, "t10k", images=10_000)
    return splits("fashion-mnist", train, test, dtype, _CLASS_NAMES)


def read_idx(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """The bytes of one IDX file, gzipped if its name ends in `.gz`.

    IDX: two zero bytes, the type (8: unsigned byte), the number of axes, each extent as a big-endian 32-bit
    number, then the values, last axis fastest.

    Raises:
        DataError: unreadable, damaged, or not of this shape.
    """
    header_bytes = 4 + 4 * len(shape)
    expected_bytes = header_bytes + math.prod(shape)
    # One byte more than expected: it shows a longer file, and reading to the end makes gzip check its checksum.
    raw = _content(path, limit_bytes=expected_bytes + 1)
    _check_header(path, raw[:header_bytes], shape)
    if len(raw) != expected_bytes:
        met = "more" if len(raw) > expected_bytes else f"{len(raw)}"
        raise _damaged(path, f"holds {met} bytes where {expected_bytes} belong (header and {_by(shape)} values)")
    return np.frombuffer(raw, dtype=np.uint8, offset=header_bytes).reshape(shape).copy()


def _folder_of_this_machine() -> Path:
    if not _missing(_DEBIAN_FOLDER):
        return _DEBIAN_FOLDER
    folder = cache_folder("fashion-mnist")
    for name in _missing(folder):
        download([mirror + name for mirror in _MIRRORS], folder / name, _MD5[name])
    return folder


def _missing(folder: Path) -> list[str]:
    return [name for name in _MD5 if not os.path.isfile(_path(folder, name))]


def _path(folder: Path, name: str) -> Path:
    """The gzipped file if it is there, for it carries a checksum; else the plain one."""
    gzipped = folder / name
    return gzipped if os.path.isfile(gzipped) else gzipped.with_suffix("")


def _read(folder: Path, part: str, images: int) -> Labelled:
    x_NHW = read_idx(_path(folder, f"{part}-images-idx3-ubyte.gz"), (images, _SIDE, _SIDE))
    labels_path = _path(folder, f"{part}-labels-idx1-ubyte.gz")
    labels_N = read_idx(labels_path, (images,))
    check_labels(labels_path, labels_N, len(_CLASS_NAMES))
    return torch.from_numpy(x_NHW).unsqueeze(1), torch.from_numpy(labels_N.astype(np.int64))


def _content(path: Path, limit_bytes: int) -> bytes:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(limit_bytes)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: put the file there") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _damaged(path, f"is no whole gzip file ({error})") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}): check its permissions and its disk") from error


def _check_header(path: Path, header: bytes, shape: tuple[int, ...]) -> None:
    magic = bytes([0, 0, _UINT8, len(shape)])
    if header[:4] != magic:
        met = header[:4].hex(" ") or "nothing"
        raise _damaged(path, f"begins with {met}, not with {magic.hex(' ')} (IDX, bytes, {len(shape)} axes)")
    extents_bytes = header[4:]
    if len(extents_bytes) != 4 * len(shape):
        raise _damaged(path, f"ends inside its header, after {len(header)} bytes")
    extents = struct.unpack(f">{len(shape)}I", extents_bytes)
    if extents != shape:
        raise _damaged(path, f"has the shape {_by(extents)}, not {_by(shape)}")


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}: the file is damaged or another one; delete it and fetch it again")


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
