"""Named data sets: digits, CIFAR's binary files, and torchvision's files and downloads."""

import hashlib
import socket
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from convoy.data import Splits, load, named
from convoy.errors import DataError, InputError
from tests.support.data_files import assert_says, write_cifar10, write_idx

# --------------------------------------------------------------------------------------------------------- digits


def test_digits_are_those_of_scikit_learn() -> None:
    both = load("digits", dtype=torch.float64)
    assert (len(both.train), len(both.test), both.train.classes, both.train.image_shape) == (1437, 360, 10, (1, 8, 8))
    # From sklearn.datasets.load_digits: the first row of the first image, the sum of all grey values, labels.
    assert both.train.x_NCHW[0, 0, 0].tolist() == np.rint(np.array([0, 0, 5, 13, 9, 1, 0, 0]) * 255 / 16).tolist()
    assert sum(int(each.x_NCHW.sum(dtype=torch.int64)) for each in (both.train, both.test)) == 8_953_801
    assert both.train.targets[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert both.test.targets[-3:].tolist() == [8, 9, 8]


def test_missing_scikit_learn_error_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"scikit-learn, which is not installed: pip install 'convoy-train\[digits\]'"):
        load("digits")


# ------------------------------------------------------------------------------------------------ CIFAR-10, binary


@pytest.fixture
def batches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write small files."""
    monkeypatch.setattr(named, "FILE_ROWS", 100)
    folder = tmp_path_factory.mktemp("cifar10") / "cifar-10-batches-bin"
    folder.mkdir()
    write_cifar10(folder, 100)
    return folder


def assert_is_made_up_cifar10(both: Splits) -> None:
    assert (len(both.train), len(both.test), both.train.classes, both.train.image_shape) == (500, 100, 10, (3, 32, 32))
    x_NCHW = both.train.x_NCHW
    assert x_NCHW[::100, 0, 0, 0].tolist() == x_NCHW[99::100, 0, 0, 0].tolist() == [1, 2, 3, 4, 5]
    assert both.test.x_NCHW[[0, -1], 0, 0, 0].tolist() == [6, 6]
    assert x_NCHW[123].nonzero().tolist() == [[0, 0, 0], [1, 0, 5], [2, 1, 0]]
    assert both.train.targets[:11].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    np.testing.assert_allclose(both.train.mean, [3 / 1024 / 255, 100 / 1024 / 255, 200 / 1024 / 255], rtol=1e-13)


def test_cifar10_is_found_in_parent_folders_and_the_cache(
    batches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_is_made_up_cifar10(load("cifar10", batches))
    assert_is_made_up_cifar10(load("cifar10", batches.parent))
    (tmp_path / "convoy").mkdir()
    (tmp_path / "convoy" / "cifar10").symlink_to(batches.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(load("cifar10").train) == 500
    (tmp_path / ".cache").symlink_to(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/path")
    assert len(load("cifar10").train) == 500


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"cut short", "holds 9 bytes, not 100 rows of 3073"),
        (bytes(307_301), "holds 307301 bytes"),
        (b"\x0a" + bytes(307_299), "labels below 10"),
    ],
)
def test_a_damaged_binary_file_is_named(batches: Path, tmp_path: Path, content: bytes | None, says: str) -> None:
    for path in batches.iterdir():
        if path.name != "data_batch_2.bin":
            (tmp_path / path.name).symlink_to(path)
    if content is not None:
        (tmp_path / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(DataError) as error:
        load("cifar10", tmp_path)
    assert_says(error, tmp_path / "data_batch_2.bin", says)


# ---------------------------------------------------------------------------------------------------- torchvision


def test_fashion_mnist_is_read_by_torchvision(tmp_path: Path) -> None:
    folder = tmp_path / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for part, images in (("train", 60), ("t10k", 10)):
        x_NHW = np.zeros((images, 28, 28), dtype=np.uint8)
        x_NHW[:, 0, 3] = np.arange(images)
        write_idx(folder / f"{part}-images-idx3-ubyte", x_NHW)
        write_idx(folder / f"{part}-labels-idx1-ubyte", (np.arange(images) % 10).astype(np.uint8))
    both = load("fashion-mnist", tmp_path)
    assert (len(both.train), len(both.test), both.train.image_shape, len(both.class_names)) == (60, 10, (1, 28, 28), 10)
    assert both.train.x_NCHW[:, 0, 0, 3].tolist() == list(range(60))
    assert both.test.targets.tolist() == list(range(10))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"cut short")
    with pytest.raises(DataError, match=r"cannot load fashion-mnist from .*FashionMNIST/raw .*--data-dir"):
        load("fashion-mnist", tmp_path)


def test_a_folder_without_the_files_is_refused_at_once(tmp_path: Path) -> None:
    for name, there in (("fashion-mnist", "FashionMNIST/raw"), ("cifar10", "cifar-10-batches-bin")):
        with pytest.raises(DataError) as error:
            load(name, tmp_path)
        assert_says(
            error,
            f"--data-dir {tmp_path} holds no {there}: unpack https://",
            "or leave --data-dir out to download",
        )
    with pytest.raises(DataError, match="nowhere is no folder"):
        load("cifar100", tmp_path / "nowhere")


def test_a_silent_server_is_left_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "TIMEOUT_S", 0.2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setitem(named._URLS, "cifar10", f"http://127.0.0.1:{silent.getsockname()[1]}/cifar.tar.gz")
        with pytest.raises(DataError, match=r"cannot load cifar10 .*\(timed out\)"):
            load("cifar10")


@pytest.mark.filterwarnings("ignore:Python 3.14 will, by default, filter extracted tar archives")  # of torchvision
def test_a_download_is_checked_and_unpacked(batches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(batches, arcname=batches.name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path))
    monkeypatch.setitem(named._URLS, "cifar10", f"http://127.0.0.1:{server.server_port}/{archive.name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(DataError, match=r"cannot load cifar10 .*\(http.* was not downloaded whole.*--data-dir"):
            load("cifar10")
        monkeypatch.setitem(named._MD5, "cifar10", hashlib.md5(archive.read_bytes()).hexdigest())
        assert_is_made_up_cifar10(load("cifar10"))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert len(load("cifar10").train) == 500, "the second time nothing is downloaded"
