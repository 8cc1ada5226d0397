"""CIFAR-10 and CIFAR-100: binary files, their archives, and what each kind of damage is called."""

import hashlib
import io
import os
import shutil
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from convoy.data import Splits, fetch, load
from convoy.data.cifar import CIFAR10, CIFAR100
from convoy.errors import DataError
from tests.support.cifar10_images import REASON, cifar10_folder
from tests.support.data_files import assert_says, content, linked, write_cifar
from tests.support.web_server import closed_url, serving

BATCH_FILES = list(CIFAR10.files)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cifar10") / CIFAR10.folder
    folder.mkdir()
    write_cifar(CIFAR10, folder)
    yield folder
    shutil.rmtree(folder.parent)


@pytest.fixture(scope="module")
def archive(batches: Path) -> Path:
    """The six files as the official archive packs them, and two members that must not be written."""
    path = batches.parent / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        tar.addfile(tarfile.TarInfo("../evil.bin"))
        tar.addfile(tarfile.TarInfo("cifar-10-batches-bin/readme.html"))
        for name in BATCH_FILES:
            tar.add(batches / name, arcname=f"cifar-10-batches-bin/{name}")
    return path


def assert_is_made_up_cifar10(both: Splits) -> None:
    assert (len(both.train), len(both.test), both.classes, both.image_shape) == (50_000, 10_000, 10, (3, 32, 32))
    x_NCHW = both.train.x_NCHW
    assert x_NCHW[::10_000, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]
    assert x_NCHW[9_999::10_000, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]
    assert both.test.x_NCHW[[0, -1], 0, 0, 0].tolist() == [6, 6]
    assert x_NCHW[12_345].nonzero().tolist() == [[0, 0, 0], [1, 0, 5], [2, 1, 0]]
    assert x_NCHW[12_345, [1, 2], [0, 1], [5, 0]].tolist() == [100, 200]
    assert both.train.targets[:11].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    np.testing.assert_allclose(both.train.mean, [3 / 1024 / 255, 100 / 1024 / 255, 200 / 1024 / 255], rtol=1e-13)


def test_cifar10_from_its_folder_or_the_folder_above(batches: Path) -> None:
    assert_is_made_up_cifar10(load("cifar10", batches.parent))
    assert load("cifar10", batches).train.x_NCHW.shape == (50_000, 3, 32, 32)


def test_cifar10_names_the_missing_files(batches: Path, tmp_path: Path) -> None:
    folder = linked(batches, tmp_path, but="data_batch_3.bin")
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DataError) as error:
        load("cifar10", folder)
    assert_says(error, folder, "lacks data_batch_3.bin, test_batch.bin:", "cifar-10-binary.tar.gz", "https://")


@pytest.mark.parametrize("size_bytes", [0, 30_729_999, 30_730_001, 10 * 3073])
def test_cifar10_refuses_a_file_of_another_size(batches: Path, tmp_path: Path, size_bytes: int) -> None:
    folder = linked(batches, tmp_path, but="data_batch_2.bin")
    with (folder / "data_batch_2.bin").open("xb") as file:
        file.truncate(size_bytes)
    with pytest.raises(DataError) as error:
        load("cifar10", folder)
    assert_says(error, folder / "data_batch_2.bin", f"holds {size_bytes} bytes", "holds 30730000", "fetch it again")


def test_cifar10_refuses_a_label_above_nine(batches: Path, tmp_path: Path) -> None:
    folder = linked(batches, tmp_path, but="test_batch.bin")
    rows = np.fromfile(batches / "test_batch.bin", dtype=np.uint8).reshape(10_000, 3073)
    rows[[4321, 5000], 0] = [10, 99]
    rows.tofile(folder / "test_batch.bin")
    with pytest.raises(DataError) as error:
        load("cifar10", folder)
    assert_says(error, folder / "test_batch.bin", "image 4321 has label 10", "2 of 10000", "fetch it again")


def test_cifar10_without_files_says_what_belongs_there_and_opens_no_pickle(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load("cifar10", tmp_path)
    assert_says(error, tmp_path, "holds neither cifar-10-batches-bin nor cifar-10-binary.tar.gz", "https://")
    assert "pickle" not in str(error.value)
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError) as error:
        load("cifar10", tmp_path)
    assert_says(error, "its cifar-10-batches-py is the Python version, a pickle", "https://")


