"""`convoy run`: a user script on every device."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from convoy import cli
from convoy.comm.environment import read_process_env
from convoy.fleet import Device, Fleet, Host, Nic
from convoy.machine.launch_env import hidden
from tests.support.processes import PLACE, ROOT

NAMES = (
    "CONVOY_RANK", "CONVOY_WORLD_SIZE", "CONVOY_LOCAL_RANK", "CONVOY_LOCAL_WORLD_SIZE", "CONVOY_DEVICE",
    "MALLOC_TRIM_THRESHOLD_",
)  # fmt: skip
TELL = f"""
import json, os, sys
row = [os.environ.get(name) for name in {NAMES!r}] + [sys.argv[1:], __name__]
with open("told." + os.environ.get("CONVOY_RANK", "alone"), "w") as file:
    json.dump(row, file)
seen = [name for name in os.environ if name in {PLACE!r} or name.startswith(("SLURM", "TORCHELASTIC"))]
print("device", os.environ.get("CONVOY_RANK"), *seen)
sys.exit(5 * ("fail" in sys.argv))
"""


FLEET = Fleet(
    (Host("attic", "10.0.0.1"), Host("cellar", "10.0.0.2")),
    (
        Device("a0", "attic", "cuda"), Device("c0", "cellar", "cpu", cores=2.5, slowdown=2.0), Device("a1", "attic", "cpu"),
        Device("a2", "attic", "cpu"),
    ),
    Nic(125e6, 125e6, 1e-4),
)  # fmt: skip


def run(argv: Sequence[str], folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    outside = {name: value for name, value in os.environ.items() if name not in (*PLACE, "CONVOY_DEVICE")}
    return subprocess.run(
        [sys.executable, "-m", "convoy", "run", *argv],
        cwd=folder,
        env={**outside, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tell.py").write_text(TELL)
    return tmp_path


def told(folder: Path, who: object) -> list[object]:
    return json.loads((folder / f"told.{who}").read_text())  # type: ignore[no-any-return]


def test_every_device_runs_the_script_with_its_own_options(folder: Path) -> None:
    done = run(["--devices", "2", "tell.py", "--devices", "9", "-m", "x y"], folder)
    assert (done.returncode, done.stdout) == (0, "device 0\n")
    # Regression: a script that joins no job ran whole in each process, without a message.
    note = "note: the script joined no job, so each of the 2 processes ran all of it by itself: call convoy.prepare"
    assert done.stderr.startswith(note)
    for rank in range(2):
        assert told(folder, rank) == [
            str(rank), "2", str(rank), "2", "cpu", str(2**31 - 1), ["--devices", "9", "-m", "x y"], "__main__",
        ]  # fmt: skip


def test_module_runs_as_with_python_m_and_returns_its_status(folder: Path) -> None:
    done = run(["--devices", "2", "-m", "tell", "--lr", "1", "fail"], folder)
    assert told(folder, 1)[6:] == [["--lr", "1", "fail"], "__main__"]
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_single_device_runs_here_with_memory_settings(folder: Path) -> None:
    """Regression: a single local device ran without them."""
    done = run(["--devices", "1", "tell.py"], folder)
    assert (done.returncode, done.stdout) == (0, "device None\n")
    assert told(folder, "alone")[:6] == [None, None, None, None, None, str(2**31 - 1)]


def test_inside_a_job_run_executes_the_script_here(folder: Path) -> None:
    """`convoy run` sends this command to hosts over ssh, and torchrun may start it."""
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}
    assert run(["--fleet", "nowhere.toml", "tell.py", "a"], folder, **place).stdout == "device 1\n"
    assert told(folder, 1)[:2] == ["1", "2"]


def test_script_with_its_own_ddp_sees_one_device(folder: Path) -> None:
    """timm's and torchvision's scripts would find RANK, WORLD_SIZE or SLURM_PROCID and wrap the model in DDP."""
    slurm = {
        "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
        "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a",
    }  # fmt: skip
    done = run(["tell.py"], folder, **slurm)
    assert (done.stdout, done.stderr) == ("device 1 SLURM_JOB_ID\n", "")
    assert told(folder, 1)[:4] == ["1", "2", "1", "2"]


def test_rank_is_read_from_convoys_own_variables() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a"}
    place |= {"MASTER_PORT": "4000", "TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "/root"}
    seen = hidden(place)
    assert {name for name in seen if not name.startswith("CONVOY_")} == {"HOME"}
    assert read_process_env(seen) == read_process_env(place)
    inner = seen | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "b", "MASTER_PORT": "5000"}
    assert read_process_env(inner).devices == 2  # torchrun started by the script


def test_output_of_other_devices_goes_to_files(folder: Path) -> None:
    """Regression: it was dropped, except for a failed device's last words, which are still printed."""
    (folder / "tell.py").write_text(
        "import os, sys\nprint('out', os.environ['CONVOY_RANK'], flush=True)\nsys.exit('why ' + os.environ['CONVOY_RANK'])\n"
    )
    done = run(["--devices", "3", "--logs", "logs", "tell.py"], folder)
    assert done.returncode == 2
    assert done.stdout == "out 0\n"
    assert {path.name: path.read_text() for path in (folder / "logs").iterdir()} == {
        f"device-{rank}.log": f"out {rank}\nwhy {rank}\n" for rank in (1, 2)
    }
    assert "ended with exit status 1" in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "nothing to run: give a script"),
        (["nosuch.py"], "the script nosuch.py is not there"),
        (["--devices", "2", "--logs", "tell.py/logs", "tell.py"], "give another folder for the logs"),
        (["--fleet", "f.toml", "--devices", "2", "tell.py"], "--devices 2 with --fleet: the file names the devices"),
        (["--fleet", "here.toml", "tell.py"], "--fleet needs a file with an `address` in each [[host]]"),
    ],
)
def test_unrunnable_scripts_are_refused(
    argv: list[str], words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "f.toml").write_text(FLEET.to_toml())
    unaddressed = [Host(host.name) for host in FLEET.hosts]
    (folder / "here.toml").write_text(Fleet(tuple(unaddressed), FLEET.devices, FLEET.network).to_toml())
    for name in (*PLACE, "CONVOY_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["convoy", "run", *argv])
    with contextlib.chdir(folder), pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert words in told.err
    assert "Traceback" not in told.err
