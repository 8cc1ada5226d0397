"""Values of --data, and the options of each kind."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from convoy.data import NAMES, check, load
from convoy.data.augment import Augment, augment_steps
from convoy.errors import InputError
from tests.support.data_files import assert_says

OWN = """
import torch
from torch.utils.data import TensorDataset

def build():
    x_NCHW = torch.arange(20, dtype=torch.uint8)[:, None, None, None].expand(20, 1, 2, 2).contiguous()
    return TensorDataset(x_NCHW, torch.arange(20) % 2)

def pair():
    both = build()
    return both, both

def broken():
    return [][1]

number = 3
"""


def test_an_unknown_name_lists_the_choices() -> None:
    assert NAMES == ("digits", "fashion-mnist", "cifar10", "cifar100")
    with pytest.raises(InputError) as error:
        load("imagenet")
    assert_says(error, "unknown data set 'imagenet': choose one of cifar10, cifar100, digits, fashion-mnist, ")
    assert_says(error, "folder:PATH", "module:function")


def test_importing_the_package_imports_neither_torch_nor_scikit_learn_nor_torchvision() -> None:
    program = "import sys, convoy.data; sys.exit(bool({'sklearn', 'torch', 'torchvision', 'PIL'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("digits", None, 32), "--image-size 32 with --data digits: only images of a folder are resized"),
        (
            ("cifar10", None, None, 0.5),
            "--test-fraction 0.5 with --data cifar10: this data set has test images of its own",
        ),
        (("folder:x", Path("d")), "--data-dir d with --data folder:x: only the data sets by name"),
        (("my.pets:build", Path("d")), "--data-dir d with --data my.pets:build"),
        (("my.pets:build", None, 32), "--image-size 32 with --data my.pets:build"),
        (("folder:x", None, 0), "--image-size 0 with --data folder:x: give a side of 1 pixel or more"),
        (
            ("folder:x", None, None, 0.0),
            "--test-fraction 0.0 with --data folder:x: give a fraction between 0 and 1, e.g. 0.2",
        ),
        (("my.pets:build", None, None, 1.0), "--test-fraction 1.0 with --data my.pets:build: give"),
    ],
)
def test_conflicting_options_are_refused_before_reading_data(options: tuple, says: str) -> None:
    with pytest.raises(InputError) as error:
        check(*options)
    assert_says(error, says)
    check("folder:x", None, 224, 0.1)
    check("my.pets:build", None, None, 0.1)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "torchvision is not installed, and .* needs it: pip install 'convoy-train[images]'"),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "does not import with torch .*install both at once",
        ),
    ],
)
def test_broken_torchvision_error_gives_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, says: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    if source is None:
        monkeypatch.setitem(sys.modules, "torchvision", None)
    else:
        (tmp_path / "torchvision.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "FashionMNIST" / "raw").mkdir(parents=True)
    for use in (
        lambda: load(f"folder:{tmp_path}"),
        lambda: load("fashion-mnist", tmp_path),
        lambda: Augment(augment_steps("flip"))(torch.zeros(1, 3, 5, 7), [0], 0, 0),
    ):
        with pytest.raises(InputError, match=says.replace("[", r"\[")):
            use()


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a module in the working folder."""
    (tmp_path / "my_pets.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield "my_pets"
    sys.modules.pop("my_pets", None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("my_pets:number", "number is a int; write a function that takes nothing and returns a data set"),
        ("my_pets:broken", "failed (IndexError: list index out of range, my_pets.py line 14); correct it there"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_missing_or_failing_data_functions_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        load(text)
    assert_says(error, text, says)
