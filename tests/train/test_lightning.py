"""Lightning trains a Convoy model as on one device. Skipped if it is not installed: no extra includes it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import PLACE, ROOT

if importlib.util.find_spec("lightning") is None:
    pytest.skip("the package 'lightning' is not installed", allow_module_level=True)

SCRIPT = ROOT / "examples" / "lightning_trainer.py"


def loss_of(folder: Path, *words: str, plan: str) -> float:
    script = folder / "script.py"
    script.write_text(
        SCRIPT.read_text().replace('"data-by-speed"', f'"{plan}", speeds=SPEEDS').replace("SPEEDS", words[-1])
    )
    outside = {name: value for name, value in os.environ.items() if name not in (*PLACE, "CONVOY_DEVICE")}
    done = subprocess.run(
        [sys.executable, *words[:-1], str(script)], cwd=folder, capture_output=True, text=True, timeout=110, check=False,
        env={**outside, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"^loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    return float(found[1])


@pytest.mark.parametrize("plan", ["data-by-speed", "model"])
def test_lightning_trainer_on_three_devices_matches_one(plan: str, tmp_path: Path) -> None:
    alone = loss_of(tmp_path, "(1.0,)", plan=plan)
    assert loss_of(tmp_path, "-m", "convoy", "run", "--devices", "3", "(3.0, 1.0, 2.0)", plan=plan) == pytest.approx(
        alone, abs=1e-4
    )
    assert (tmp_path / "weights.pt").exists()
