"""Datasets: what they hold, how they are normalised, and what each kind of damage is called."""

import gzip
import hashlib
import http.server
import io
import os
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cifar10_images import REASON, cifar10_folder
from torch.utils.data import DataLoader

from convoy.data import NAMES, Images, Splits, cifar10, digits, fashion_mnist, fetch, load
from convoy.data.images import channel_statistics, splits
from convoy.errors import DataError, InputError

BATCHES = ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"]
BATCH_FILES = [*BATCHES, "test_batch.bin"]
IDX_FILES = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]


def assert_says(error: pytest.ExceptionInfo[BaseException], *parts: object) -> None:
    for part in parts:
        assert str(part) in str(error.value)


def content(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------------------------- images in memory


@pytest.fixture
def pixels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x_NCHW = torch.randint(0, 256, (50, 3, 4, 5), dtype=torch.uint8, generator=generator)
    return x_NCHW, torch.arange(50) % 7


def test_statistics_equal_those_of_numpy(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    mean, std = channel_statistics(pixels[0])
    x_NCHW = pixels[0].numpy().astype(np.float64) / 255
    np.testing.assert_allclose(mean, x_NCHW.mean((0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(std, x_NCHW.std((0, 2, 3)), rtol=1e-13)


def test_statistics_by_hand() -> None:
    x_NCHW = torch.tensor([[[[0, 255]], [[51, 51]]]], dtype=torch.uint8)
    assert channel_statistics(x_NCHW) == ((0.5, 0.2), (0.5, 1.0))


def test_statistics_do_not_depend_on_threads(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = channel_statistics(pixels[0])
        torch.set_num_threads(2)
        assert channel_statistics(pixels[0]) == alone
    finally:
        torch.set_num_threads(threads)


def test_training_images_are_normalised_and_test_images_by_the_same_numbers(
    pixels: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x_NCHW, y_N = pixels
    both = splits("mine", (x_NCHW[:40], y_N[:40]), (x_NCHW[40:], y_N[40:]), torch.float64)
    x_train_NCHW, _ = both.train.__getitems__(range(40))
    assert x_train_NCHW.mean((0, 2, 3)).abs().max() < 1e-14
    assert (x_train_NCHW.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-14
    assert (both.test.mean, both.test.std) == (both.train.mean, both.train.std)
    mean_C11, std_C11 = (
        torch.tensor(v, dtype=torch.float64).reshape(3, 1, 1) for v in (both.train.mean, both.train.std)
    )
    x_test_NCHW, y_test_N = both.test.__getitems__(list(range(10)))
    torch.testing.assert_close(x_test_NCHW, (x_NCHW[40:].double() / 255 - mean_C11) / std_C11, rtol=1e-12, atol=1e-12)
    assert y_test_N.equal(y_N[40:])
    assert (both.classes, both.image_shape, both.name) == (7, (3, 4, 5), "mine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("indices", [[], [7], [3, 0, 49, 3], range(5, 20), torch.tensor([8, 2])])
def test_a_batch_is_the_stack_of_its_samples(
    pixels: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, indices: list[int] | range | torch.Tensor
) -> None:
    images = splits("mine", pixels, pixels, dtype).train
    x_NCHW, y_N = images.__getitems__(indices)
    assert x_NCHW.shape == (len(indices), 3, 4, 5)
    assert (x_NCHW.dtype, y_N.dtype) == (dtype, torch.int64)
    samples = [images[int(index)] for index in indices]
    for row, (x_CHW, label) in enumerate(samples):
        assert x_NCHW[row].equal(x_CHW)
        assert isinstance(label, int)
        assert label == y_N[row] == images.targets[int(indices[row])]


def test_reading_leaves_the_stored_bytes_alone(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    images = splits("mine", pixels, pixels, torch.float32).train
    before = pixels[0].clone()
    images[3][0].zero_()
    images.__getitems__([3, 4])[1].zero_()
    assert images.x_NCHW.equal(before)
    assert images.targets[4] == 4


def test_images_work_with_a_data_loader_and_as_a_sequence(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    images = splits("mine", pixels, pixels, torch.float32).train
    batches = list(DataLoader(images, batch_size=20, collate_fn=lambda batch: batch))
    assert [tuple(x_NCHW.shape) for x_NCHW, _ in batches] == [(20, 3, 4, 5), (20, 3, 4, 5), (10, 3, 4, 5)]
    assert torch.cat([y_N for _, y_N in batches]).equal(images.targets)
    samples = list(images)  # type: ignore[call-overload]  # iterable by its indices, as any Dataset
    assert len(samples) == len(images) == 50
    assert repr(images) == "Images(50 of 3x4x5, 7 classes, torch.float32)"


@pytest.mark.parametrize("index", [50, 1000])
def test_an_index_past_the_end_is_an_index_error(pixels: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
    images = splits("mine", pixels, pixels, torch.float32).train
    with pytest.raises(IndexError):
        images[index]
    with pytest.raises(IndexError):
        images.__getitems__([0, index])


def test_images_refuse_what_they_cannot_hold(pixels: tuple[torch.Tensor, torch.Tensor]) -> None:
    x_NCHW, y_N = pixels
    mean, std = (0.5,) * 3, (0.2,) * 3
    with pytest.raises(InputError, match=r"torch\.float32 \(50, 3, 4, 5\): give uint8"):
        Images(x_NCHW.float(), y_N, 7, mean, std)
    with pytest.raises(InputError, match=r"torch\.int64 \(49,\) for 50 images"):
        Images(x_NCHW, y_N[:49], 7, mean, std)
    with pytest.raises(InputError, match=r"images of torch\.float16: choose one of torch\.float32, torch\.float64"):
        Images(x_NCHW, y_N, 7, mean, std, torch.float16)
    with pytest.raises(InputError, match="2 means and 3 deviations for 3 channels"):
        Images(x_NCHW, y_N, 7, mean[:2], std)
    with pytest.raises(InputError, match="must be above 0"):
        Images(x_NCHW, y_N, 7, mean, (0.2, 0.0, 0.2))
    with pytest.raises(DataError, match="labels from 0 to 6 with 6 classes"):
        Images(x_NCHW, y_N, 6, mean, std)
    with pytest.raises(InputError, match="no training images"):
        splits("mine", (x_NCHW[:0], y_N[:0]), pixels, torch.float32)
    with pytest.raises(InputError, match=r"trains on images of \(3, 4, 5\) and tests on \(3, 4, 4\)"):
        splits("mine", pixels, (x_NCHW[..., :4], y_N), torch.float32)


# ------------------------------------------------------------------------------------------- load, by name


def test_an_unknown_name_lists_the_choices() -> None:
    assert NAMES == ("digits", "fashion-mnist", "cifar10")
    with pytest.raises(InputError, match="unknown dataset 'imagenet': choose one of cifar10, digits, fashion-mnist"):
        load("imagenet")


def test_a_data_folder_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError) as missing:
        load("cifar10", tmp_path / "nowhere")
    assert_says(missing, tmp_path / "nowhere", "does not exist", "--data-dir", "cifar10")
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as file:
        load("fashion-mnist", tmp_path / "file")
    assert_says(file, tmp_path / "file", "is not a folder", "fashion-mnist")


def test_importing_the_package_imports_no_scikit_learn() -> None:
    program = "import sys, convoy.data; sys.exit('sklearn' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_the_cache_folder_follows_the_xdg_specification(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache_folder("digits") == tmp_path / "convoy" / "digits"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert fetch.cache_folder("digits") == tmp_path / "home" / ".cache" / "convoy" / "digits"


# ------------------------------------------------------------------------------------------- digits


def test_digits_are_the_1797_of_scikit_learn() -> None:
    both = load("digits", dtype=torch.float64)
    assert (len(both.train), len(both.test), both.classes, both.image_shape) == (1437, 360, 10, (1, 8, 8))
    assert both.train.targets[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert torch.bincount(both.test.targets).tolist() == [35, 36, 35, 37, 37, 37, 37, 36, 33, 37]
    # The first row of the first digit, from scikit-learn's documentation: ink 0 0 5 13 9 1 0 0 of 16.
    assert both.train.x_NCHW[0, 0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert sorted(set(both.train.x_NCHW.flatten().tolist())) == [round(ink * 255 / 16) for ink in range(17)]
    x_NCHW, _ = both.train.__getitems__(range(1437))
    assert abs(x_NCHW.mean()) < 1e-13
    assert abs(x_NCHW.std(correction=0) - 1) < 1e-12  # rounding over 91,968 entries, in whatever order


def test_digits_without_scikit_learn_give_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InputError) as error:
        digits.load(None, torch.float32)
    assert_says(error, "scikit-learn", "pip install 'convoy-train[digits]'")


@pytest.mark.parametrize("content", [None, b"not gzip", gzip.compress(b"1,2,3\n4,5,6\n")])
def test_damaged_digits_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "datasets" / "data"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "digits.csv.gz").write_bytes(content)
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(digits.importlib.util, "find_spec", lambda _name: found)
    with pytest.raises(DataError) as error:
        digits.load(None, torch.float32)
    assert_says(error, "digits.csv.gz", "scikit-learn")


def test_the_digits_are_those_that_scikit_learn_gives() -> None:
    from sklearn.datasets import load_digits

    bunch, ours = load_digits(), digits.load(None, torch.float32)
    ink = np.concatenate([s.x_NCHW.numpy()[:, 0] for s in (ours.train, ours.test)])
    assert np.array_equal(ink, np.rint(bunch.images * 255 / 16))
    assert [*ours.train.targets.tolist(), *ours.test.targets.tolist()] == bunch.target.tolist()


# ------------------------------------------------------------------------------------------- IDX, Fashion-MNIST


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


VALUES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
GOOD = idx(VALUES)
ZIPPED = gzip.compress(GOOD)


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
        ("x.gz", gzip.compress(GOOD + bytes(1000)), "holds more bytes where 40 belong"),
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
    """Files of Fashion-MNIST's names and shapes: three gzipped and one not."""
    folder = tmp_path_factory.mktemp("fashion")
    for part, images in (("train", 60_000), ("t10k", 10_000)):
        labels_N = (np.arange(images) % 10).astype(np.uint8)
        x_NHW = np.zeros((images, 28, 28), dtype=np.uint8)
        x_NHW[:, 0, 3] = labels_N
        x_NHW[:, 27, 0] = 255
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x_NHW), 1))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels_N), 1))
    plain = gzip.decompress((folder / "t10k-labels-idx1-ubyte.gz").read_bytes())
    (folder / "t10k-labels-idx1-ubyte").write_bytes(plain)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
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


def linked(source: Path, target: Path, but: str) -> Path:
    """A folder of links to all files but one."""
    for path in source.iterdir():
        if path.name != but:
            (target / path.name).symlink_to(path)
    return target


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
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    both = load("fashion-mnist")
    assert torch.bincount(both.train.targets).tolist() == [6000] * 10
    assert torch.bincount(both.test.targets).tolist() == [1000] * 10
    # Published many times over as 0.2860 and 0.3530.
    assert both.train.mean == pytest.approx((0.2860,), abs=5e-5)
    assert both.train.std == pytest.approx((0.3530,), abs=5e-5)


# ------------------------------------------------------------------------------------------- CIFAR-10


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Six files of full size: labels 0..9 in turn, and three pixels that tell file, plane, row and column apart."""
    folder = tmp_path_factory.mktemp("cifar10") / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate(BATCH_FILES, start=1):
        rows = np.zeros((10_000, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(10_000) % 10
        rows[:, 1] = number
        rows[:, 1 + 1024 + 5] = 100
        rows[:, 1 + 2048 + 32] = 200
        rows.tofile(folder / name)
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
    cifar10.load(folder, torch.float32)

    sums.write_text("\n".join(lines[:-1]).replace("  ", " *./"))
    with pytest.raises(DataError) as error:
        cifar10.load(folder, torch.float32)
    assert_says(error, sums, "has no checksum of test_batch.bin", f"{algorithm}sum *.bin > {sums_name}")

    wrong = "0" * len(lines[0].split()[0])
    sums.write_text("\n".join([f"{wrong}  {BATCH_FILES[0]}", *lines[1:]]))
    with pytest.raises(DataError) as error:
        cifar10.load(folder, torch.float32)
    assert_says(error, folder / BATCH_FILES[0], lines[0].split()[0], wrong, sums_name, "fetch the file again")

    sums.write_text(lines[0] + "\nwhat is this?\n")
    with pytest.raises(DataError) as error:
        cifar10.load(folder, torch.float32)
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
        cifar10.unpack(path, md5)
    assert_says(error, path, "lacks cifar-10-batches-bin/data_batch_1.bin:")
    assert content(folder) == ["cifar-10-binary.tar.gz"]
    assert content(tmp_path) == ["data"]


def test_unpacking_a_broken_archive_leaves_nothing(tmp_path: Path) -> None:
    path, _ = tiny_archive(tmp_path, {f"cifar-10-batches-bin/{name}": os.urandom(2000) for name in BATCH_FILES})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError) as error:
        cifar10.unpack(path, hashlib.md5(path.read_bytes()).hexdigest())
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
    assert cifar10.unpack(path, md5) == target
    assert (target / "data_batch_1.bin").read_bytes() == b"theirs"
    assert content(tmp_path) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]


def test_the_real_cifar10() -> None:
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


# ------------------------------------------------------------------------------------------- downloads

BODY = bytes(range(256)) * 4000
BODY_MD5 = hashlib.md5(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Good and bad servers, one per path; other paths are files of `server.folder`."""

    server: "Server"

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        if name in ("good", "bad", "together"):
            if name == "together":
                self.server.together.wait(timeout=30)
            self.answer(BODY if name != "bad" else b"?" + BODY[1:])
        elif name == "short":
            self.answer(BODY[:1000], announced_bytes=len(BODY))
        elif name == "silent":
            self.answer(BODY[:1000], announced_bytes=len(BODY))
            self.server.closing.wait(timeout=30)
        elif name == "slow":
            self.answer(b"", announced_bytes=len(BODY))
            while not self.server.closing.wait(timeout=0.02):
                self.wfile.write(b"!")
        elif self.server.folder is not None and (self.server.folder / name).is_file():
            self.answer((self.server.folder / name).read_bytes())
        else:
            self.send_error(404)

    def answer(self, body: bytes, announced_bytes: int | None = None) -> None:
        self.server.agents.append(self.headers["User-Agent"])
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) if announced_bytes is None else announced_bytes))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """Local, and quiet about clients that hang up, as the impatient ones here do."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder: Path | None = None
        self.closing = threading.Event()
        self.together = threading.Barrier(4)
        self.agents: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        # Its end waits for the threads of the requests, so that none is left behind.
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.closing.set()
        server.together.abort()
        server.shutdown()
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.fixture
def closed_url() -> str:
    """An address of this machine where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}/"


def test_a_good_download_is_there_whole(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    destination = tmp_path / "new" / "folder" / "file.bin"
    fetch.download([server.url + "good"], destination, BODY_MD5)
    assert destination.read_bytes() == BODY
    assert content(destination.parent) == ["file.bin"]
    assert server.agents[0].startswith("convoy/")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"downloading {server.url}good\n")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("bad", f"not {BODY_MD5} (1024000 bytes)"),
        ("missing", "the server answered 404 Not Found"),
        ("short", "the connection ended after 1000 of 1024000 bytes"),
        ("silent", "timed out after 1000 bytes"),
        ("slow", "not finished after 0.3 s"),
    ],
)
def test_a_bad_download_leaves_nothing(server: Server, tmp_path: Path, path: str, says: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(DataError) as error:
        fetch.download([server.url + path], tmp_path / "file.bin", BODY_MD5, timeout_s=0.2, limit_s=0.3)
    assert_says(error, "could not download file.bin", server.url + path, says)
    assert_says(error, f"download {server.url}{path} by hand and put it into {tmp_path}", "--data-dir")
    assert content(tmp_path) == []
    assert time.monotonic() - started_s < 20


def test_a_file_is_complete_when_it_gets_its_name(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.folder = tmp_path / "web"
    server.folder.mkdir()
    (server.folder / "tiny").write_bytes(b"tiny")
    rename, seen = os.replace, []

    def watched(part: Path, destination: Path) -> None:
        seen.append(Path(part).read_bytes())
        rename(part, destination)

    monkeypatch.setattr(os, "replace", watched)
    fetch.download([server.url + "tiny"], tmp_path / "file.bin", hashlib.md5(b"tiny").hexdigest())
    assert seen == [b"tiny"]


def test_a_bad_download_leaves_the_old_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"old")
    with pytest.raises(DataError):
        fetch.download([server.url + "bad"], tmp_path / "file.bin", BODY_MD5)
    assert (tmp_path / "file.bin").read_bytes() == b"old"


def test_a_file_without_end_is_given_up(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="longer than 5000 bytes"):
        fetch.download([server.url + "good"], tmp_path / "file.bin", BODY_MD5, limit_bytes=5000)
    assert content(tmp_path) == []


def test_nobody_listening(closed_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(DataError) as error:
        fetch.download([closed_url + "file"], tmp_path / "file.bin", BODY_MD5)
    assert_says(error, closed_url, "Connection refused", "--data-dir")
    assert content(tmp_path) == []


def test_the_next_address_helps_and_all_failures_are_told(server: Server, closed_url: str, tmp_path: Path) -> None:
    urls = [closed_url, server.url + "missing", server.url + "bad"]
    fetch.download([*urls, server.url + "good"], tmp_path / "file.bin", BODY_MD5)
    assert (tmp_path / "file.bin").read_bytes() == BODY
    with pytest.raises(DataError) as error:
        fetch.download(urls, tmp_path / "other.bin", BODY_MD5)
    assert_says(error, *urls, "Connection refused", "404", "md5")
    assert content(tmp_path) == ["file.bin"]


def test_several_downloads_at_once_do_not_meet(server: Server, tmp_path: Path) -> None:
    destination = tmp_path / "file.bin"
    failures: list[Exception] = []

    def fetch_it() -> None:
        try:
            fetch.download([server.url + "together"], destination, BODY_MD5)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=fetch_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    assert destination.read_bytes() == BODY
    assert content(tmp_path) == ["file.bin"]


def test_an_interrupt_leaves_nothing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        digest_size = 16

        def update(self, _chunk: bytes) -> None:
            assert len(content(tmp_path)) == 1
            raise KeyboardInterrupt

    monkeypatch.setattr(hashlib, "md5", lambda **_: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        fetch.download([server.url + "good"], tmp_path / "file.bin", BODY_MD5)
    assert content(tmp_path) == []


def test_what_a_killed_download_left_goes_after_an_hour(server: Server, tmp_path: Path) -> None:
    old, running, other = (tmp_path / name for name in (".file.bin.1.part", ".file.bin.2.part", ".else.bin.3.part"))
    for path in (old, running, other):
        path.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    os.utime(other, (time.time() - 7200,) * 2)
    fetch.download([server.url + "good"], tmp_path / "file.bin", BODY_MD5)
    assert content(tmp_path) == sorted([running.name, other.name, "file.bin"])


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError) as error:
        fetch.download([server.url + "good"], tmp_path / "file" / "x.bin", BODY_MD5)
    assert_says(error, tmp_path / "file" / "x.bin", "cannot write", "XDG_CACHE_HOME", "--data-dir")


def test_cifar10_is_downloaded_once_and_unpacked_once(
    archive: Path, server: Server, closed_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.folder = archive.parent
    monkeypatch.setattr(cifar10, "_PAGE", server.url)
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", fetch.digest(archive, "md5"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert_is_made_up_cifar10(load("cifar10"))
    folder = tmp_path / "convoy" / "cifar10"
    assert content(folder) == ["cifar-10-batches-bin", "cifar-10-binary.tar.gz"]
    assert content(folder / "cifar-10-batches-bin") == BATCH_FILES
    assert content(folder.parent) == ["cifar10"]

    monkeypatch.setattr(cifar10, "_PAGE", closed_url)
    (folder / "cifar-10-binary.tar.gz").unlink()
    assert_is_made_up_cifar10(load("cifar10"))
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=r"could not download cifar-10-binary\.tar\.gz"):
        load("cifar10")
    assert content(folder) == []


def test_fashion_mnist_downloads_only_what_the_cache_lacks(
    fashion: Path, server: Server, closed_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = linked(fashion, tmp_path, but="t10k-labels-idx1-ubyte")
    (web / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress((fashion / "t10k-labels-idx1-ubyte").read_bytes()))
    server.folder = web
    names = [f"{name}.gz" for name in IDX_FILES]
    monkeypatch.setattr(fashion_mnist, "_DEBIAN_FOLDER", tmp_path / "no-debian")
    monkeypatch.setattr(fashion_mnist, "_MIRRORS", (closed_url, server.url))
    monkeypatch.setattr(fashion_mnist, "_MD5", {name: fetch.digest(web / name, "md5") for name in names})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert_is_made_up_fashion(load("fashion-mnist"))
    folder = tmp_path / "cache" / "convoy" / "fashion-mnist"
    assert content(folder) == sorted(names)
    assert len(server.agents) == 4

    (folder / names[0]).unlink()
    assert_is_made_up_fashion(load("fashion-mnist"))
    assert len(server.agents) == 5
