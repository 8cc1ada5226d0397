"""Fleets started over real ssh: device environments, failures, and complete cleanup on every host.

Host attic starts the fleet in most tests, so that one host is this machine; cellar is reached by ssh. In some tests a third
machine, desk, starts both.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.commands import TINY, results
from tests.support.processes import ROOT
from tests.support.ssh_hosts import Lab, convoy, eventually, fleet_file, needs_ssh, python_of

pytestmark = [pytest.mark.root, needs_ssh, pytest.mark.usefixtures("nobody_left")]

LAUNCH = """
import sys
from pathlib import Path
from convoy.errors import ConvoyError
from convoy.fleet import read_fleet
from convoy.launch import fleet as launch
from convoy.launch.host_job import JobOptions
launch.BEAT_S = 0.5
options = JobOptions(grace_s=1.0)
fleet, script, *files = sys.argv[1:]
try:
    status = launch.run_on_fleet(read_fleet(Path(fleet)), [script], options, files=list(map(Path, files)))
except ConvoyError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    status = 2
sys.exit(status)
"""

PRELUDE = """
import os, signal, sys, time
RANK = int(os.environ["RANK"])
def here():
    with open(f"{FOLDER}/{RANK}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{FOLDER}/{RANK}.new", f"{FOLDER}/{RANK}")
"""


def quick_fleet(folder: Path) -> Path:
    return fleet_file(folder, python_of(folder), python_of(folder))


def launching(fleet: Path, script: str, *files: str) -> list[str]:
    prelude = f"FOLDER = {str(fleet.parent)!r}\n{PRELUDE}"
    return [sys.executable, "-c", LAUNCH, str(fleet), prelude + script, *files]


# ------------------------------------------------------------------------------------------------ what devices are told


def test_every_device_of_the_file_runs_on_its_host(hosts: Lab, tmp_path: Path) -> None:
    """Device 0 prints as if it ran here, wherever it is; the others are silent."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CONVOY_DEVICE")
    script = f"""
import json, subprocess
cards = subprocess.check_output(["ip", "-json", "-4", "address", "show", "dev", "eth0"])
told = {{name: os.environ.get(name) for name in {(*names, "MASTER_PORT", "OMP_NUM_THREADS", "CONVOY_SLOWDOWN")!r}}}
told |= {{"folder": os.getcwd(), "address": json.loads(cards)[0]["addr_info"][0]["local"]}}
with open(f"{tmp_path}/told.{{RANK}}", "w") as file:
    json.dump(told, file)
print("device", RANK, "läuft")
print("careful", RANK, file=sys.stderr)
"""
    status, output, errors = hosts.run("desk", launching(quick_fleet(tmp_path), script))
    assert (status, output, errors) == (0, "device 0 läuft\n", "careful 0\n")
    told = [json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(3)]
    attic, cellar = "10.77.0.2", "10.77.0.3"
    assert [[row[name] for name in names] for row in told] == [
        ["0", "3", "0", "2", attic, "cpu"],
        ["1", "3", "0", "1", attic, "cpu"],
        ["2", "3", "1", "2", attic, "cpu"],
    ]
    assert [row["address"] for row in told] == [attic, cellar, attic]
    assert (told[1]["OMP_NUM_THREADS"], told[1]["CONVOY_SLOWDOWN"]) == ("2", "2.0")
    assert told[0]["CONVOY_SLOWDOWN"] is None
    assert {row["folder"] for row in told} == {str(hosts.folder)}, "the folder that the command was given in"
    assert len({row["MASTER_PORT"] for row in told}) == 1


def test_host_folder_and_python_are_used(hosts: Lab, tmp_path: Path) -> None:
    """Spaces and quotes in a path work."""
    folder = tmp_path / "ann's $HOME folder"
    folder.mkdir()
    python = python_of(folder)
    fleet = fleet_file(tmp_path, f'{python}\nfolder = "{folder}"', f'{python}\nfolder = "{folder}"')
    script = "open(f'told.{RANK}', 'w').close()"
    assert hosts.run("attic", launching(fleet, script)) == (0, "", "")
    assert sorted(path.name for path in folder.glob("told.*")) == ["told.0", "told.1", "told.2"]


# --------------------------------------------------------------------------------------------------- what goes wrong


