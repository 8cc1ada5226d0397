"""Devices of this machine that are left alone once they train; tests/launch/test_ssh.py has those of other hosts."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from convoy.launch.detach import detached_text, this_host

from convoy.errors import InputError
from convoy.launch.fleet import HostSession, _Hosts
from convoy.launch.host_job import HostJob
from convoy.launch.supervisor import Interrupts
from tests.support.processes import ROOT
from tests.support.ssh_fleets import QUICK, TRAINS
from tests.support.ssh_hosts import eventually

LAUNCH = """
import sys
from dataclasses import replace
from pathlib import Path
from convoy.launch import fleet as launch
from convoy.launch.detach import Detach, this_host
folder, script = Path(sys.argv[1]), sys.argv[2]
job = this_host(("cpu", "cpu"))
job = replace(job, host=replace(job.host, python=str(folder / "quick")))
again = len(sys.argv) > 3
detach = Detach(folder / "logs", 60.0)
sys.exit(launch.run_on_fleet([job], [script], grace_s=1.0, detach=detach, goes_on=again, tries_again=again))
"""


LATER = 7
"""What a device calls itself that was started again."""

TELLS = """
import json
words = {"generation": int(RANK == LATER), "doors": [["127.0.0.1", 9]]}
os.write(int(os.environ["CONVOY_LAUNCHER_PIPE"]), json.dumps(words).encode() + b"\\n")
print("asks at", os.environ.get("CONVOY_JOIN"), flush=True)
"""


def started(folder: Path, begin: str, *again: str) -> "subprocess.Popen[str]":
    quick = folder / "quick"
    soon = "from convoy.launch import again; again.FIRST_PAUSE_S = 0.2"
    quick.write_text(QUICK.format(python=sys.executable, more=soon))
    quick.chmod(0o755)
    packages = [str(ROOT), *(path for path in sys.path if path.endswith("-packages"))]
    script = f"""
