"""CIFAR-10: 50,000 + 10,000 colour images, 3x32x32, ten classes.

A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009. Read from the binary version only:
the Python version is a pickle, and opening a pickle runs whatever program is in it.
"""

import re
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from convoy.data.fetch import cache_folder, digest, download, sweep_stale
from convoy.data.images import Labelled, Splits, check_labels, splits
from convoy.errors import DataError

_PAGE = "https://www.cs.toronto.edu/~kriz/"
_ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as the dataset's page lists it
_FOLDER = "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_TEST = ("test_batch.bin",)
_PICKLED = ("cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1")
_SUMS = {"SHA256SUMS": "sha256", "MD5SUMS": "md5"}

_CLASSES = 10
_IMAGE_SHAPE = (3, 32, 32)
_ROW_BYTES = 1 + 3 * 32 * 32  # label, then the red, green and blue planes
_FILE_IMAGES = 10_000
_FILE_BYTES = _FILE_IMAGES * _ROW_BYTES


def load(data_dir: Path | None, dtype: torch.dtype) -> Splits:
    """CIFAR-10 from a folder; without one from the cache, downloading the archive if it is not there.

    The folder holds `cifar-10-batches-bin` or `cifar-10-binary.tar.gz` (then unpacked beside it), or is itself
    the folder of the six files. If `SHA256SUMS` or `MD5SUMS` stands beside the six, they must agree with it.

    Raises:
        DataError: a file is missing or damaged, or the download failed.
    """
    folder = _batches_folder(data_dir if data_dir is not None else _cache())
    missing = [name for name in _TRAIN + _TEST if not (folder / name).is_file()]
    if missing:
        raise DataError(
            f"{folder} lacks {', '.join(missing)}: CIFAR-10 is six binary files. Add them, or replace the folder by "
            f"{_ARCHIVE} from {_PAGE}, which Convoy unpacks"
        )
    _check_sums(folder)
    return splits("cifar10", _read(folder, _TRAIN), _read(folder, _TEST), dtype)


def unpack(archive: Path, md5: str) -> Path:
    """Unpack the six files beside their archive, all or none; gives their folder.

    Only members of exactly their names are read, so that no archive can write elsewhere.

    Raises:
        DataError: the archive is not the one with this checksum or lacks a file, or the folder cannot be written.
    """
    parent = archive.parent
    target = parent / _FOLDER
    try:
        met = digest(archive, "md5")
        if met != md5:
            raise DataError(
                f"{archive} has the md5 {met}, not {md5}: it is damaged or another file; delete it and fetch it again "
                f"from {_PAGE}{_ARCHIVE}"
            )
        sweep_stale(parent, f".{_FOLDER}.*")
        with tempfile.TemporaryDirectory(prefix=f".{_FOLDER}.", dir=parent) as scratch:
            # A folder inside: the outer one is private to this user, and what is shared should not be.
            fresh = Path(scratch) / _FOLDER
            fresh.mkdir()
            _extract(archive, fresh)
            _publish(fresh, target)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise DataError(
            f"cannot unpack {archive} into {parent} ({error}): unpack it elsewhere by hand "
            f"(tar xzf {_ARCHIVE}) and name that folder with --data-dir"
        ) from error
    return target


def _cache() -> Path:
    folder = cache_folder("cifar10")
    if not (folder / _FOLDER).is_dir() and not (folder / _ARCHIVE).is_file():
        download([_PAGE + _ARCHIVE], folder / _ARCHIVE, ARCHIVE_MD5)
    return folder


def _batches_folder(data_dir: Path) -> Path:
    if data_dir.name == _FOLDER or any((data_dir / name).is_file() for name in _TRAIN + _TEST):
        return data_dir
    if (data_dir / _FOLDER).is_dir():
        return data_dir / _FOLDER
    if (data_dir / _ARCHIVE).is_file():
        return unpack(data_dir / _ARCHIVE, ARCHIVE_MD5)
    pickled = [name for name in _PICKLED if (data_dir / name).exists()]
    hint = (
        f"; its {pickled[0]} is the Python version, a pickle, and opening one runs whatever program is in it"
        if pickled
        else ""
    )
    raise DataError(
        f"{data_dir} holds neither {_FOLDER} nor {_ARCHIVE}{hint}: put the binary version there, "
        f"{_PAGE}{_ARCHIVE}, or name no folder to download it"
    )