def test_all_unusable_hosts_are_reported_with_a_remedy(hosts: Lab, tmp_path: Path) -> None:
    """Attic has no Convoy, and cellar's machine is absent. Nothing starts on any host."""
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    fleet = fleet_file(tmp_path, f'python = "{bare}"', python_of(tmp_path))
    fleet.write_text(fleet.read_text().replace("10.77.0.3", "10.77.0.99"))
    status, output, errors = hosts.run("desk", launching(fleet, "here()"))
    assert (status, output) == (2, "")
    first, second = errors.splitlines()
    assert first.startswith("InputError: host attic (10.77.0.2): ssh ended with status ")
    assert "has no Convoy: run `convoy fleet setup`" in first
    assert "host cellar (10.77.0.99): ssh ended with status 255" in second
    assert "check that the machine is on" in second
    assert not (tmp_path / "0").exists()


def test_other_convoy_version_is_refused(hosts: Lab, tmp_path: Path) -> None:
    older = python_of(tmp_path, "older", 'agent.__version__ = "0.0.1"')
    status, _, errors = hosts.run("attic", launching(fleet_file(tmp_path, python_of(tmp_path), older), "here()"))
    assert status == 2
    assert re.match(r"MismatchError: .* here, but 0.0.1 on host cellar \(10.77.0.3\). Install the same", errors)


