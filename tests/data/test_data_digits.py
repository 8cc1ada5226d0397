"""The 1,797 digits inside scikit-learn."""

import gzip
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from convoy.data import digits, load
from convoy.errors import DataError, InputError
from tests.support.data_files import assert_says


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


@pytest.mark.parametrize("content", [None, b"not gzip", gzip.compress(b"1,2,3\n4,5,6\n", mtime=0)])
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