def _extract(archive: Path, into: Path) -> None:
    wanted = {f"{_FOLDER}/{name}": name for name in _TRAIN + _TEST}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            name = wanted.pop(member.name, None) if member.isreg() else None
            source = tar.extractfile(member) if name else None
            if name and source:
                with source, (into / name).open("xb") as file:
                    shutil.copyfileobj(source, file)
            if not wanted:
                return
    raise DataError(f"{archive} lacks {', '.join(sorted(wanted))}: it is not the binary version of CIFAR-10")


def _publish(fresh: Path, target: Path) -> None:
    try:
        fresh.rename(target)
    except OSError:
        # Another process of this machine was faster; what it unpacked is the same.
        if not target.is_dir():
            raise


def _read(folder: Path, names: tuple[str, ...]) -> Labelled:
    x_NCHW = np.empty((len(names) * _FILE_IMAGES, *_IMAGE_SHAPE), dtype=np.uint8)
    y_N = np.empty(len(x_NCHW), dtype=np.int64)
    for number, name in enumerate(names):
        rows = _rows(folder / name)
        here = slice(number * _FILE_IMAGES, (number + 1) * _FILE_IMAGES)
        y_N[here] = rows[:, 0]
        x_NCHW[here] = rows[:, 1:].reshape(-1, *_IMAGE_SHAPE)
    return torch.from_numpy(x_NCHW), torch.from_numpy(y_N)


def _rows(path: Path) -> npt.NDArray[np.uint8]:
    """Label and planes of each image, shape `(10000, 3073)`."""
    try:
        size_bytes = path.stat().st_size
        # The size first: a huge file is not worth reading to say that it is wrong.
        raw = np.fromfile(path, dtype=np.uint8) if size_bytes == _FILE_BYTES else None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}): check its permissions and its disk") from error
    if raw is None or raw.size != _FILE_BYTES:
        raise DataError(
            f"{path} holds {size_bytes} bytes; a CIFAR-10 file holds {_FILE_BYTES} ({_FILE_IMAGES} rows of 1 label and "
            f"{_ROW_BYTES - 1} pixels): it is cut short or another file; fetch it again"
        )
    rows = raw.reshape(_FILE_IMAGES, _ROW_BYTES)
    check_labels(path, rows[:, 0], _CLASSES)
    return rows


def _check_sums(folder: Path) -> None:
    for sums_name, algorithm in _SUMS.items():
        sums_path = folder / sums_name
        if not sums_path.is_file():
            continue
        listed = _listed_sums(sums_path)
        unlisted = [name for name in _TRAIN + _TEST if name not in listed]
        if unlisted:
            raise DataError(
                f"{sums_path} has no checksum of {', '.join(unlisted)}: write it anew in that folder "
                f"({algorithm}sum *.bin > {sums_name}), or remove it"
            )
        for name in _TRAIN + _TEST:
            met = digest(folder / name, algorithm)
            if met != listed[name]:
                raise DataError(
                    f"{folder / name} has the {algorithm} {met}, and {sums_name} says {listed[name]}: fetch the file "
                    f"again, or correct {sums_name} if the file is meant to be another one"
                )


def _listed_sums(path: Path) -> dict[str, str]:
    """Checksums by file name, from lines as `sha256sum` and `md5sum` write them."""
    listed = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        match = re.fullmatch(r"([0-9a-fA-F]+) [ *](?:\./)?(.+)", line)
        if match is None:
            raise DataError(f"{path}, line {number}: {line!r} is not '<checksum>  <file name>'; write the file anew")
        listed[match[2]] = match[1].lower()
    return listed