import os, sys, time
sys.path[:0] = {packages!r}
FOLDER, RANK = {str(folder)!r}, int(os.environ.get("RANK", {LATER}))
def here():
    with open(f"{{FOLDER}}/{{RANK}}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{{FOLDER}}/{{RANK}}.new", f"{{FOLDER}}/{{RANK}}")
{TELLS.replace("LATER", str(LATER)) if again else ""}
{TRAINS.format(begin=begin)}
"""
    command = [sys.executable, "-c", LAUNCH, str(folder), script, *again]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def process_of(folder: Path, rank: int) -> psutil.Process:
    assert eventually((folder / str(rank)).exists)
    return psutil.Process(int((folder / str(rank)).read_text()))


def test_devices_train_on_when_the_command_has_come_back_and_nothing_is_left_after_them(tmp_path: Path) -> None:
    with started(tmp_path, "all") as launcher:
        output, errors = launcher.communicate(timeout=60)  # nobody holds its output any more
    assert (launcher.returncode, errors) == (0, "")
    assert output.splitlines()[1] == "2 devices train on without this command. What they print:"
    devices = [process_of(tmp_path, rank) for rank in range(2)]
    agent = devices[0].parent()
    assert agent is not None
    assert os.getsid(agent.pid) == agent.pid != os.getsid(0)
    agent.send_signal(
        signal.SIGTERM
    )  # the machine is switched off: its devices are asked to leave, which these take for an end
    assert eventually(lambda: not any(process.is_running() for process in (*devices, agent)))
    log = (tmp_path / "logs" / "host-of-0.log").read_text()
    assert re.fullmatch(r"SIGTERM: its devices are to leave\n(.* device [01] \(.*\) ended: SIGTERM\n){2}", log)
    assert (tmp_path / "logs" / "device-1.log").read_text() == "device 1\n"


def test_a_device_that_is_killed_is_started_again_without_the_command(tmp_path: Path) -> None:
    """By the agent of its host, on which alone that may be known; what it prints goes behind what the first one did."""
    with started(tmp_path, "all", "again") as launcher:
        _, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (0, "")
    first, agent = process_of(tmp_path, 1), process_of(tmp_path, 0).parent()
    first.kill()
    second = process_of(tmp_path, LATER)
    assert second.parent() == agent
    (tmp_path / "end").touch()
    assert agent is not None
    assert eventually(lambda: not any(process.is_running() for process in (first, second, agent)))
    lines = (tmp_path / "logs" / "host-of-0.log").read_text().splitlines()
    said = [re.sub(r"^\S+ \S+ ", "", line) for line in lines]
    device = "device 1 (host this-machine, cpu)"
    assert said[:2] == [
        "device 1 (host this-machine, cpu) ended: SIGKILL",
        f"{device} was killed by SIGKILL; it is started again",
    ]
    assert sorted(said[2:]) == [f"device {rank} (host this-machine, cpu) ended: exit status 0" for rank in range(2)]
    assert (tmp_path / "logs" / "device-1.log").read_text().splitlines() == [
        "asks at None", "device 1", "asks at 127.0.0.1:9", f"device {LATER}", "ends",
    ]  # fmt: skip


def test_before_all_devices_train_they_end_with_the_command(tmp_path: Path) -> None:
    with started(tmp_path, "but one") as launcher:
        devices = [process_of(tmp_path, rank) for rank in range(2)]
        agent = devices[0].parent()
        launcher.kill()
        launcher.communicate(timeout=60)
    assert agent is not None
    assert eventually(lambda: not any(process.is_running() for process in (*devices, agent)))


def test_a_person_is_told_where_to_look() -> None:
    here, there = this_host(("cpu",)), this_host(("cuda:0", "cuda:1"))
    there = HostJob(replace(there.host, name="lab", address="10.0.0.7", user="ann"), (1, 2), there.names, there.own)
    text = detached_text([(here, True, "/runs/a"), (there, False, "/home/my runs")])
    assert text.splitlines()[:-1] == [
        "3 devices train on without this command. What they print:",
        "  tail -f /runs/a/device-0.log",
        "  ssh ann@10.0.0.7 'tail -f '\"'\"'/home/my runs/device-1.log'\"'\"' '\"'\"'/home/my runs/device-2.log'\"'\"''",
    ]


@pytest.mark.parametrize("option", [["--print"], []])
def test_what_cannot_be_left_alone(option: list[str], tmp_path: Path) -> None:
    variables = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    command = [sys.executable, "-m", "convoy", "train", "--detach", *option]
    done = subprocess.run(
        command, env=os.environ if option else variables, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "--detach with --print, or under torchrun" in done.stderr


class Answered:
    """A host that answers, and whose process here ends then."""

    def __init__(self, name: str, status: int) -> None:
        self.title, self.failed, self.trouble = f"host {name}", bool(status), f"ssh ended with status {status}"

    def send(self, what: str) -> None:
        assert what == "detach"


@pytest.mark.parametrize("status", [0, 255])
def test_a_host_that_answered_and_ended_before_the_others_answered_is_no_trouble(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Story: where one host was slow, the other one was said to end its devices, and the slow one's answer was not awaited:
    all of them trained on, and nobody was told where."""
    quick, late = (Answered(name, status) for name in ("quick", "late"))
    answer = {"convoy": "detached", "logs": "/logs"}
    got: Iterator[Any] = iter([(quick, answer), (quick, None), (late, answer)])
    hosts = _Hosts([], 1.0, Interrupts())
    monkeypatch.setattr(hosts, "_next", lambda _: next(got))
    hosts.sessions = cast(list[HostSession], [quick, late])
    if status:
        with pytest.raises(InputError, match="host quick: ssh ended with status 255"):
            hosts._ask(hosts.sessions, "detach", "detached")
    else:
        assert [*hosts._ask(hosts.sessions, "detach", "detached")] == [quick, late]
