"""The command itself, killed with all its processes in mid-training, and resumed on another fleet by another plan."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

from convoy import cli
from convoy.checkpoint import Checkpointer
from convoy.runlog.writer import RunLog
from convoy.train.loader import Loader
from convoy.train.loop import Training, fit
from tests.support.processes import PLACE, ROOT

HOW = [
    *(
        "--data",
        "tests.support.augmented_digits:build",
        "--limit",
        "120",
        "--net",
        "two-conv:4:6",
        "--batch",
        "12",
        "--epochs",
        "3",
        "--lr",
        "0.05",
    ),
    *("--schedule", "cosine", "--warmup-epochs", "1", "--ema", "0.9", "--clip-norm", "1", "--augment", "crop,flip"),
    *("--seed", "3"),
]
"""Three epochs of ten steps, with everything that has a state or depends on the step's number."""

LIMIT_S = 120.0


def words(*options: str) -> list[str]:
    return [sys.executable, "-m", "convoy", "train", *HOW, *options]


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in (*PLACE, "CONVOY_DEVICE")}
    return own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def trained(*options: str, cwd: Path) -> str:
    done = subprocess.run(
        words(*options), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def under_way(*options: str, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (cwd / "output").open("wb") as output:
        launcher = subprocess.Popen(
            words(*options), cwd=cwd, env=environment(), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield launcher
    finally:
        kill(launcher)


def kill(launcher: subprocess.Popen[bytes]) -> None:
    """All at once, as a machine that loses its power."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(launcher.pid)
        everybody = [parent, *parent.children(recursive=True)]
        for process in everybody:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everybody[1:], timeout=20)
    launcher.wait(timeout=20)


def steps(log: Path) -> dict[int, float]:
    """The loss of each step, as it was told last. A line that was cut off is none."""
    found = {}
    for line in log.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            if row["what"] == "step":
                found[row["step"]] = row["loss"]
    return found


@pytest.mark.slow  # half a minute
def test_a_training_killed_with_all_its_devices_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two devices with a worker each that prepares batches; then three with another plan. Order, augmentation, schedule,
    momentum, average: the losses are those of one device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", words("--devices", "1", "--speeds", "1", "--log", "alone.jsonl")[2:])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "Training on 1 device, plan" in capsys.readouterr().out
    keeping = ["--checkpoint", "run", "--checkpoint-steps", "1", "--log", "cut.jsonl"]
    two = ["--devices", "2", "--speeds", "3,1", "--plan", "data-by-speed", "--workers", "1"]
    with under_way(*two, *keeping, cwd=tmp_path) as launcher:
        deadline_s = time.monotonic() + LIMIT_S
        while len(list((tmp_path / "run").glob("*-step-*"))) < 3:
            assert launcher.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        kill(launcher)
    killed_at = max(steps(tmp_path / "cut.jsonl"))
    assert killed_at < 29, "it was to be killed in mid-training"
    said = trained("--devices", "3", "--speeds", "1,2,1", "--plan", "hybrid", *keeping, "--resume", cwd=tmp_path)
    assert "goes on from run/" in said
    alone, found = steps(tmp_path / "alone.jsonl"), steps(tmp_path / "cut.jsonl")
    assert sorted(found) == list(range(30))
    assert list(found.values()) == pytest.approx([alone[step] for step in found], rel=1e-3), "float32"


def test_what_is_saved_was_written_to_the_log(tmp_path: Path) -> None:
    """A run was killed when it had saved step 2 and not yet told its loss: it went on with step 3, and nobody ever told it."""

    class SavedAndKilled(Checkpointer):
        def after_step(self) -> None:
            super().after_step()
            if self.progress.step == 3:
                raise KeyboardInterrupt

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(10, 4), torch.randint(0, 2, (10,)))
    loaders = Loader(samples, 2), Loader(samples, 2, shuffle=False)

    def run(keeper: Checkpointer, resume: bool) -> None:
        with RunLog(tmp_path / "log.jsonl", keeper.begin(resume).step) as log:
            fit(Training(model, optimizer), *loaders, 1, log, keeper=keeper)

    with pytest.raises(KeyboardInterrupt):
        run(SavedAndKilled(tmp_path / "run", model, optimizer, every=1), resume=False)
    run(Checkpointer(tmp_path / "run", model, optimizer), resume=True)
    assert list(steps(tmp_path / "log.jsonl")) == list(range(5))