@pytest.mark.parametrize(("sums_name", "algorithm"), [("SHA256SUMS", "sha256"), ("MD5SUMS", "md5")])
def test_cifar10_agrees_with_the_checksums_beside_it(
    batches: Path, tmp_path: Path, sums_name: str, algorithm: str
) -> None:
    folder = linked(batches, tmp_path, but="")
    sums = folder / sums_name
    lines = [f"{hashlib.new(algorithm, (batches / name).read_bytes()).hexdigest()}  {name}" for name in BATCH_FILES]
    sums.write_text("\n".join([*lines, "00  readme.html\n"]))
    CIFAR10.load(folder, torch.float32)

    sums.write_text("\n".join(lines[:-1]).replace("  ", " *./"))
    with pytest.raises(DataError) as error:
        CIFAR10.load(folder, torch.float32)
    assert_says(error, sums, "has no checksum of test_batch.bin", f"{algorithm}sum *.bin > {sums_name}")

    wrong = "0" * len(lines[0].split()[0])
    sums.write_text("\n".join([f"{wrong}  {BATCH_FILES[0]}", *lines[1:]]))
    with pytest.raises(DataError) as error:
        CIFAR10.load(folder, torch.float32)
    assert_says(error, folder / BATCH_FILES[0], lines[0].split()[0], wrong, sums_name, "fetch the file again")

    sums.write_text(lines[0] + "\nwhat is this?\n")
    with pytest.raises(DataError) as error:
        CIFAR10.load(folder, torch.float32)
    assert_says(error, sums, "line 2", "'what is this?'")


def tiny_archive(folder: Path, members: dict[str, bytes | str]) -> tuple[Path, str]:
    """An archive of small files (bytes) and symbolic links (their targets), and its md5."""
    path = folder / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, inside in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(inside, str):
                member.type, member.linkname = tarfile.SYMTYPE, inside
                tar.addfile(member)
            else:
                member.size = len(inside)
                tar.addfile(member, io.BytesIO(inside))
    return path, hashlib.md5(path.read_bytes()).hexdigest()


def test_an_archive_with_another_checksum_is_not_opened(tmp_path: Path) -> None:
    path, md5 = tiny_archive(tmp_path, {f"cifar-10-batches-bin/{name}": b"tiny" for name in BATCH_FILES})
    with pytest.raises(DataError) as error:
        load("cifar10", tmp_path)
    assert_says(error, path, md5, "c32a1d4ab5d03f1284b67883e8d87530", "delete it and fetch it again", "https://")
    assert content(tmp_path) == ["cifar-10-binary.tar.gz"]


def test_unpacking_writes_only_the_six_names_and_all_or_none(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    members: dict[str, bytes | str] = {f"cifar-10-batches-bin/{name}": b"tiny" for name in BATCH_FILES}
    members |= {"cifar-10-batches-bin/data_batch_1.bin": "/etc/hostname", "../evil": b"!", f"{tmp_path}/evil": b"!"}
    path, md5 = tiny_archive(folder, members)
    with pytest.raises(DataError) as error:
        replace(CIFAR10, md5=md5).unpack(path)
    assert_says(error, path, "lacks cifar-10-batches-bin/data_batch_1.bin:")
    assert content(folder) == ["cifar-10-binary.tar.gz"]
    assert content(tmp_path) == ["data"]


def test_unpacking_a_broken_archive_leaves_nothing(tmp_path: Path) -> None:
    path, _ = tiny_archive(tmp_path, {f"cifar-10-batches-bin/{name}": os.urandom(2000) for name in BATCH_FILES})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError) as error:
        replace(CIFAR10, md5=hashlib.md5(path.read_bytes()).hexdigest()).unpack(path)
    assert_says(error, "cannot unpack", path, "--data-dir")
    assert content(tmp_path) == ["cifar-10-binary.tar.gz"]


