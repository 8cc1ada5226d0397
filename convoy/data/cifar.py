"""CIFAR-10 and CIFAR-100: 50,000 + 10,000 colour images each, 3x32x32, of ten or a hundred classes.

A. Krizhevsky, "Learning multiple layers of features from tiny images", 2009. Read from the binary versions only:
the Python versions are pickles, and opening a pickle runs whatever program is in it.
"""

import os
import shutil
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from convoy.data.fetch import cache_folder, check_sums, digest, download, sweep_stale
from convoy.data.images import Labelled, check_labels
from convoy.data.splits import Splits, splits
from convoy.errors import DataError

_IMAGE_SHAPE = (3, 32, 32)
_PIXELS_BYTES = 3 * 32 * 32  # the red, green and blue planes


@dataclass(frozen=True)
class Cifar:
    """The files of one of the two.

    Attributes:
        name: for `convoy.data.load`; title: for people.
        page: where the archive is offered.
        archive, md5: its name and its checksum as the dataset's page lists it.
        folder: inside the archive.
        train, test: file names.
        file_images: images in each training file; a test file has 10,000.
        label_bytes: before the pixels of each image; the last of them is the class.
        class_names: by label.
        pickled: names by which the Python version is known.
    """

    name: str
    title: str
    archive: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    file_images: int
    label_bytes: int
    class_names: tuple[str, ...]
    pickled: tuple[str, ...]
    page: str = "https://www.cs.toronto.edu/~kriz/"

    @property
    def files(self) -> tuple[str, ...]:
        return self.train + self.test

    def load(self, data_dir: Path | None, dtype: torch.dtype) -> Splits:
        """Load from a folder; without one from the cache, downloading the archive if it is not there.

        The folder holds the archive's folder or the archive (then unpacked beside it), or is itself the folder of the
        binary files. If `SHA256SUMS` or `MD5SUMS` stands beside the files, they must agree with it.

        Raises:
            DataError: a file is missing or damaged, or the download failed.
        """
        if data_dir is None:
            data_dir = cache_folder(self.name)
            if not os.path.isdir(data_dir / self.folder) and not os.path.isfile(data_dir / self.archive):
                download([self.page + self.archive], data_dir / self.archive, self.md5)
        folder = self._binary_folder(data_dir)
        missing = [name for name in self.files if not os.path.isfile(folder / name)]
        if missing:
            raise DataError(
                f"{folder} lacks {', '.join(missing)}: {self.title} is {len(self.files)} binary files. Add them, or "
                f"replace the folder by {self.archive} from {self.page}, which Convoy unpacks"
            )
        check_sums(folder, self.files)
        train, test = (
            self._read(folder, names, images) for names, images in ((self.train, self.file_images), (self.test, 10_000))
        )
        return splits(self.name, train, test, dtype, self.class_names)

    def unpack(self, archive: Path) -> Path:
        """Unpack the binary files beside their archive, all or none; gives their folder.

        Only members of exactly their names are read, so that no archive can write elsewhere.

        Raises:
            DataError: the archive has another checksum or lacks a file, or the folder cannot be written.
        """
        parent = archive.parent
        target = parent / self.folder
        try:
            met = digest(archive, "md5")
            if met != self.md5:
                raise DataError(
                    f"{archive} has the md5 {met}, not {self.md5}: it is damaged or another file; delete it and fetch "
                    f"it again from {self.page}{self.archive}"
                )
            sweep_stale(parent, f".{self.folder}.*")
            with tempfile.TemporaryDirectory(prefix=f".{self.folder}.", dir=parent) as scratch:
                # A folder inside: the outer one is private to this user, and what is shared should not be.
                fresh = Path(scratch) / self.folder
                fresh.mkdir()
                self._extract(archive, fresh)
                try:
                    fresh.rename(target)
                except OSError:
                    # Another process of this machine was faster; what it unpacked is the same.
                    if not os.path.isdir(target):
                        raise
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            raise DataError(
                f"cannot unpack {archive} into {parent} ({error}): unpack it elsewhere by hand "
                f"(tar xzf {self.archive}) and name that folder with --data-dir"
            ) from error
        return target

    def _binary_folder(self, data_dir: Path) -> Path:
        if data_dir.name == self.folder or any(os.path.isfile(data_dir / name) for name in self.files):
            return data_dir
        if os.path.isdir(data_dir / self.folder):
            return data_dir / self.folder
        if os.path.isfile(data_dir / self.archive):
            return self.unpack(data_dir / self.archive)
        pickled = [name for name in self.pickled if os.path.exists(data_dir / name)]
        danger = "is the Python version, a pickle, and opening one runs whatever program is in it"
        hint = f"; its {pickled[0]} {danger}" if pickled else ""
        raise DataError(
            f"{data_dir} holds neither {self.folder} nor {self.archive}{hint}: put the binary version there, "
            f"{self.page}{self.archive}, or name no folder to download it"
        )

    def _extract(self, archive: Path, into: Path) -> None:
        wanted = {f"{self.folder}/{name}": name for name in self.files}
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = wanted.pop(member.name, None) if member.isreg() else None
                source = tar.extractfile(member) if name else None
                if name and source:
                    with source, (into / name).open("xb") as file:
                        shutil.copyfileobj(source, file)
                if not wanted:
                    return
        raise DataError(f"{archive} lacks {', '.join(sorted(wanted))}: it is not the binary version of {self.title}")

    def _read(self, folder: Path, names: tuple[str, ...], images: int) -> Labelled:
        x_NCHW = np.empty((len(names) * images, *_IMAGE_SHAPE), dtype=np.uint8)
        y_N = np.empty(len(x_NCHW), dtype=np.int64)
        for number, name in enumerate(names):
            rows = self._rows(folder / name, images)
            here = slice(number * images, (number + 1) * images)
            y_N[here] = rows[:, self.label_bytes - 1]
            x_NCHW[here] = rows[:, self.label_bytes :].reshape(-1, *_IMAGE_SHAPE)
        return torch.from_numpy(x_NCHW), torch.from_numpy(y_N)

    def _rows(self, path: Path, images: int) -> npt.NDArray[np.uint8]:
        """Labels and planes of each image, shape `(images, label_bytes + 3072)`."""
        row_bytes = self.label_bytes + _PIXELS_BYTES
        try:
            size_bytes = path.stat().st_size
            # The size first: a huge file is not worth reading to say that it is wrong.
            raw = np.fromfile(path, dtype=np.uint8) if size_bytes == images * row_bytes else None
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error}): check its permissions and its disk") from error
        if raw is None or raw.size != images * row_bytes:
            raise DataError(
                f"{path} holds {size_bytes} bytes; this {self.title} file holds {images * row_bytes} ({images} rows of "
                f"{self.label_bytes} label{'s' * (self.label_bytes > 1)} and {_PIXELS_BYTES} pixels): it is cut short or "
                "another file; fetch it again"
            )
        rows = raw.reshape(images, row_bytes)
        check_labels(path, rows[:, self.label_bytes - 1], len(self.class_names))
        return rows


CIFAR10 = Cifar(
    name="cifar10",
    title="CIFAR-10",
    archive="cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    folder="cifar-10-batches-bin",
    train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test=("test_batch.bin",),
    file_images=10_000,
    label_bytes=1,
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    pickled=("cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1"),
)

_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle caterpillar
cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl
hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road
rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank
telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""

CIFAR100 = Cifar(
    name="cifar100",
    title="CIFAR-100",
    archive="cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",
    folder="cifar-100-binary",
    train=("train.bin",),
    test=("test.bin",),
    file_images=50_000,
    label_bytes=2,  # the coarse class of twenty, then the fine one
    class_names=tuple(_CIFAR100_CLASSES.split()),
    pickled=("cifar-100-python", "cifar-100-python.tar.gz", "meta"),
)
