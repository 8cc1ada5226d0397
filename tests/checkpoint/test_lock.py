"""Two runs in one folder: the second is told who the first is, and a killed run is in nobody's way."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convoy.checkpoint import Checkpointer, Progress, latest, save_checkpoint
from convoy.checkpoint.lock import LOCK, hold, holding, release
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.plan.presets import Speeds
from convoy.runtime.module import Distributed
from convoy.train import loop
from convoy.train.late_losses import LateLosses
from convoy.train.observer import Observers
from tests.support import nets
from tests.support.one_device import Training, by_name, one_trace
from tests.support.processes import ROOT, on_processes
from tests.support.threads import run_on_threads

# The lock by itself: the rest of its room imports torch, two seconds in each process.
HOLDS = (
    "import sys, time, types; from pathlib import Path; import convoy; room = types.ModuleType('convoy.checkpoint'); "
    "room.__path__ = [convoy.__path__[0] + '/checkpoint']; sys.modules[room.__name__] = room; "
    "from convoy.checkpoint.lock import hold; hold(Path(sys.argv[1])); "
)


@contextlib.contextmanager
def another_run(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has taken the folder."""
    folder.mkdir(exist_ok=True)
    script = HOLDS + "print(flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def keeper(folder: Path) -> Checkpointer:
    model = nn.Linear(2, 1)
    return Checkpointer(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_second_run_is_told_who_writes_there_and_a_killed_one_is_in_nobodys_way(tmp_path: Path) -> None:
    """Two `--resume` at once wrote into the same numbering, and `best` belonged to either."""
    folder = tmp_path / "run"
    first = keeper(folder)
    first.begin(resume=False)
    first.at_evaluation(0.5)
    first.close()
    assert sorted(path.name for path in folder.iterdir()) == ["000001-step-0", "best"], "no lock is left"
    with another_run(folder) as other:
        told = rf"another run writes into .*run: process {other.pid} on {os.uname().nodename}, since 20..-.*; wait until it"
        with pytest.raises(InputError, match=told):
            keeper(folder).begin(resume=True)
        with pytest.raises(InputError, match=told):
            save_checkpoint(folder, nn.Linear(2, 1), progress=Progress(7))
        assert latest(folder) == folder / "000001-step-0"
        other.kill()
        other.wait()
        assert (folder / LOCK).exists(), "as a killed run leaves it"
        second = keeper(folder)
        assert second.begin(resume=True).epoch == 1
        assert json.loads((folder / LOCK).read_text())["process"] == os.getpid()
        second.at_end()
        assert not (folder / LOCK).exists()


def test_only_device_0_takes_the_folder_and_all_are_told_that_it_is_taken(tmp_path: Path) -> None:
    training, whole = Training("two-conv", (6,)), nets.build("two-conv")
    plan = by_name("data", "two-conv", speeds=Speeds((1.0, 1.0, 1.0)))

    def device(group: Group) -> str:
        x, _ = training.batches(whole)[0]
        model = Distributed(whole, plan, group, x[:2])
        here = Checkpointer(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1))
        try:
            here.begin(resume=False)
        except InputError as error:
            return str(error)
        finally:
            here.close()
        return "began"

    with one_trace("two-conv", torch.float64):
        with another_run(tmp_path / "run") as other:
            said = run_on_threads(3, device, timeout_s=20)
            assert said == [said[0]] * 3
            assert f"process {other.pid} on " in said[0]
        assert run_on_threads(3, device, timeout_s=20) == ["began"] * 3


def test_a_process_that_prepares_batches_does_not_keep_the_lock_of_a_killed_run(tmp_path: Path) -> None:
    script = HOLDS + "import os; os.fork() or print(os.getpid(), flush=True); time.sleep(60)"
    run = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert run.stdout is not None
    worker = int(run.stdout.readline())
    try:
        with pytest.raises(InputError, match=f"process {run.pid} on"):
            hold(tmp_path)
        run.kill()
        run.wait()
        os.kill(worker, 0)
        with holding(tmp_path):
            pass
    finally:
        os.kill(worker, 9)
        run.stdout.close()


