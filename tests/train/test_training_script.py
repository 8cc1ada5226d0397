"""A script with the features of timm's and torchvision's reference scripts, plus one line, trains the same on three
devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes import PLACE, ROOT
from tests.support.scripts import on_forks

SOURCE = (ROOT / "tests" / "support" / "training_script.py").read_text()
BEFORE = "    model_without_ddp = model\n"
LINE = (
    "    model, optimizer, loader, loader_test = convoy.prepare("
    "model, optimizer, loader, loader_test, plan={plan!r}, speeds=(3.0, 1.0, 2.0))\n"
)
ONE, TWO = (("speeds=(3.0, 1.0, 2.0)", f"speeds={speeds}") for speeds in ((1.0,), (3.0, 1.0)))
SAVES = '"model": model_without_ddp.state_dict(),', '"model": model.full_state_dict(),'
FIRST = "if args.rank == 0:", "if convoy.is_first():"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plain.py").write_text(SOURCE)
    return tmp_path


def changed(folder: Path, plan: str, *more: tuple[str, str]) -> Path:
    """Write the script with the one line and further changes."""
    assert SOURCE.count(BEFORE) == 1
    source = "import convoy\n" + SOURCE.replace(BEFORE, LINE.format(plan=plan) + BEFORE)
    for old, new in more:
        assert source.count(old) == 1
        source = source.replace(old, new)
    (folder / "changed.py").write_text(source)
    return folder / "changed.py"


def by_command(script: Path, *options: str) -> str:
    """Return the script's output on two devices of `convoy run`."""
    outside = {name: value for name, value in os.environ.items() if name not in (*PLACE, "CONVOY_DEVICE")}
    done = subprocess.run(
        [sys.executable, "-m", "convoy", "run", "--devices", "2", script.name, *options], cwd=script.parent,
        capture_output=True, text=True,
        env={**outside, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def first(devices: int, script: Path, *options: str) -> str:
    return on_forks(devices, script, *options)[0][0]


def numbers(printed: str) -> list[float]:
    assert printed.count("epoch") == 3
    return [float(number) for number in re.findall(r"[\d.]+", printed)]


@pytest.mark.slow
def test_prepare_line_trains_the_same_as_a_script(folder: Path) -> None:
    options = ["--clip-grad-norm", "0.5", "--mix-in-loop"]
    found = by_command(changed(folder, "data-by-speed", TWO), *options)
    assert numbers(found) == pytest.approx(numbers(first(1, folder / "plain.py", *options)), abs=2e-9)


def test_prepared_script_trains_the_same_and_saves_once(folder: Path) -> None:
    found = first(3, changed(folder, "hybrid", SAVES, FIRST), "--mix-in-loop", "--output", "whole.pth")
    expected = first(1, folder / "plain.py", "--mix-in-loop", "--output", "plain.pth")
    assert numbers(found) == pytest.approx(numbers(expected), abs=2e-9)
    whole, plain = (torch.load(folder / f"{each}.pth", weights_only=True)["model"] for each in ("whole", "plain"))
    assert whole.keys() == plain.keys()
    assert all(torch.allclose(whole[key], plain[key], rtol=0, atol=1e-9) for key in plain)
