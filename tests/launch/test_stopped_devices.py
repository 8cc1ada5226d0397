"""A stopped device 0: the others' output is shown, and the job ends in bounded time."""

import sys

import pytest

from convoy.launch import local, supervisor
from convoy.launch.host_job import JobOptions
from tests.launch.test_leaving import PATHS

DEVICE = """
import os, signal, sys, threading, time
sys.path[:0] = PATHS
from convoy.machine import roster
threading.Thread(target=lambda: (os.read(int(os.environ["CONVOY_PARENT_PIPE"]), 1), os._exit(2)), daemon=True).start()
rank = int(os.environ["RANK"])
roster.enter("a job of this test", rank, "cpu")
roster.update(members=(0, 1, 2))
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1)
roster.update(members=(1, 2))
if rank == 1:
    print("device 1 speaks", flush=True)
time.sleep(0.5 + rank / 2)
""".replace("PATHS", PATHS)


def test_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It held back all that the others printed, and its launcher waited for it for ever."""
    quick = (sys.executable, "-S", "-c")  # no torch is loaded
    monkeypatch.setattr(local, "CONVOY_COMMAND", quick)
    monkeypatch.setattr(supervisor, "STOPPED_S", 2.0)
    status = local.launch_local([DEVICE], ["cpu"] * 3, JobOptions(goes_on=True), command=quick)
    assert (status, capfd.readouterr().out) == (0, "device 1 speaks\n")
