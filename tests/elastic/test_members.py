"""A training that loses devices matches one device: losses, weights, batch norm statistics, momentum."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.api import distribute, is_first, loader, make_plan
from convoy.comm.group import Group
from convoy.elastic.members import Attempt, Members
from convoy.runlog.reader import read_log
from convoy.train.loop import accuracy
from lab.chaos import TIGHT, Blow, Case, alone, compared, make_data, make_net, strike, whole_state, work
from tests.support.processes import on_processes
from tests.support.slow import most_slow


def train(group: Group, row: dict[str, Any], folder: str) -> None:
    """Train on every device."""
    work(Case(**{**row, "blows": tuple(Blow(**each) for each in row["blows"])}), Path(folder), group)


@pytest.mark.parametrize(
    ("plan", "optimizer", "devices", "blows", "every"),
    most_slow(
        2,
        [
            ("sharded", "adam", 3, {0: (6, 7)}, 1),
            ("model", "adam", 3, {0: (3, 9), 2: (9, 21)}, 1),
            ("data-by-speed", "sgd", 3, {0: (4, 6), 1: (11, 2)}, 3),
            ("hybrid", "sgd", 4, {3: (2, 5), 0: (8, 12), 1: (14, 2)}, 1),
        ],
    ),
)
def test_killed_processes_change_no_number(
    plan: str, optimizer: str, devices: int, blows: dict[int, tuple[int, int]], every: int, tmp_path: Path
) -> None:
    """Chaos shows the same on threads; here the processes really end."""
    rows = tuple(Blow(device, "kill", step, call) for device, (step, call) in blows.items())
    case = Case(7, devices, plan, optimizer, every=every, blows=rows)
    losses, state = alone(case)
    on_processes(case.devices, "tests.elastic.test_members:train", asdict(case), str(tmp_path))
    found = compared(case, tmp_path, losses, state, [])
    assert found.apart < TIGHT
    assert len(found.told) == len(blows), "every device was to be lost while the others trained"


def wait_for(text: str, path: Path, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + 60
    while text not in path.read_text():
        assert time.monotonic() < until_s
        assert process.poll() is None, path.read_text()
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_convoy_train_continues_log_and_checkpoints_without_device_0(tmp_path: Path) -> None:
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
    assert "device 0 (" in text
    assert " was lost: " in text
    assert "2 continue after step" in text
    assert "epoch 4/4" in text
    record = read_log(tmp_path / "run" / "log.jsonl")
    assert [line.step for line in record.steps] == list(range(4 * 23))
    assert record.fleet is not None
    assert len(record.fleet.devices) == 2
    newest = sorted((tmp_path / "run").glob("0*"))[-1]
    assert json.loads((newest / "checkpoint.json").read_text())["progress"]["step"] == 4 * 23


def own_loop(
    group: Group, plan: str, victims: dict[str, list[int]], folder: str = "", tests_first: bool = False
) -> dict[str, Any]:
    """Run a user-written loop with tests between epochs on every device; victims kill themselves in it."""
    torch.manual_seed(0)
    case = Case(5, devices=3, plan=plan)
    net, example = make_net(), torch.zeros(2, 2, 8, 8, dtype=torch.float64)
    model: Any = net
    if group.devices > 1:
        made = make_plan(plan, net, example, case.batch, group, speeds=[1.0] * group.devices)
        model = distribute(net, made, group, example)
    part = model if group.devices > 1 else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train, test = loader(make_data(case), case.batch, part), loader(make_data(case), case.batch, part, shuffle=False)
    members = Members(model, optimizer) if part is not None else None
    if members is not None and (blow := victims.get(str(group.device))):
        strike(members, Blow(group.device, "kill", *blow), Path(folder))
    losses: dict[int, float] = {}

    def tested() -> float:
        return accuracy(model, test) if members is None else members.repeated(lambda: accuracy(model, test))

    tests = [tested()] if tests_first else []
    for epoch in range(3):
        model.train()
        for batch, (x, y) in enumerate(train):
            with nullcontext(Attempt(finished=True)) if members is None else members.step() as attempt:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            if attempt.finished:
                losses[members.steps if members is not None else 1 + epoch * len(train) + batch] = float(loss.detach())
        tests.append(tested())
    state = whole_state(model, optimizer) if members is None else members.repeated(lambda: model.full_state_dict())
    if members is not None:
        members.close()
    steps = [losses.get(step) for step in range(1, 19)]
    weights = {key: tensor.flatten().tolist() for key, tensor in state.items() if "/" not in key}
    return {"losses": steps, "tests": tests, "weights": weights, "first": is_first()}


@pytest.mark.parametrize(
    ("plan", "victims"),
    most_slow(
        2,
        [
            ("data", {"0": [6, 1]}),  # at the beginning of an epoch, or in the test before
            ("model", {"0": [4, 12], "2": [11, 30]}),
            ("data", {"1": [0, 4]}),  # during the first snapshot
            ("sharded", {"1": [5, 9], "0": [12, 2]}),
        ],
    ),
)
def test_a_script_repeats_the_step_with_the_same_batch(
    plan: str, victims: dict[str, list[int]], tmp_path: Path
) -> None:
    alone = on_processes(1, "tests.elastic.test_members:own_loop", plan, {})[0]
    results = on_processes(3, "tests.elastic.test_members:own_loop", plan, victims, str(tmp_path))
    left = [row for device, row in enumerate(results) if str(device) not in victims]
    assert left
    assert all(results[int(device)] is None for device in victims), "who was to be killed was not"
    assert [row["first"] for row in left] == [True] + [False] * (len(left) - 1), "somebody else prints and saves now"
    for row in left:
        assert row["tests"] == alone["tests"]
        assert row["losses"] == pytest.approx(alone["losses"], rel=TIGHT)
        for key, weights in alone["weights"].items():
            assert row["weights"][key] == pytest.approx(weights, rel=TIGHT, abs=TIGHT)


def test_a_loss_in_a_test_before_the_first_step_is_recovered(tmp_path: Path) -> None:
    alone = on_processes(1, "tests.elastic.test_members:own_loop", "model", {}, "", True)[0]
    results = on_processes(3, "tests.elastic.test_members:own_loop", "model", {"1": [0, 6]}, str(tmp_path), True)
    assert results[1] is None, "who was to be killed was not"
    for row in results[::2]:
        assert row["tests"] == alone["tests"]
        assert row["losses"] == pytest.approx(alone["losses"], rel=TIGHT)


def test_shards_lost_before_they_were_copied_end_the_job(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"model shards of lost device 1: start it again"):
        on_processes(3, "tests.elastic.test_members:own_loop", "model", {"1": [0, 1]}, str(tmp_path))