def take_turns(device: int, place: str) -> int:
    """Take and give back the lock again and again; a folder that both made at once would be an error."""
    folder, mine, got = Path(place), Path(place, "mine"), 0
    (folder / f"ready{device}").touch()
    while len(list(folder.glob("ready*"))) < 2:
        time.sleep(0.001)
    while got < 200:
        try:
            hold(folder)
        except InputError:
            continue
        mine.mkdir()
        mine.rmdir()
        got += 1
        release(folder)
    return got


def test_a_run_that_begins_while_another_ends_has_the_lock_or_is_told(tmp_path: Path) -> None:
    """The file is removed at the end: a lock on a removed file would be none."""
    both = on_processes(2, "tests.checkpoint.test_lock:take_turns", str(tmp_path), joined=False)
    assert both == [200, 200], "both were in at once"


def test_a_stopped_device_that_the_others_of_its_run_left_out_is_in_nobodys_way(tmp_path: Path) -> None:
    """It holds the lock as long as it is stopped: the next checkpoint of those that went on ended their training."""
    script = (
        HOLDS.replace("1]))", "1]), 'mine')")
        + "print(flush=True); sys.stdin.read(); from convoy.checkpoint.lock import release; "
    )
    script += "release(Path(sys.argv[1])); print(flush=True); time.sleep(60)"
    stopped = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert stopped.stdin is not None
    assert stopped.stdout is not None
    try:
        assert stopped.stdout.readline() == b"\n"
        with pytest.raises(InputError, match=f"process {stopped.pid} on"):
            hold(tmp_path, "another", from_lost=True)
        with pytest.raises(InputError, match=f"process {stopped.pid} on"):
            hold(tmp_path, "mine")
        hold(tmp_path, "mine", from_lost=True)
        stopped.stdin.close()
        assert stopped.stdout.readline() == b"\n"
        assert (tmp_path / LOCK).exists(), "who wakes up takes the lock of nobody"
        release(tmp_path)
        assert not (tmp_path / LOCK).exists()
    finally:
        stopped.kill()
        stopped.wait()
        stopped.stdout.close()


def test_what_a_process_holds_it_may_take_again(tmp_path: Path) -> None:
    """A notebook whose cell is run twice."""
    hold(tmp_path)
    hold(tmp_path / "." / "")
    with holding(tmp_path):
        pass
    release(tmp_path)
    assert (tmp_path / LOCK).exists()
    release(tmp_path)
    assert not (tmp_path / LOCK).exists()


def test_a_lock_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(InputError, match=r"cannot make the folder .* for checkpoints: Is a directory"):
        keeper(tmp_path).begin(resume=True)
    with pytest.raises(InputError, match=r"cannot write the checkpoint of step 1 .*: Is a directory"):
        save_checkpoint(tmp_path, nn.Linear(2, 1), progress=Progress(1))


def test_a_newcomer_takes_over_the_folder_of_a_device_that_is_stopped(tmp_path: Path) -> None:
    """It did not know which run it had come into, and its first checkpoint ended the training: "another run"."""
    parts = []
    for _ in range(2):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        keeper = Checkpointer(tmp_path, model, optimizer, every=1, tell=lambda _: None)
        training: Any = loop.Training(model, optimizer)
        parts.append(loop._Loop(training, None, Observers(), None, keeper, print, LateLosses(0)))  # type: ignore[arg-type]
    first, newcomer = parts
    assert first.keeper is not None
    assert newcomer.keeper is not None
    first.keeper.run = "this run"
    newcomer.take_over(json.loads(json.dumps(first.run_state())))
    with (tmp_path / LOCK).open("w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        stopped.write(json.dumps({"run": "this run"}))
        stopped.flush()
        newcomer.keeper.go_back(Progress(3))
        newcomer.keeper.after_step()
    assert (tmp_path / "000001-step-4").exists()
    newcomer.keeper.close()
