"""Files and folders that are on the disk, not only on their way to it, before anything relies on them."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

SYNC_BYTES = 64 << 20
"""So much is under way to the disk at most: no single wait for the device that writes grows with the model."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a file must be to be the one that was written."""

    size_bytes: int
    sha256: str


@dataclass
class Sink:
    """A file that is being written, its size and its checksum so far."""

    file: BinaryIO
    size_bytes: int = 0
    unsynced_bytes: int = 0
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.size_bytes += len(data)
        self.unsynced_bytes += len(data)
        if self.unsynced_bytes > SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.unsynced_bytes = 0

    def written(self) -> Written:
        return Written(self.size_bytes, self.digest.hexdigest())


@contextmanager
def new_file(path: Path) -> Iterator[Sink]:
    """A file that was not there before, and is on the disk when the block ends.

    Raises:
        OSError: with the file's name.
    """
    with _named(path), path.open("xb") as file:
        sink = Sink(file)
        yield sink
        sink.sync()


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk when this returns.

    Raises:
        OSError: with the folder's name.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _named(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


def fingerprint(path: Path) -> Written:
    """Size and checksum of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Written(os.fstat(file.fileno()).st_size, digest)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What goes wrong with an open file does not tell by itself which file it is."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
