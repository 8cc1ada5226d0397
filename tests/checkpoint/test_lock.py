"""One run at a time writes into a folder: a second is refused, and a killed run leaves no lock."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.checkpoint import Checkpointer, Progress, latest, save_checkpoint
from convoy.checkpoint.run_folder import LOCK
from convoy.errors import InputError

HOLDS = """
import fcntl, os, sys, time
handle = os.open(sys.argv[1] + "/.lock", os.O_RDWR | os.O_CREAT)
fcntl.lockf(handle, fcntl.LOCK_EX)
os.write(handle, f"process {os.getpid()} on {os.uname().nodename}".encode())
worker = os.fork()
if worker:
    print(worker, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def another_run(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that holds the folder's lock and has forked a longer-lived worker."""
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen([sys.executable, "-S", "-c", HOLDS, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        yield process
    finally:
        process.kill()
        os.kill(worker, 9)
        process.communicate()


def keeper(folder: Path) -> Checkpointer:
    model = nn.Linear(2, 1)
    return Checkpointer(folder, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = keeper(folder)
    first.begin(resume=False)
    first.at_evaluation(0.5)
    first.close()
    with another_run(folder) as other:
        message = f"another run writes there, process {other.pid} on {os.uname().nodename}"
        with pytest.raises(InputError, match=message):
            keeper(folder).begin(resume=True)
        with pytest.raises(InputError, match=message):
            save_checkpoint(folder, nn.Linear(2, 1), progress=Progress(7))
        assert latest(folder) == folder / "000001-step-0"
        other.kill()
        other.wait()
        second = keeper(folder)
        assert second.begin(resume=True).epoch == 1, "the worker of the killed run still lives"
        second.at_end()


def test_uncreatable_lock_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(InputError, match=r"cannot make or lock the folder .* for checkpoints: Is a directory"):
        keeper(tmp_path).begin(resume=True)
    with pytest.raises(InputError, match=r"cannot write the checkpoint of step 1 .*: Is a directory"):
        save_checkpoint(tmp_path, nn.Linear(2, 1), progress=Progress(1))


def test_training_survives_a_folder_locked_by_a_lost_device(tmp_path: Path) -> None:
    model, said = nn.Linear(2, 1), list[str]()
    here = Checkpointer(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, tell=said.append)
    with another_run(tmp_path):
        here.go_back(Progress(3))
        here.after_step()
    assert "another run writes there" in said[0]
    here.after_step()
    assert said[1] == f"saved {tmp_path / '000001-step-5'}"
