"""A training that loses devices ends with the numbers of one device: losses, weights, statistics of batch norm, momentum."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.chaos import TIGHT, Blow, Case, Outcome, alone, compared, work
from convoy.comm.group import Group
from convoy.runlog.reader import read_log
from tests.support.processes import on_processes


def train(group: Group, row: dict[str, Any], folder: str) -> None:
    """On every device."""
    work(Case(**{**row, "blows": tuple(Blow(**each) for each in row["blows"])}), Path(folder), group)


def outcome(case: Case, folder: Path) -> Outcome:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        losses, state = alone(case)
    finally:
        torch.set_num_threads(threads)
    results = on_processes(case.devices, "tests.train.test_members:train", asdict(case), str(folder))
    assert len(results) == case.devices
    return compared(case, folder, losses, state, [])


@pytest.mark.parametrize(
    ("plan", "optimizer", "devices", "blows", "every"),
    [
        ("data", "sgd", 3, {1: (5, 3)}, 1),
        ("data", "adam", 2, {0: (3, 8)}, 1),
        ("data-by-speed", "sgd", 3, {0: (4, 6), 1: (11, 2)}, 3),
        ("sharded", "adam", 3, {0: (6, 7)}, 1),
        ("sharded", "sgd", 3, {2: (7, 4)}, 3),
        ("master", "sgd", 3, {2: (6, 15)}, 1),
        ("model", "adam", 3, {0: (3, 9), 2: (9, 21)}, 1),
        ("hybrid", "sgd", 4, {3: (2, 5), 0: (8, 12), 1: (14, 2)}, 1),
    ],
)
def test_devices_that_are_killed_change_no_number(
    plan: str, optimizer: str, devices: int, blows: dict[int, tuple[int, int]], every: int, tmp_path: Path
) -> None:
    rows = tuple(Blow(device, "kill", step, call) for device, (step, call) in blows.items())
    case = Case(7, devices, plan, optimizer, every=every, blows=rows)
    found = outcome(case, tmp_path)
    assert found.apart < TIGHT
    assert len(found.told) == len(blows), "every device was to be lost while the others trained"


def test_a_training_that_shifts_shares_goes_on_after_a_loss(tmp_path: Path) -> None:
    found = outcome(Case(3, 3, "hybrid", "sgd", rebalance=True, blows=(Blow(0, "kill", 10, 4),)), tmp_path)
    assert found.apart < TIGHT
    assert len(found.told) == 1


def wait_for(text: str, path: Path, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + 60
    while text not in path.read_text():
        assert time.monotonic() < until_s
        assert process.poll() is None, path.read_text()
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_convoy_train_goes_on_without_device_0_and_its_log_and_checkpoints_too(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "convoy", "train", "--data", "digits", "--net", "two-conv:6:12", "--devices", "cpu,cpu,cpu",
        "--plan", "model", "--speeds", "1,1,1", "--batch", "64", "--epochs", "4", "--checkpoint", "run",
    ]  # fmt: skip
    printed = tmp_path / "printed"
    with printed.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=tmp_path, env={**os.environ, "COLUMNS": "200"})
    try:
        wait_for("epoch 1/4", printed, process)
        os.kill(children(process.pid)[0], signal.SIGKILL)
        assert process.wait(60) == 0, printed.read_text()
    finally:
        process.kill()
        process.wait()
    text = printed.read_text()
    assert "device 0 lost" in text
    assert "2 go on after step" in text
    assert "epoch 4/4" in text
    record = read_log(tmp_path / "run" / "log.jsonl")
    assert [line.step for line in record.steps] == list(range(4 * 23))
    assert record.fleet is not None
    assert len(record.fleet.devices) == 2
    newest = sorted((tmp_path / "run").glob("0*"))[-1]
    assert json.loads((newest / "checkpoint.json").read_text())["progress"]["step"] == 4 * 23
