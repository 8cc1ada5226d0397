"""A script of one's own over several machines, by ssh: a host is switched off and on again, and its device comes back."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.comm.job_key import write_key_file
from tests.launch.test_come_back import on
from tests.launch.test_run_again import FOR_EVER
from tests.support.processes import ROOT
from tests.support.ssh_fleets import FLEET, convoy
from tests.support.ssh_hosts import Lab, eventually, needs_ssh

pytestmark = [pytest.mark.root, needs_ssh]

SCRIPT = ROOT / "tests" / "support" / "members_script.py"


def switch_off(hosts: Lab, host: str) -> None:
    """End all that runs there but its ssh server, which nobody reaches while the cable is out; the kernel says no word."""
    listed = subprocess.check_output(["ip", "netns", "pids", hosts.wiring.port(host).namespace], text=True)
    for pid in set(map(int, listed.split())) - {hosts.servers[host]}:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_host_that_is_switched_off_and_on_has_its_device_back(hosts: Lab, tmp_path: Path) -> None:
    """Nobody types anything. Every step is there once, with the loss of one device."""
    (tmp_path / "fleet.toml").write_text(FLEET.format(attic="", cellar=""))
    output = tmp_path / "output"

    def said() -> str:
        return output.read_text() if output.exists() else ""

    def steps_behind(pattern: str) -> int:
        """Steps printed behind the last line of that kind; none while there is no such line."""
        found = [*re.finditer(pattern, said())]
        return said()[found[-1].end() :].count('{"step"') if found else 0

    impatient = f"CONVOY_SSH=ssh -o ServerAliveInterval=1 -o ConnectTimeout=1 -F {hosts.folder / 'client'}"
    command = convoy("run", "--goes-on", "--fleet", str(tmp_path / "fleet.toml"), str(SCRIPT), FOR_EVER)
    with hosts.on("attic", ["env", impatient, "sh", "-c", 'exec "$@" > "$0" 2>&1', str(output), *command]) as launcher:
        assert eventually(lambda: said().count('{"step"') > 5, 120), said()
        with hosts.cable_pulled("cellar"):
            switch_off(hosts, "cellar")
            assert eventually(lambda: steps_behind(r"device 1 was lost.*; 2 go on after step \d+") > 5, 120), said()
        assert eventually(lambda: steps_behind(r"device 3 .*joined; 3 go on after step \d+") > 20, 200), said()
        assert any(on(hosts, pid, "cellar") for pid, words in hosts.at_work().items() if str(SCRIPT.name) in words)
        status, *told = hosts.run("attic", convoy("stop"))
        assert status == 0, told
        launcher.communicate(timeout=60)
    assert "was lost with its host: ssh ended with " in said()
    assert eventually(lambda: not hosts.at_work()), f"still at work: {hosts.at_work()}"
    rows = [json.loads(line) for line in said().splitlines() if line.startswith("{")]
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(len(rows) // 4 + 1)], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    alone = [json.loads(line) for line in done.stdout.splitlines()][: len(rows)]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone], rel=1e-10, abs=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_device_of_another_machine_comes_into_a_script_on_a_fleet(hosts: Lab, tmp_path: Path) -> None:
    """The others are started by ssh; the third machine is in no fleet file, and has the script and the key."""
    (tmp_path / "fleet.toml").write_text(FLEET.format(attic="", cellar=""))
    key, output = tmp_path / "key", tmp_path / "output"
    write_key_file(key)
    script = [str(SCRIPT), FOR_EVER]
    options = ["--listen", "10.77.0.2:7077", "--job-key", str(key), "--fleet", str(tmp_path / "fleet.toml")]
    writing = ["sh", "-c", 'exec "$@" > "$0" 2>&1', str(output)]
    with hosts.on("attic", [*writing, *convoy("run", *options, *script)]) as launcher:
        assert eventually(lambda: output.exists() and output.read_text().count('{"step"') > 5, 120), output.read_text()
        assert "Others may join: convoy run --join 10.77.0.2:7077 --job-key FILE" in output.read_text()
        join = convoy("run", "--join", "10.77.0.2:7077", "--job-key", str(key), *script)
        with hosts.on("desk", join) as newcomer:
            assert eventually(lambda: "joined; 4 go on after step" in output.read_text(), 120), newcomer.poll()
            steps = output.read_text().count('{"step"')
            assert eventually(lambda: output.read_text().count('{"step"') > steps + 20, 60)
            status, *told = hosts.run("attic", convoy("stop"))
            assert status == 0, told
            newcomer.communicate(timeout=60)
        launcher.communicate(timeout=60)
    rows = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
