"""Starting the devices of one machine: their environment, exit reports, and complete cleanup."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from convoy.errors import DeviceLostError, InputError
from convoy.launch.exit_status import Ending, conclude
from convoy.launch.host_job import JobOptions
from convoy.launch.local import launch_local
from tests.support.processes import ROOT

QUICK = (sys.executable, "-S", "-c")
"""A device that needs no torch starts at once."""

PRELUDE = "import os, signal, sys, time\nRANK = int(os.environ['RANK'])\n"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.launch.supervisor.TERMINATE_S", 0.5)


def launch(script: str, devices: Sequence[str] = ("cpu", "cpu"), **options: float) -> int:
    return launch_local([PRELUDE + script], devices, JobOptions(**options), command=QUICK)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- devices that end well

TRAIN = """
import json, os, sys, torch
from convoy.comm.group import Message
from convoy.comm.processes import join

group = join(timeout_s=30)
got = torch.zeros(2)
peer = 1 - group.device
group.exchange([Message(peer, torch.full((2,), group.device + 1.0))], [Message(peer, got)])
told = group.agree("device", os.environ["CONVOY_DEVICE"])
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "TOPIC")
report = [got.tolist(), list(told), str(group.torch_device), {name: os.environ[name] for name in names}]
with open(f"{sys.argv[1]}/{group.device}", "w") as file:
    json.dump(report, file)
print("device", group.device, "is done")
"""


def test_devices_connect_and_exit_silently(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script closes nothing and warnings are errors, yet the interpreters exit silently."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    monkeypatch.setenv("TOPIC", "ships")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    status = launch_local([str(tmp_path)], ["cpu", "cpu:0"], command=(sys.executable, "-W", "error", str(script)))
    assert status == 0
    reports = [json.loads((tmp_path / str(device)).read_text()) for device in range(2)]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for device, (got, told, torch_device, variables) in enumerate(reports):
        assert got == [2.0 - device] * 2
        assert told == ["cpu", "cpu:0"]
        assert torch_device == told[device]
        expected = [str(device), str(device), "2", "2", os.environ.get("OMP_NUM_THREADS", threads), "ships"]
        assert list(variables.values()) == expected
    output = capfd.readouterr()
    assert output.out == "device 0 is done\n"
    assert output.err == ""


STUMBLE = """
import os, sys, torch
from convoy.errors import DeviceLostError
from convoy.comm.group import Message
from convoy.comm.processes import join

group = join(timeout_s=30)
if group.device == 1:
    raise ValueError("no such image")
try:
    group.exchange([], [Message(1, torch.zeros(1))])
except DeviceLostError as error:
    with open(sys.argv[1], "w") as file:
        file.write(str(error))
    sys.exit(2)
