"""Find CIFAR-10 for tests and benchmarks: `python tests/support/cifar10_images.py` prints the folder for `--data-dir`.

Looked for in this order: the folder that `CONVOY_TEST_CIFAR10` names, then the project's shared data beside the
repository. Either holds the usual binary files, or `images.bin.xz`: 60,000 records of label (1 byte), length
(2 bytes, little endian) and a JPEG, the first 50,000 of them the training images. Those are unpacked once into
a folder of the system's temporary directory.
"""

import hashlib
import io
import lzma
import os
import struct
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent.parent
REASON = "no CIFAR-10: set CONVOY_TEST_CIFAR10 to a folder that holds its binary files or images.bin.xz"

_FOLDER = "cifar-10-batches-bin"
_FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
_FILE_IMAGES = 10_000


def cifar10_folder() -> Path | None:
    """Return a folder for `convoy.data.load("cifar10", folder)`; None if there is none.

    Raises:
        FileNotFoundError: `CONVOY_TEST_CIFAR10` names a folder that holds neither form.
    """
    named = os.environ.get("CONVOY_TEST_CIFAR10")
    source = Path(named) if named else ROOT.parent / "shared" / "data" / "cifar10"
    for folder in (source, source / _FOLDER):
        if all((folder / name).is_file() for name in _FILES):
            return folder
    archive = source / "images.bin.xz"
    if archive.is_file():
        return _unpacked(archive)
    if named:
        raise FileNotFoundError(f"CONVOY_TEST_CIFAR10={named} holds neither {_FILES} nor images.bin.xz")
    return None


def _unpacked(archive: Path) -> Path:
    packed = archive.read_bytes()
    # The content and the user name the folder: other images, and other people's files, are never taken for ours.
    target = Path(tempfile.gettempdir()) / f"convoy-cifar10-{os.getuid()}-{hashlib.sha256(packed).hexdigest()[:16]}"
    if target.is_dir() and target.stat().st_uid == os.getuid():
        return target
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.") as scratch:
        fresh = Path(scratch) / "fresh"
        (fresh / _FOLDER).mkdir(parents=True)
        _write_batches(lzma.decompress(packed), fresh / _FOLDER)
        try:
            fresh.rename(target)
        except OSError:
            # Another test run was faster.
            if not target.is_dir():
                raise
    return target


def _write_batches(records: bytes, folder: Path) -> None:
    at = 0
    for name in _FILES:
        with (folder / name).open("xb") as file:
            for _ in range(_FILE_IMAGES):
                label, length = struct.unpack_from("<BH", records, at)
                at += 3
                file.write(bytes([label]))
                file.write(_planes(records[at : at + length]))
                at += length
    if at != len(records):
        raise ValueError(f"images.bin.xz holds {len(records)} bytes, {at} of them in its 60,000 records")


def _planes(jpeg: bytes) -> bytes:
    """Return the red, green and blue planes of one image."""
    with Image.open(io.BytesIO(jpeg)) as image:
        return b"".join(plane.tobytes() for plane in image.convert("RGB").split())


if __name__ == "__main__":
    print(cifar10_folder() or sys.exit(REASON))
