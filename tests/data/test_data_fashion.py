"""Fashion-MNIST: IDX files, where they are looked for, and what each kind of damage is called."""

import gzip
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from convoy.data import Splits, fashion_mnist, fetch, load
from convoy.errors import DataError
from tests.support.data_files import FASHION_FILES, assert_says, content, idx, linked, write_fashion
from tests.support.web_server import closed_url, serving

VALUES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
GOOD = idx(VALUES)
ZIPPED = gzip.compress(GOOD, mtime=0)


@pytest.mark.parametrize(("name", "raw"), [("x.gz", ZIPPED), ("x", GOOD)])
def test_idx_gives_the_values_in_order(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    values = fashion_mnist.read_idx(tmp_path / name, (2, 3, 4))
    assert values.dtype == np.uint8
    assert values.tolist() == VALUES.tolist()


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("x", b"", "begins with nothing, not with 00 00 08 03"),
        ("x", b"\x00\x00\x0d\x03" + GOOD[4:], "begins with 00 00 0d 03, not with 00 00 08 03"),
        ("x", idx(VALUES.reshape(6, 4)), "begins with 00 00 08 02, not with 00 00 08 03"),
        ("x", GOOD[:10], "ends inside its header, after 10 bytes"),
        ("x", idx(VALUES.reshape(4, 3, 2)), "has the shape 4x3x2, not 2x3x4"),
        ("x", GOOD[:-1], "holds 39 bytes where 40 belong (header and 2x3x4 values)"),
        ("x", GOOD + b"!", "holds more bytes where 40 belong"),
        ("x.gz", gzip.compress(GOOD + bytes(1000), mtime=0), "holds more bytes where 40 belong"),
        ("x.gz", b"<html>not here</html>", "is no whole gzip file (Not a gzipped file (b'<h'))"),
        ("x.gz", ZIPPED[:-12], "is no whole gzip file (Compressed file ended before the end-of-stream marker"),
        ("x.gz", ZIPPED[:-8] + bytes(4) + ZIPPED[-4:], "is no whole gzip file (CRC check failed"),
        ("x.gz", ZIPPED[:12] + b"\xff\xff\xff\xff" + ZIPPED[16:], "is no whole gzip file (Error -3"),
    ],
    ids=[
        "empty",
        "another-type",
        "another-number-of-axes",
        "half-a-header",
        "another-shape",
        "short",
        "long",
        "long-gzip",
        "a-web-page",
        "short-gzip",
        "gzip-checksum",
        "gzip-content",
    ],
)
def test_damaged_idx_files_are_named(tmp_path: Path, name: str, raw: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError) as error:
        fashion_mnist.read_idx(tmp_path / name, (2, 3, 4))
    assert_says(error, tmp_path / name, says, "delete it and fetch it again")


def test_idx_that_is_missing_or_unreadable(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing"):
        fashion_mnist.read_idx(tmp_path / "none.gz", (1,))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"cannot be read .*check its permissions"):
        fashion_mnist.read_idx(tmp_path / "folder", (1,))


@pytest.fixture(scope="module")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("fashion")
    write_fashion(folder)
    yield folder
    shutil.rmtree(folder)


def assert_is_made_up_fashion(both: Splits) -> None:
    assert (len(both.train), len(both.test), both.classes, both.image_shape) == (60_000, 10_000, 10, (1, 28, 28))
    for images in (both.train, both.test):
        assert images.targets[:11].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
        assert images.x_NCHW[:, 0, 0, 3].long().equal(images.targets)
        assert int(images.x_NCHW[-1, 0, 27, 0]) == 255
    np.testing.assert_allclose(both.train.mean, (4.5 + 255) / 784 / 255, rtol=1e-13)


def test_fashion_mnist_from_a_folder_and_from_debian(
    fashion: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_is_made_up_fashion(load("fashion-mnist", fashion))
    monkeypatch.setattr(fashion_mnist, "_DEBIAN_FOLDER", fashion)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert_is_made_up_fashion(load("fashion-mnist"))
    assert content(tmp_path) == []


def test_fashion_mnist_names_the_missing_files_and_never_downloads_into_a_named_folder(
    fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion_mnist, "download", lambda *_: pytest.fail("a named folder was written to"))
    folder = linked(fashion, tmp_path, but="train-labels-idx1-ubyte.gz")
    with pytest.raises(DataError) as error:
        load("fashion-mnist", folder)
    assert_says(error, folder, "lacks train-labels-idx1-ubyte.gz:", "https://", "apt install dataset-fashion-mnist")


def test_fashion_mnist_refuses_a_label_above_nine(fashion: Path, tmp_path: Path) -> None:
    folder = linked(fashion, tmp_path, but="t10k-labels-idx1-ubyte")
    labels_N = np.zeros(10_000, dtype=np.uint8)
    labels_N[[77, 99]] = [11, 200]
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(labels_N))
    with pytest.raises(DataError) as error:
        load("fashion-mnist", folder)
    assert_says(error, folder / "t10k-labels-idx1-ubyte", "image 77 has label 11", "2 of 10000", "fetch it again")


def test_the_real_fashion_mnist_of_debian() -> None:
    if not fashion_mnist._DEBIAN_FOLDER.is_dir():
        pytest.skip("needs Fashion-MNIST: apt-get install dataset-fashion-mnist")
    both = load("fashion-mnist")
    assert torch.bincount(both.train.targets).tolist() == [6000] * 10
    assert torch.bincount(both.test.targets).tolist() == [1000] * 10
    # Published many times over as 0.2860 and 0.3530.
    assert both.train.mean == pytest.approx((0.2860,), abs=5e-5)
    assert both.train.std == pytest.approx((0.3530,), abs=5e-5)


def test_fashion_mnist_downloads_only_what_the_cache_lacks(
    fashion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = linked(fashion, tmp_path, but="t10k-labels-idx1-ubyte")
    (web / "t10k-labels-idx1-ubyte.gz").write_bytes(
        gzip.compress((fashion / "t10k-labels-idx1-ubyte").read_bytes(), mtime=0)
    )
    names = [f"{name}.gz" for name in FASHION_FILES]
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fashion_mnist, "_DEBIAN_FOLDER", tmp_path / "no-debian")
    monkeypatch.setattr(fashion_mnist, "_MD5", {name: fetch.digest(web / name, "md5") for name in names})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving() as server:
        server.folder = web
        monkeypatch.setattr(fashion_mnist, "_MIRRORS", (closed_url(), server.url))
        assert_is_made_up_fashion(load("fashion-mnist"))
        folder = tmp_path / "cache" / "convoy" / "fashion-mnist"
        assert content(folder) == sorted(names)
        assert len(server.agents) == 4

        (folder / names[0]).unlink()
        assert_is_made_up_fashion(load("fashion-mnist"))
        assert len(server.agents) == 5