def test_unpacking_beside_a_faster_process_keeps_what_is_there(tmp_path: Path) -> None:
    path, md5 = tiny_archive(tmp_path, {f"cifar-10-batches-bin/{name}": b"mine" for name in BATCH_FILES})
    target = tmp_path / "cifar-10-batches-bin"
    target.mkdir()
    (target / "data_batch_1.bin").write_bytes(b"theirs")
    abandoned = tmp_path / ".cifar-10-batches-bin.killed"
    abandoned.mkdir()
    os.utime(abandoned, (time.time() - 7200,) * 2)
    assert replace(CIFAR10, md5=md5).unpack(path) == target
    assert (target / "data_batch_1.bin").read_bytes() == b"theirs"
    assert content(tmp_path) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]


def test_cifar10_is_downloaded_once_and_unpacked_once(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kind = replace(CIFAR10, md5=fetch.digest(archive, "md5"))
    with serving() as server:
        server.folder = archive.parent
        assert_is_made_up_cifar10(replace(kind, page=server.url).load(None, torch.float32))
    folder = tmp_path / "convoy" / "cifar10"
    assert content(folder) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]
    assert content(folder / "cifar-10-batches-bin") == BATCH_FILES
    assert content(folder.parent) == ["cifar10"]

    offline = replace(kind, page=closed_url())
    (folder / "cifar-10-binary.tar.gz").unlink()
    assert_is_made_up_cifar10(offline.load(None, torch.float32))
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=r"could not download cifar-10-binary\.tar\.gz"):
        offline.load(None, torch.float32)
    assert content(folder) == []


@pytest.mark.slow
def test_the_real_cifar10() -> None:
    """Its 60,000 images are JPEGs here: they take long to unpack. Of made-up files, the tests above ask the same."""
    folder = cifar10_folder()
    if folder is None:
        pytest.skip(REASON)
    both = load("cifar10", folder)
    assert torch.bincount(both.train.targets).tolist() == [5000] * 10
    assert torch.bincount(both.test.targets).tolist() == [1000] * 10
    # The first labels of the original: frog, truck, truck, deer, automobile; cat, ship, ship, airplane, frog.
    assert both.train.targets[:5].tolist() == [6, 9, 9, 4, 1]
    assert both.test.targets[:5].tolist() == [3, 8, 8, 0, 6]
    # Published many times over; one pass through JPEG moves them by less than 0.005.
    assert both.train.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=5e-3)
    assert both.train.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=5e-3)
    x_NCHW, y_N = both.train.__getitems__(torch.arange(0, 50_000, 100))
    assert (tuple(x_NCHW.shape), tuple(y_N.shape)) == ((500, 3, 32, 32), (500,))
    assert x_NCHW.mean().abs() < 0.05


# ---------------------------------------------------------------------------------------------------- CIFAR-100


def test_cifar100_has_the_fine_classes(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    write_cifar(CIFAR100, folder)
    both = load("cifar100", tmp_path)
    assert (len(both.train), len(both.test), both.classes, both.image_shape) == (50_000, 10_000, 100, (3, 32, 32))
    assert both.train.targets[98:102].tolist() == [98, 99, 0, 1], "not the coarse label 77"
    x_NCHW = both.train.x_NCHW
    assert x_NCHW[49_999].nonzero().tolist() == [[0, 0, 0], [1, 0, 5], [2, 1, 0]]
    assert x_NCHW[[0, -1], 0, 0, 0].tolist() == [1, 1]
    assert both.test.x_NCHW[[0, -1], 0, 0, 0].tolist() == [2, 2]

    (folder / "train.bin").write_bytes(b"\0" * 1000)
    with pytest.raises(DataError) as error:
        load("cifar100", tmp_path)
    assert_says(error, folder / "train.bin", "holds 1000 bytes", "CIFAR-100 file holds 153700000", "2 labels")


def test_the_class_names_are_there_in_alphabetical_order() -> None:
    assert (len(CIFAR10.class_names), len(CIFAR100.class_names)) == (10, 100)
    assert list(CIFAR100.class_names) == sorted(set(CIFAR100.class_names))
    assert CIFAR100.class_names[0] == "apple"
    assert CIFAR100.class_names[99] == "worm"


def test_cifar100_without_files_names_what_belongs_there(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-python").mkdir()
    with pytest.raises(DataError) as error:
        load("cifar100", tmp_path)
    assert_says(
        error, "holds neither cifar-100-binary nor cifar-100-binary.tar.gz", "its cifar-100-python is", "a pickle"
    )
