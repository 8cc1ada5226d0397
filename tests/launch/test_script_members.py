"""Scripts with Members whose devices leave, are lost and join again, here and on hosts over ssh. Every step has the loss of
one device."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from convoy.comm.job_key import write_key_file
from convoy.machine import roster
from tests.support.processes import PLACE, ROOT
from tests.support.ssh_hosts import FLEET, Lab, convoy, eventually, needs_ssh

SCRIPT = str(ROOT / "tests" / "support" / "members_script.py")
FOR_EVER = "1000000"


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in (*PLACE, "CONVOY_DEVICE")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def call(*words: str) -> tuple[int, str]:
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


def losses(lines: Sequence[str]) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in map(json.loads, filter(lambda line: line.startswith("{"), lines))]


def assert_as_one_device(lines: Sequence[str]) -> None:
    """Check that every step ran once, with the loss of the script without a job."""
    found = losses(lines)
    assert [step for step, _ in found] == [*range(1, len(found) + 1)]
    status, printed = call(sys.executable, SCRIPT, str(len(found) // 4 + 1))
    assert status == 0, printed
    expected = [loss for _, loss in losses(printed.splitlines())][: len(found)]
    assert [loss for _, loss in found] == pytest.approx(expected, rel=1e-10, abs=1e-12)


def training(folder: Path) -> list[roster.JobProcess]:
    """Return the script's devices that train in this folder."""
    found = []
    for row in roster.rows():
        with suppress(psutil.Error):  # it has just ended
            process = psutil.Process(row.pid)
            if row.members and SCRIPT in process.cmdline() and process.cwd() == str(folder):
                found.append(row)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_device_leaves_another_is_killed_and_the_last_is_stopped(tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = convoy("run", "--goes-on", "--devices", "3", SCRIPT, FOR_EVER)
    with output.open("wb") as out:
        launcher = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    try:
        assert eventually(lambda: len(training(tmp_path)) == 3, 200), output.read_text()
        first, second, third = training(tmp_path)
        status, said = call(*convoy("leave", first.job, "--device", "1"))
        assert status == 0, said
        assert not psutil.pid_exists(second.pid)
        psutil.Process(third.pid).kill()
        assert eventually(lambda: "1 continue after step" in output.read_text(), 100), output.read_text()
        status, said = call(*convoy("stop", first.job))
        assert status == 0, said
        assert launcher.wait(60) == 2, "as with `convoy train`, which was stopped"
    finally:
        launcher.terminate()
        launcher.wait(30)
    lines = output.read_text().splitlines()
    assert "Traceback" not in "".join(lines)
    assert re.fullmatch(r"error: the training was stopped after step \d+, as requested", lines[-1])
    assert_as_one_device(lines)


@pytest.mark.slow
@pytest.mark.root
@needs_ssh
@pytest.mark.timeout(400)
def test_a_host_that_was_switched_off_joins_again(hosts: Lab, tmp_path: Path) -> None:
    """The others, started by ssh, continue; a command on the host itself restarts its device."""
    (tmp_path / "fleet.toml").write_text(FLEET.format(attic="", cellar=""))
    key, output = tmp_path / "key", tmp_path / "output"
    write_key_file(key)

    def steps_after(pattern: str) -> int:
        """Count the steps printed since the last such line; 0 without one."""
        text = output.read_text() if output.exists() else ""
        found = [*re.finditer(pattern, text)]
        return text[found[-1].end() :].count('{"step"') if found else 0

    impatient = f"CONVOY_SSH=ssh -o ServerAliveInterval=1 -o ConnectTimeout=1 -F {hosts.folder / 'client'}"
    options = ["--listen", "10.77.0.2:7077", "--job-key", str(key), "--fleet", str(tmp_path / "fleet.toml")]
    writing = ["env", impatient, "sh", "-c", 'exec "$@" > "$0" 2>&1', str(output)]
    with hosts.on("attic", [*writing, *convoy("run", *options, SCRIPT, FOR_EVER)]) as launcher:
        assert eventually(lambda: steps_after("Others may join") > 5, 120), output.read_text()
        assert "Others may join: convoy run --join 10.77.0.2:7077 --job-key FILE" in output.read_text()
        with hosts.cable_pulled("cellar"):
            switch_off(hosts, "cellar")
            assert eventually(lambda: steps_after(r"device 1 was lost.*; 2 continue after step \d+") > 5, 120)
        join = convoy("run", "--join", "10.77.0.2:7077", "--job-key", str(key), SCRIPT, FOR_EVER)
        with hosts.on("cellar", join) as joining:
            assert eventually(lambda: steps_after(r"device 3 .*joined; 3 continue after step \d+") > 20, 200)
            status, *told = hosts.run("attic", convoy("stop"))
            assert status == 0, told
            joining.communicate(timeout=60)
        launcher.communicate(timeout=60)
    assert eventually(lambda: not hosts.at_work()), f"still at work: {hosts.at_work()}"
    assert_as_one_device(output.read_text().splitlines())


def switch_off(hosts: Lab, host: str) -> None:
    """End everything on the host except its ssh server, which is unreachable while the cable is out."""
    listed = subprocess.check_output(["ip", "netns", "pids", hosts.wiring.port(host).namespace], text=True)
    for pid in set(map(int, listed.split())) - {hosts.servers[host]}:
        os.kill(pid, signal.SIGKILL)
