"""Images that are read box by box: every box has the numbers of the whole image, and nothing else is read."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convoy.data import BoxedImage, open_image
from convoy.errors import DataError, InputError
from convoy.layout.layout import Box
from tests.support.counting import Counting

BOX = ((1, 3), (2, 7), (4, 9))


@pytest.fixture(autouse=True)
def _threads_of_zarr() -> Iterator[None]:
    yield
    if "zarr" in sys.modules:
        sys.modules["zarr.core.sync"].cleanup_resources()


def stored() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (2, 3, 11, 13), dtype=np.uint8)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


def written(kind: str, folder: Path, values: np.ndarray) -> str:
    path = str(folder / f"image{kind}")
    if kind == ".npy":
        np.save(path, values)
    elif kind == ".zarr":
        pytest.importorskip("zarr").create_array(path, data=values, chunks=(1, 1, 4, 4))
    else:
        tifffile = pytest.importorskip("tifffile")
        pytest.importorskip("zarr")
        tifffile.imwrite(path, values, tile=(16, 16), photometric="minisblack")
    return path


@pytest.mark.parametrize("kind", [".npy", ".zarr", ".tif"])
def test_box_of_a_file_has_the_numbers_of_the_file(kind: str, tmp_path: Path) -> None:
    values = stored()
    image = open_image(written(kind, tmp_path, values), 1)
    assert image.shape == (3, 11, 13)
    assert torch.equal(image.read(BOX), torch.from_numpy(values[1][slices(BOX)]))
    assert torch.equal(image.read(), torch.from_numpy(values[1]))


def test_channels_that_are_last_in_a_file_are_first_in_the_image() -> None:
    values = stored()[0].transpose(1, 2, 0)
    image = open_image(values, channels_last=True)
    assert torch.equal(image.read(BOX), torch.from_numpy(stored()[0][slices(BOX)]))


def test_changes_of_a_box_are_those_of_the_whole_image() -> None:
    mean, std = (100.0, 120.0, 90.0), (50.0, 60.0, 70.0)
    image = open_image(stored(), 0).to(torch.float64).normalise(mean, std)
    whole = torch.from_numpy(stored()[0]).double()
    whole = (whole - torch.tensor(mean).double()[:, None, None]) / torch.tensor(std).double()[:, None, None]
    changed = image.flip(-1).crop((1, 2), (8, 10)).flip(1).crop((0, 1), (7, 9))
    expected = whole.flip(-1)[:, 1:9, 2:12].flip(1)[:, :7, 1:10]
    assert changed.shape == tuple(expected.shape)
    for box in (BOX, ((0, 3), (0, 7), (0, 9)), ((0, 3), (6, 7), (0, 1)), ((0, 3), (2, 2), (0, 9))):
        assert torch.equal(changed.read(box), expected[slices(box)])


def test_only_the_box_is_read() -> None:
    source = Counting(stored())
    image = open_image(source, 0).flip(-1).crop((2, 2), (9, 11))
    assert source.bytes == 0
    assert source.bytes == 0 < image.read(BOX).numel() == source.bytes


def test_file_is_opened_in_each_process(tmp_path: Path) -> None:
    image = open_image(written(".npy", tmp_path, stored()), 1).flip(1)
    text = pickle.dumps(image)
    assert len(text) < 1000
    again: BoxedImage = pickle.loads(text)
    assert torch.equal(again.read(BOX), image.read(BOX))


@pytest.mark.parametrize("kind", [".npy", ".zarr", ".tif"])
def test_missing_file_is_named(kind: str, tmp_path: Path) -> None:
    for package in {".zarr": ["zarr"], ".tif": ["zarr", "tifffile"]}.get(kind, []):
        pytest.importorskip(package)
    with pytest.raises(DataError, match=rf"other\{kind} cannot be opened .*check its name"):
        open_image(tmp_path / f"other{kind}")


@pytest.mark.parametrize("kind", [".npy", ".tif"])
def test_truncated_file_is_named(kind: str, tmp_path: Path) -> None:
    path = Path(written(kind, tmp_path, stored()))
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"cannot be (opened|read).*copy the file again"):
        open_image(path, 1).read()


def test_damaged_chunk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.zarr"
    pytest.importorskip("zarr").create_array(path, data=stored(), chunks=stored().shape)
    (chunk,) = (file for file in (path / "c").rglob("*") if file.is_file())
    chunk.write_bytes(b"none")
    with pytest.raises(DataError, match=r"one.zarr cannot be read at .*copy the file again"):
        open_image(path, 1).read()


@pytest.mark.parametrize(
    ("work", "error", "why"),
    [
        (lambda: open_image("image.jpg"), InputError, r"image.jpg: images are read by box from .npy"),
        (lambda: open_image(stored(), 2), DataError, r"no image \(2,\): choose another index"),
        (lambda: open_image(np.array(["a"]), ()), DataError, "store numbers"),
        (lambda: open_image(stored(), 0).crop((4, 0), (8, 8)), InputError, r"a crop of \(8, 8\) from \(4, 0\)"),
        (lambda: open_image(stored(), 0).normalise((1.0,), (1.0,)), InputError, "1 means and 1 deviations for 3"),
    ],
)
def test_wrong_use_is_refused(work: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        work()