"""


def test_failing_script_informs_the_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script closes nothing itself, so the error is sent when the interpreter exits."""
    script, told = tmp_path / "train.py", tmp_path / "told"
    script.write_text(STUMBLE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(DeviceLostError, match=r"(?s)device 1 \(cpu\) ended with exit status 1.*no such image$"):
        launch_local([str(told)], ["cpu", "cpu"], command=(sys.executable, str(script)))
    assert "left because of its own error: ValueError: no such image" in told.read_text()


# ---------------------------------------------------------------------------------------------- devices that do not


def test_a_killed_device_is_named_and_the_others_end() -> None:
    """The other one, which would wait for a minute, is ended."""
    with pytest.raises(
        DeviceLostError, match=r"(?s)device 1 \(cpu:0\) was killed by SIGKILL.*\n  short of breath"
    ) as caught:
        launch(
            "if RANK == 0: time.sleep(60)\n"
            "print(*range(20_000), 'short of breath', sep='\\n', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)",
            ["cpu", "cpu:0"],
            grace_s=0.3,
        )
    assert caught.value.device == 1
    assert len(str(caught.value).splitlines()) < 40, "the last lines are shown"


def test_a_device_that_is_killed_in_start_up_is_named_at_once() -> None:
    """Regression: with recovery the others waited for the whole rendezvous limit and blamed the network."""
    with pytest.raises(DeviceLostError, match=r"device 1 \(cpu\) was killed by SIGKILL"):
        launch("if RANK == 0: time.sleep(100)\nos.kill(os.getpid(), 9)", goes_on=True)


def test_device_that_ignores_sigterm_is_killed() -> None:
    with pytest.raises(DeviceLostError, match=r"device 0 \(cpu\) ended with exit status 7. Its own output is above"):
        launch(
            "if RANK == 0: time.sleep(0.5); sys.exit(7)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
            grace_s=0.2,
        )


def test_common_error_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("print('error: no such plan: fast', file=sys.stderr); sys.exit(2)", ["cpu"] * 4) == 2
    assert capfd.readouterr().err == "error: no such plan: fast\n"


def test_unstartable_command_is_an_error() -> None:
    with pytest.raises(InputError, match="no-such-program"):
        launch_local([], ["cpu", "cpu"], command=("no-such-program",))
    with pytest.raises(InputError, match="no devices"):
        launch_local([], [])


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=rf"127.0.0.1 port {port}: Address already in use.*another port"):
            launch(f"open('{tmp_path}/started', 'w')", port=port)
    assert not list(tmp_path.iterdir())


def ending(device: int, status: int, *lines: str, stopped: bool = False) -> Ending:
    return Ending(device, "cpu", status, stopped, lines)


LOST_2 = "error: device 2 (host a, cpu) left because of its own error: DataError: no such image"
TRACE_2 = "convoy.errors.DeviceLostError: device 2 (host a, cpu) was lost: it is frozen"


@pytest.mark.parametrize(
    ("endings", "lost", "words"),
    [
        # A signal outranks errors, even those that came first.
        ([ending(0, 2), ending(1, 2, LOST_2), ending(2, -9, "x"), ending(3, -15, stopped=True)], 2, "SIGKILL"),
        ([ending(0, 2), ending(1, -11)], 1, "SIGSEGV. It left no error output"),
        ([ending(1, 1, "OSError: the connection closed"), ending(2, -9)], 2, "SIGKILL"),
        # A crash outranks errors; scripts without Convoy's command end with a traceback when another is lost.
        ([ending(1, 1, TRACE_2), ending(2, 1, "ValueError: x"), ending(0, 1)], 2, "ValueError: x"),
        ([ending(1, 1, TRACE_2), ending(0, 1)], 0, "exit status 1. Its own output is above"),
        ([ending(1, 1, TRACE_2), ending(2, -9, stopped=True), ending(3, 1, TRACE_2)], 2, "frozen"),
    ],
)
def test_first_cause_is_found_among_the_exits(endings: list[Ending], lost: int, words: str) -> None:
    with pytest.raises(DeviceLostError, match=f"(?s).*{words}") as caught:
        conclude(endings)
    assert caught.value.device == lost


