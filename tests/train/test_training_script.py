"""A script with what reference scripts of timm and torchvision do, changed by one line, trains the same on three devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes import PLACE, ROOT

SOURCE = (ROOT / "tests" / "support" / "training_script.py").read_text()
BEFORE = "    model_without_ddp = model\n"
LINE = (
    "    model, optimizer, loader, loader_test = convoy.prepare("
    "model, optimizer, loader, loader_test, plan={plan!r}, speeds=(3.0, 1.0, 2.0))\n"
)
SAVES = '"model": model_without_ddp.state_dict(),', '"model": model.full_state_dict(),'
FIRST = "if args.rank == 0:", "if convoy.is_first():"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plain.py").write_text(SOURCE)
    return tmp_path


def changed(folder: Path, plan: str, *more: tuple[str, str]) -> str:
    """Write the script with the one line, and further changes; its name."""
    assert SOURCE.count(BEFORE) == 1
    source = "import convoy\n" + SOURCE.replace(BEFORE, LINE.format(plan=plan) + BEFORE)
    for old, new in more:
        assert source.count(old) == 1
        source = source.replace(old, new)
    (folder / "changed.py").write_text(source)
    return "changed.py"


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    outside = {name: value for name, value in os.environ.items() if name not in (*PLACE, "CONVOY_DEVICE")}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**outside, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def printed(folder: Path, *words: str) -> list[float]:
    """All numbers that a run prints."""
    done = run(folder, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch") == 3
    return [float(number) for number in re.findall(r"[\d.]+", done.stdout)]


CONVOY = ("-m", "convoy", "run", "--devices", "3")


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("data-by-speed", ["--clip-grad-norm", "0.5", "--mix-in-loop"]),
        ("model", ["--mix-in-loop"]),
        ("hybrid", []),
    ],
)
def test_one_line_trains_the_same(plan: str, options: list[str], folder: Path) -> None:
    """Mixup in the loop saw this device's part of the images beside all labels, and the averages were weighted by parts."""
    found = printed(folder, *CONVOY, changed(folder, plan), *options)
    assert found == pytest.approx(printed(folder, "plain.py", *options), abs=2e-9)


@pytest.mark.slow
def test_one_line_with_workers_that_mix(folder: Path) -> None:
    """Random numbers of a `collate_fn` are Convoy's: the same on any devices, other than a DataLoader's."""
    options = ["--mix-in-collate", "--workers", "2"]
    name = changed(folder, "model")
    assert printed(folder, *CONVOY, name, *options) == pytest.approx(printed(folder, name, *options), abs=2e-9)


def test_it_saves_the_whole_model_once_by_another_line(folder: Path) -> None:
    name = changed(folder, "model", SAVES, FIRST)
    printed(folder, *CONVOY, name, "--output", "whole.pth")
    printed(folder, "plain.py", "--output", "plain.pth")
    whole, plain = (torch.load(folder / f"{each}.pth", weights_only=True)["model"] for each in ("whole", "plain"))
    assert whole.keys() == plain.keys()
    assert all(torch.allclose(whole[key], plain[key], rtol=0, atol=1e-9) for key in plain)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--output", "pieces.pth"], r"call full_state_dict\(\) on every device"),
        (["--clip-grad-norm", "0.5"], r"use convoy.train.clip_grad_norm_\(model, max_norm\)"),
    ],
)
def test_what_would_see_pieces_alone_says_what_to_write(options: list[str], told: str, folder: Path) -> None:
    done = run(folder, *CONVOY, changed(folder, "model"), *options)
    assert done.returncode != 0
    assert re.search(told, done.stderr)
    assert not (folder / "pieces.pth").exists()
