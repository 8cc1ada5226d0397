"""A first device that is stopped: what the others print is shown, and the job ends in bounded time."""

import subprocess
import sys
from pathlib import Path

import pytest

from convoy.launch import local, supervisor
from convoy.launch.host_job import JobOptions
from tests.launch.test_leaving import FLEET, PATHS
from tests.support.ssh_fleets import QUICK

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
    monkeypatch.setattr(supervisor, "LOOK_S", 0.2)
    monkeypatch.setattr(local, "CONVOY_COMMAND", quick)
    status = local.launch_local([DEVICE], ["cpu"] * 3, JobOptions(goes_on=True, silence_s=2.0), command=quick)
    assert (status, capfd.readouterr().out) == (0, "device 1 speaks\n")


def test_on_hosts(tmp_path: Path) -> None:
    quick = tmp_path / "quick"
    quick.write_text(
        QUICK.format(python=sys.executable, more="from convoy.launch import supervisor; supervisor.LOOK_S = 0.2")
    )
    quick.chmod(0o755)
    code = FLEET.replace("range(2)", "range(3)").replace("goes_on=True", "goes_on=True, silence_s=2.0")
    command = [sys.executable, "-c", code, "60", DEVICE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "device 1 speaks\n"), done.stderr