@pytest.mark.parametrize(
    ("endings", "status", "lines"),
    [
        ([ending(0, 0), ending(1, 0)], 0, []),
        # Device 0's own words are on the terminal already.
        ([ending(0, 2)], 2, []),
        ([ending(1, 2, "error: no plan"), ending(0, 2)], 2, []),
        (
            [ending(2, 2, "error: no such image"), ending(1, 2, LOST_2), ending(0, 2)],
            2,
            ["error on device 2 (cpu): no such image"],
        ),
        # Device 0 was ended, or ended well.
        ([ending(2, 2, "error: no image"), ending(0, -15, stopped=True)], 2, ["error on device 2 (cpu): no image"]),
        ([ending(1, 2, "noise", "error: a", "b"), ending(2, 2, "error: a", "b")], 2, ["error: a\nb"]),
        ([ending(1, 2, "Usage: convoy")], 2, ["error on device 1 (cpu): Usage: convoy"]),
    ],
)
def test_unseen_errors_are_printed(
    endings: list[Ending], status: int, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert conclude(endings) == status
    assert capsys.readouterr().err == "".join(f"{line}\n" for line in lines)


def test_recovering_job_exits_as_its_last_devices(capsys: pytest.CaptureFixture[str]) -> None:
    refused = [ending(1, -9), ending(2, 2, "error: asked to stop"), ending(0, 2)]
    lost = DeviceLostError(3, "device 3 was lost with its host")
    assert conclude(refused, lost, goes_on=True) == 2
    assert conclude([*refused[:2], ending(0, 0)], lost, goes_on=True) == 0
    with pytest.raises(DeviceLostError, match="device 1"):
        conclude(refused)
    with pytest.raises(DeviceLostError, match="device 3 was lost with its host"):
        conclude([], lost, goes_on=True)
    reader_gone = [ending(0, 141), ending(1, 2, "error: device 0 left because of its own error: SystemExit: 1")]
    assert [conclude(reader_gone, goes_on=goes_on) for goes_on in (False, True)] == [141, 141]
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------- the end of the launcher itself

LAUNCHER = """
import sys
from convoy.launch import local
from convoy.launch.host_job import JobOptions
local.CONVOY_COMMAND = (sys.executable, "-c")  # device 0 hosts the store, so that no torch is loaded here
status = local.launch_local([sys.argv[1]], ["cpu"] * 2, JobOptions(grace_s=1), command=local.CONVOY_COMMAND)
print("status", status, flush=True)
"""

SLEEPER = """
import os, sys, time
if os.environ["HOW"] == "watched":
    from convoy.machine.process import watch_parent
    watch_parent()
if os.environ["HOW"] == "stubborn" and os.environ["RANK"] == "1":
    import signal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
open(os.path.join(os.environ["FOLDER"], str(os.getpid())), "w").close()
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


def end_launcher(folder: Path, how: str, end: Callable[[int], None]) -> tuple[int, str, str]:
    """Start a launcher in its own session, end it, and wait for its devices; return status, output, errors."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, SLEEPER],
        cwd=ROOT,
        env={**os.environ, "FOLDER": str(folder), "HOW": how},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: len(list(folder.iterdir())) == 2)
        devices = [psutil.Process(int(path.name)) for path in folder.iterdir()]
        end(launcher.pid)
        output, errors = launcher.communicate(timeout=30)
        _, alive = psutil.wait_procs(devices, timeout=10)
        assert not alive
        return launcher.returncode, output, errors
    finally:
        for process in [launcher, *psutil.Process().children(recursive=True)]:
            if process.pid == launcher.pid and launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def wait_for(done: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < deadline_s, "the devices did not start"
        time.sleep(0.05)


def test_ctrl_c_ends_all_devices(tmp_path: Path) -> None:
    """Ctrl-C reaches the launcher and its devices at once; one device ignores it."""
    status, output, errors = end_launcher(tmp_path, "stubborn", lambda pid: os.killpg(pid, signal.SIGINT))
    assert (status, output) == (0, "status 130\n")
    assert errors == "SIGINT: ending 2 devices\n"


def test_sigterm_to_the_launcher_ends_its_devices(tmp_path: Path) -> None:
    """Regression: a scheduler's SIGTERM ended the launcher alone, and its devices trained on."""
    status, output, errors = end_launcher(tmp_path, "plain", lambda pid: os.kill(pid, signal.SIGTERM))
    assert (status, output) == (0, f"status {128 + signal.SIGTERM}\n")
    assert errors.startswith("SIGTERM: ending 2 devices")


def test_killed_launcher_ends_its_devices(tmp_path: Path) -> None:
    status, _, errors = end_launcher(tmp_path, "watched", lambda pid: os.kill(pid, signal.SIGKILL))
    assert status == -signal.SIGKILL
    assert "the launcher of this device has ended" in errors
