"""SIGTERM to launchers and agents: devices finish the step, then leave or end, and nothing remains."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.processes import ROOT
from tests.support.ssh_hosts import QUICK, eventually

PATHS = repr([str(ROOT), *(path for path in sys.path if path.endswith("-packages"))])
"""Where devices find Convoy, and no torch is loaded."""

DEVICE = """
import os, sys, threading, time
sys.path[:0] = PATHS
from pathlib import Path
from convoy.machine import roster
from convoy.machine.process import handle_signals
# As `watch_parent` does, which would load torch.
threading.Thread(target=lambda: (os.read(int(os.environ["CONVOY_PARENT_PIPE"]), 1), os._exit(2)), daemon=True).start()
rank, folder, how, members = os.environ["RANK"], Path(sys.argv[1]), sys.argv[2], tuple(range(int(sys.argv[3])))
heard = []
class Members:
    generation = None if how == "starting" else 1
    def leave(self): heard.append("leaves")
    def end(self): heard.append("ends")
roster.enter(f"a job in {folder}", int(rank), "cpu")
with handle_signals(Members()):
    roster.update(members=members if how != "starting" else ())
    path = folder / f"{rank}.new"
    path.write_text(str(os.getpid()))
    path.rename(folder / rank)
    while not heard or how == "deaf":
        time.sleep(0.02)
    time.sleep(0.3)  # the rest of the step
    (folder / f"{rank}.heard").write_text(" ".join(sorted(set(heard))))
sys.exit(2)
""".replace("PATHS", PATHS)

HERE = """
import sys
from convoy.launch import local, supervisor
from convoy.launch.host_job import JobOptions
limit_s, *argv = sys.argv[1:]
supervisor.LEAVE_S = float(limit_s)
local.CONVOY_COMMAND = (sys.executable, "-S", "-c")  # device 0 hosts the store, so that no torch is loaded here
sys.exit(local.launch_local(argv, ["cpu", "cpu"], JobOptions(goes_on=True), command=local.CONVOY_COMMAND))
"""

FLEET = """
import sys
from convoy.fleet import Device, Fleet, Host
from convoy.launch import fleet, supervisor
from convoy.launch.host_job import JobOptions
limit_s, *argv = sys.argv[1:]
supervisor.LEAVE_S = fleet.LEAVE_S = float(limit_s)
host = Host("this", "127.0.0.1", python=argv[1] + "/quick")
devices = Fleet((host,), tuple(Device(f"cpu{n}", "this", "cpu") for n in range(2)))
sys.exit(fleet.run_on_fleet(devices, argv, JobOptions(grace_s=1.0, goes_on=True)))
"""


@contextmanager
def started(
    folder: Path, launcher: str, how: str = "trains", members: int = 2, limit_s: float = 60.0
) -> Iterator[tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """Start a launcher in its own session with two training devices; check that nothing remains."""
    quick = folder / "quick"
    quick.write_text(
        QUICK.format(
            python=sys.executable, more=f"from convoy.launch import supervisor; supervisor.LEAVE_S = {limit_s}"
        )
    )
    quick.chmod(0o755)
    command = [sys.executable, "-c", launcher, str(limit_s), DEVICE, str(folder), how, str(members)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    devices: list[psutil.Process] = []
    try:
        assert eventually(lambda: all((folder / rank).exists() for rank in "01"))
        devices += [psutil.Process(int((folder / rank).read_text())) for rank in "01"]
        yield process, devices
        process.communicate(timeout=30)
        assert not psutil.wait_procs(devices, timeout=10)[1]
    finally:
        for each in (*devices, process):
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        process.communicate()


def heard(folder: Path) -> list[str]:
    return [path.read_text() if (path := folder / f"{rank}.heard").exists() else "" for rank in "01"]


@pytest.mark.parametrize(
    ("launcher", "members", "what"),
    [pytest.param(HERE, 3, "leaves", id="here-some"), pytest.param(FLEET, 2, "ends", id="fleet-all")],
)
def test_sigterm_finishes_the_step_then_ends_or_leaves(tmp_path: Path, launcher: str, members: int, what: str) -> None:
    """Regression: SIGTERM killed devices within the step; nothing was saved, and the others saw a loss."""
    with started(tmp_path, launcher, members=members) as (process, _):
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.startswith("SIGTERM: ending 2 devices: training devices end after the step")
    assert heard(tmp_path) == [what, what]


def test_two_sigterms_still_finish_the_step(tmp_path: Path) -> None:
    """A shutdown signals all processes, so the launcher's forwarded signal must not count as a second one."""
    with started(tmp_path, HERE, members=3) as (process, _):
        os.killpg(process.pid, signal.SIGTERM)
    assert heard(tmp_path) == ["leaves", "leaves"]


def test_device_that_does_not_finish_the_step_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, HERE, "deaf", limit_s=0.3) as (process, _):
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert heard(tmp_path) == ["", ""]


def test_devices_before_training_end_at_once(tmp_path: Path) -> None:
    with started(tmp_path, HERE, "starting") as (process, _):
        process.terminate()
    assert heard(tmp_path) == ["", ""]


def test_sigterm_to_the_host_agent_makes_its_devices_leave(tmp_path: Path) -> None:
    """Regression: at shutdown sshd ends too, and the closed command channel killed devices within the step."""
    with started(tmp_path, FLEET, members=3) as (process, devices):
        agent = devices[0].parent()
        assert agent is not None
        agent.terminate()
        process.kill()
    assert heard(tmp_path) == ["leaves", "leaves"]
    _, left = psutil.wait_procs([agent], timeout=10.0)
    assert not [each for each in left if each.status() != psutil.STATUS_ZOMBIE]
