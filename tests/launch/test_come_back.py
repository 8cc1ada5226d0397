"""Devices of a fleet over a real ssh that are lost and come back by themselves, with their process or with their host."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from convoy.runlog.reader import read_log
from tests.support.ssh_fleets import FLEET, convoy, fleet_file, python_of
from tests.support.ssh_hosts import Lab, eventually, needs_ssh

pytestmark = [pytest.mark.root, needs_ssh, pytest.mark.usefixtures("nobody_left")]

LAUNCH = """
import sys
from pathlib import Path
from convoy.fleet import read_fleet
from convoy.launch import again, fleet as launch
launch.BEAT_S, again.FIRST_PAUSE_S = 0.5, 0.2
fleet, script = sys.argv[1:]
sys.exit(launch.run_on_fleet(read_fleet(Path(fleet)), [script], grace_s=1.0, goes_on=True, tries_again=True))
"""

DEVICE = """
import json, os, sys, time
def tell(**words):
    os.write(int(os.environ["CONVOY_LAUNCHER_PIPE"]), json.dumps(words).encode() + b"\\n")
def leave(name, what):
    with open(f"FOLDER/{name}.new", "w") as file:
        json.dump(what, file)
    os.rename(f"FOLDER/{name}.new", f"FOLDER/{name}")
rank = os.environ.get("RANK")
if rank is None:
    names = ("CONVOY_DEVICE", "OMP_NUM_THREADS", "CONVOY_SLOWDOWN", "SSH_CONNECTION")
    leave("again", [os.getpid(), os.environ["CONVOY_JOIN"], {name: os.environ.get(name) for name in names}])
    tell(generation=1, doors=[])
    print("who came later", flush=True)
else:
    tell(generation=0, doors=[["10.77.0.2", 7], ["10.77.0.3", 7]])
    leave(rank, os.getpid())
while not os.path.exists("FOLDER/end"):
    time.sleep(0.05)
print("device", rank, flush=True)
"""


def read(path: Path, limit_s: float = 30.0) -> object:
    assert eventually(path.exists, limit_s), f"{path.name} did not come"
    return json.loads(path.read_text())


def starting(folder: Path) -> list[str]:
    fleet = fleet_file(folder, python_of(folder), python_of(folder))
    return [sys.executable, "-c", LAUNCH, str(fleet), DEVICE.replace("FOLDER", str(folder))]


def test_a_killed_device_is_started_again_on_its_host(hosts: Lab, tmp_path: Path) -> None:
    """As the file describes it, by a session of its own: the first one ended with its only device."""
    with hosts.on("attic", starting(tmp_path)) as launcher:
        first = [read(tmp_path / str(rank)) for rank in range(3)]
        os.kill(int(str(first[1])), signal.SIGKILL)
        pid, doors, told = read(tmp_path / "again")  # type: ignore[misc]
        (tmp_path / "end").touch()
        output, errors = launcher.communicate(timeout=30)
    assert (launcher.returncode, errors) == (
        0, "device 1 (host cellar, cpu) was killed by SIGKILL; it is started again\n"
    )  # fmt: skip
    assert pid not in first
    assert doors == "10.77.0.2:7,10.77.0.3:7"
    assert told.pop("SSH_CONNECTION").split()[2] == "10.77.0.3"
    assert told == {"CONVOY_DEVICE": "cpu", "OMP_NUM_THREADS": "2", "CONVOY_SLOWDOWN": "2.0"}
    assert output.splitlines()[0] == "who came later"
    assert "device 0" in output


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_host_that_was_cut_off_gets_its_device_back(hosts: Lab, tmp_path: Path) -> None:
    """Tries fail while the cable is out, and are told; the next one after it is in succeeds."""
    impatient = f"CONVOY_SSH=ssh -o ServerAliveInterval=1 -o ConnectTimeout=1 -F {hosts.folder / 'client'}"
    with hosts.on("attic", ["env", impatient, *starting(tmp_path)]) as launcher:
        for rank in range(3):
            read(tmp_path / str(rank))
        with hosts.cable_pulled("cellar"):
            time.sleep(8)
        read(tmp_path / "again", 90)
        (tmp_path / "end").touch()
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    lines = errors.splitlines()
    assert len(lines) >= 2, errors
    assert all(
        re.match(r"device 1 \(host cellar, cpu\) was lost with its host: ssh ended with ", each) for each in lines
    )


NET = """
import torch
from torch import nn

class Double(nn.Module):
    def forward(self, x):
        return x.double()

def net():
    torch.manual_seed(3)
    layers = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(384, 10)
    return nn.Sequential(Double(), *(layer.double() for layer in layers))
"""


OPTIONS = "--data digits --net double_net:net --batch 64 --optimizer adam --lr 0.003"
EPOCH_STEPS = 23


def train(*options: str) -> list[str]:
    return convoy("train", *OPTIONS.split(), *options)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_device_comes_back_and_no_number_changes(hosts: Lab, tmp_path: Path) -> None:
    """Nobody types anything: a fleet of three over ssh, of which one is killed, has three again, in the losses of one."""
    (hosts.folder / "double_net.py").write_text(textwrap.dedent(NET))
    (tmp_path / "fleet.toml").write_text(FLEET.format(attic="", cellar=""))
    options = ["--fleet", str(tmp_path / "fleet.toml"), "--plan", "hybrid", "--speeds", "1,1,1", "--epochs", "5000"]
    log = tmp_path / "log.jsonl"

    def steps_behind(reason: str) -> int:
        """Steps in the log behind the last change of that kind."""
        lines = log.read_text().splitlines() if log.exists() else []
        after = next((n for n, line in reversed([*enumerate(lines)]) if reason in line), len(lines))
        return sum('"what":"step"' in line.replace(" ", "") for line in lines[after:])

    with hosts.on("attic", train(*options, "--log", str(log))) as launcher:
        assert eventually(lambda: steps_behind('"run"') > 5, 120)
        (victim,) = [
            pid for pid, words in hosts.at_work().items() if "convoy train" in words and on(hosts, pid, "cellar")
        ]
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: steps_behind("joined") > 20, 200), launcher.poll()
        status, *said = hosts.run("attic", convoy("stop"))
        assert status == 0, said
        output, errors = launcher.communicate(timeout=60)
    assert "device 1 (host cellar, cpu) was killed by SIGKILL; it is started again" in errors.splitlines(), errors
    assert re.search(r"device 1 \(host \S+, cpu\) was lost: .*; 2 go on after step ", output)
    assert re.search(r"device 3 \(host \S+, cpu.*\) joined; 3 go on after step ", output)
    together = read_log(log)
    alone = tmp_path / "alone.jsonl"
    epochs = str(len(together.steps) // EPOCH_STEPS + 1)
    status, *said = hosts.run("desk", train("--devices", "1", "--epochs", epochs, "--log", str(alone)), limit_s=200)
    assert status == 0, said
    one = read_log(alone).steps[: len(together.steps)]
    assert [row.step for row in together.steps] == [row.step for row in one]
    assert [row.loss for row in together.steps] == pytest.approx([row.loss for row in one], rel=1e-10, abs=1e-12)


def on(hosts: Lab, pid: int, host: str) -> bool:
    listed = subprocess.check_output(["ip", "netns", "pids", hosts.wiring.port(host).namespace], text=True)
    return str(pid) in listed.split()