def test_file_missing_on_a_host_is_reported(hosts: Lab, tmp_path: Path) -> None:
    """One file is missing there, one differs."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    for name in ("plan.json", "same.json", "times.toml"):
        (tmp_path / "here" / name).write_text("here")
    (tmp_path / "there" / "same.json").write_text("here")
    (tmp_path / "there" / "times.toml").write_text("of yesterday")
    python = python_of(tmp_path)
    attic, cellar = (f'{python}\nfolder = "{tmp_path / name}"' for name in ("here", "there"))
    fleet = fleet_file(tmp_path, attic, cellar)
    command = launching(fleet, "here()", "plan.json", "same.json", "times.toml")
    command[2] = f"import os; os.chdir({str(tmp_path / 'here')!r})\n{command[2]}"
    status, _, errors = hosts.run("attic", command)
    assert status == 2
    first, second = errors.splitlines()
    assert f"host cellar (10.77.0.3): plan.json is not there, in {tmp_path / 'there'}: all hosts need it" in first
    assert "times.toml is another file there" in second
    assert not (tmp_path / "0").exists()


def test_remote_device_error_is_printed(hosts: Lab, tmp_path: Path) -> None:
    script = "if RANK != 1: time.sleep(60)\nprint('error: no such image', file=sys.stderr); sys.exit(2)"
    status, output, errors = hosts.run("attic", launching(quick_fleet(tmp_path), script))
    assert (status, output) == (2, "")
    assert errors == "error on device 1 (host cellar, cpu): no such image\n"


def pids(folder: Path) -> list[int]:
    """Return the process ids of the three devices once they have all started."""
    files = [folder / str(rank) for rank in range(3)]
    assert eventually(lambda: all(file.exists() for file in files)), "the devices did not start"
    return [int(file.read_text()) for file in files]


WAIT = "here()\ntime.sleep(60)"
STUBBORN = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT


def test_killed_device_ends_the_job(hosts: Lab, tmp_path: Path) -> None:
    """It is named, also if the others ignore SIGTERM."""
    rank = 1
    with hosts.on("attic", launching(quick_fleet(tmp_path), STUBBORN)) as launcher:
        os.kill(pids(tmp_path)[rank], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert errors.startswith(f"DeviceLostError: device {rank} (host cellar, cpu) was killed by SIGKILL")


def test_ctrl_c_ends_processes_on_every_host(hosts: Lab, tmp_path: Path) -> None:
    with hosts.on("desk", launching(quick_fleet(tmp_path), STUBBORN)) as launcher:
        pids(tmp_path)
        os.killpg(launcher.pid, signal.SIGINT)
        output, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, output) == (130, "")
    assert "/convoy/" not in errors, "no traceback of ours; a device's own may be there"


def test_killed_launcher_leaves_nothing_on_any_host(hosts: Lab, tmp_path: Path) -> None:
    with hosts.on("attic", launching(quick_fleet(tmp_path), WAIT)) as launcher:
        pids(tmp_path)
        launcher.kill()
        launcher.communicate(timeout=60)


def test_pulled_cable_ends_the_job(hosts: Lab, tmp_path: Path) -> None:
    """Here ssh notices; the remote host notices by silence, since no message can reach it."""
    # What a person gives ssh counts before what Convoy gives it.
    impatient = f"CONVOY_SSH=ssh -o ServerAliveInterval=1 -F {hosts.folder / 'client'}"
    with hosts.on("attic", ["env", impatient, *launching(quick_fleet(tmp_path), WAIT)]) as launcher:
        pids(tmp_path)
        with hosts.cable_pulled("cellar"):
            _, errors = launcher.communicate(timeout=60)
            assert eventually(lambda: not hosts.at_work(), 60), "the silent host has not ended its device"
    assert launcher.returncode == 2
    assert re.match(r"DeviceLostError: device 1 \(host cellar, cpu\) was lost with its host: ssh ended", errors)


# ------------------------------------------------------------------------------------------------- the real command


def assert_as_one_device(output: str, training: str) -> None:
    """Check that the output is of this training and of one device (--compare), with the same numbers."""
    assert training in output
    together, alone = results(output)
    assert together[1] == alone[1]
    assert together[0] == pytest.approx(alone[0], abs=1.5e-4), "the last digit"
    (apart,) = re.findall(r"Loss curves over 3 steps: at most (\S+) apart", output)
    assert float(apart) < 1e-4


@pytest.mark.slow
def test_ssh_fleet_trains_as_one_device(hosts: Lab, tmp_path: Path) -> None:
    """Use two devices on one host, one on the other; settings from a run file and the command line."""
    fleet = fleet_file(tmp_path, "", "")
    run = tmp_path / "run.toml"
    run.write_text(f'fleet = "{fleet}"\nplan = "master"\nspeeds = [2, 1, 1]\nrebalance = true\n')
    status, output, errors = hosts.run("attic", convoy("train", str(run), *TINY, "--compare"), limit_s=110)
    assert (status, errors) == (0, "")
    assert_as_one_device(output, "Training on 3 devices, plan master")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_user_script_runs_on_every_host(hosts: Lab, tmp_path: Path) -> None:
    """`convoy run` over ssh: the example of the README trains on three devices of two hosts, and prints on one."""
    fleet, script = fleet_file(tmp_path, "", ""), str(ROOT / "examples" / "one_line.py")
    status, output, errors = hosts.run("attic", convoy("run", "--fleet", str(fleet), script), limit_s=240)
    assert status == 0, errors
    assert all(re.match("convoy: +(every device times|[0-9]+ s:)", line) for line in errors.splitlines()), errors
    losses = re.findall(r"^epoch \d: loss ([\d.]+)$", output, re.MULTILINE)
    assert len(losses) == 2
    assert float(losses[1]) < 0.5 * float(losses[0])


# ------------------------------------------------------------------------------------------------- the real doctor


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_doctor_checks_every_host_over_ssh_and_names_the_missing_one(hosts: Lab, tmp_path: Path) -> None:
    """First all are present: versions, links and speeds. Then cellar's packets are dropped without notice."""
    fleet, found = fleet_file(tmp_path, "", f'folder = "{tmp_path}"'), tmp_path / "found.json"
    examine = convoy("doctor", "--fleet", str(fleet), "--json", str(found), "--wait", "20")
    status, output, errors = hosts.run("attic", examine, limit_s=110)
    assert status == 0, output + errors
    facts = json.loads(found.read_text())
    assert not [each for each in facts["findings"] if each["severity"] == "error"]
    assert {"attic", "cellar"} <= set(re.findall(r"\b(attic|cellar)\b", output))
    with hosts.cable_pulled("cellar"):
        status, output, errors = hosts.run("attic", examine, limit_s=110)
    assert status == 1
    gone = [each for each in json.loads(found.read_text())["findings"] if each["severity"] == "error"]
    assert any("cellar at 10.77.0.3 cannot be used" in each["what"] for each in gone), gone
    assert all(each["cure"] for each in gone)
    assert "cellar at 10.77.0.3" in output + errors
