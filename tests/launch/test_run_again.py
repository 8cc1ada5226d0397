"""Scripts of one's own whose devices are lost and come back by themselves, leave, end, and go on without the command."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from convoy.comm import roster
from convoy.comm.launcher import JOIN
from convoy.launch.host_job import joining_environment
from tests.support.processes import PLACE, ROOT
from tests.support.ssh_hosts import eventually

SCRIPT = str(ROOT / "tests" / "support" / "members_script.py")
FOR_EVER = "1000000"


class Job:
    """A job that the command `convoy run` has started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "output"
        kept = {name: value for name, value in os.environ.items() if name not in (*PLACE, "CONVOY_DEVICE")}
        self.variables = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    @contextmanager
    def started(self, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
        command = [sys.executable, "-m", "convoy", "run", *options, SCRIPT, FOR_EVER]
        with self.output.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.variables, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)

    def call(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "convoy", *words], cwd=self.folder, env=self.variables, capture_output=True, text=True,
            timeout=200, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def rows(self) -> list[roster.Row]:
        """Of those that train."""
        found = []
        for row in roster.rows():
            with suppress(psutil.Error):  # it has just ended
                process = psutil.Process(row.pid)
                if row.members and SCRIPT in process.cmdline() and process.cwd() == str(self.folder):
                    found.append(row)
        return found

    def row(self, device: int) -> roster.Row:
        assert eventually(lambda: any(row.device == device for row in self.rows()), 200), self.output.read_text()[
            -2000:
        ]
        return next(row for row in self.rows() if row.device == device)

    @staticmethod
    def losses(lines: Sequence[str]) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in map(json.loads, filter(lambda line: line.startswith("{"), lines))}

    def alone(self, steps: int) -> dict[int, float]:
        """The same by one device, in plain words: the script without a job."""
        done = subprocess.run(
            [sys.executable, SCRIPT, str(steps // 4 + 1)],
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return self.losses(done.stdout.splitlines())


def compare(found: dict[int, float], job: Job) -> None:
    """Every step is there once, with the loss of one device."""
    steps = sorted(found)
    assert steps == [*range(1, len(steps) + 1)]
    expected = job.alone(min(len(steps), 400))
    assert [found[step] for step in steps if step in expected] == pytest.approx(
        [expected[step] for step in steps if step in expected], rel=1e-10, abs=1e-12
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_device_of_a_script_comes_back_leaves_and_all_end(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.started("--goes-on", "--try-again", "--devices", "2") as launcher:
        psutil.Process(job.row(1).pid).kill()
        came = job.row(2)
        status, said = job.call("leave", came.job, "--device", "2", "--wait", "100")
        assert status == 0, said
        assert not psutil.pid_exists(came.pid)
        status, said = job.call("stop", came.job, "--wait", "100")
        assert status == 0, said
        assert launcher.wait(60) == 2, "as with `convoy train`, which was stopped"
    lines = job.output.read_text().splitlines()
    assert "device 1 (cpu) was killed by SIGKILL; it is started again" in lines
    assert any(re.search(r"device 2 .* joined; 2 go on after step ", line) for line in lines), lines[:40]
    assert any(re.search(r"device 2 .*(left|has left)", line) for line in lines), lines[-5:]
    assert "Traceback" not in "".join(lines)
    assert re.fullmatch(r"error: the training was stopped after step \d+, as it was asked to", lines[-1])
    compare(job.losses(lines), job)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_goes_on_without_the_command_and_its_device_comes_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    options = ["--goes-on", "--try-again", "--devices", "2", "--logs", "logs", "--detach"]
    with job.started(*options) as launcher:
        assert launcher.wait(200) == 0, job.output.read_text()
    said = job.output.read_text()
    assert "2 devices train on without this command" in said
    log = tmp_path / "logs" / "device-0.log"
    assert str(log) in said
    first = job.row(0)
    agent = psutil.Process(first.pid).parent()
    psutil.Process(job.row(1).pid).kill()
    job.row(2)
    status, words = job.call("stop", first.job, "--wait", "100")
    assert status == 0, words
    assert agent is not None
    assert eventually(lambda: not agent.is_running(), 60)
    assert (
        "device 1 (host this-machine, cpu) was killed by SIGKILL; it is started again"
        in (tmp_path / "logs" / "host-of-0.log").read_text()
    )
    compare(job.losses(log.read_text().splitlines()), job)


def test_who_is_started_again_has_no_place_among_those_that_began() -> None:
    variables = {
        "RANK": "1",
        "CONVOY_WORLD_SIZE": "2",
        "MASTER_PORT": "1",
        "CONVOY_LISTEN": "a:1",
        "CONVOY_DEVICE": "cpu",
    }
    told = joining_environment(variables, [("10.0.0.1", 7), ("fd00::1", 8)])
    assert told == {"CONVOY_DEVICE": "cpu", JOIN: "10.0.0.1:7,[fd00::1]:8"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--detach", "--join", "127.0.0.1:9"], "--detach with --join or --print, or under torchrun, srun or mpirun"),
        (["--try-again"], "--try-again without --goes-on: a loss ends the job"),
        (["--try-again", "--goes-on", "--devices", "1"], "--try-again with one device"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], words: str, tmp_path: Path) -> None:
    status, said = Job(tmp_path).call("run", *options, SCRIPT)
    assert status == 2
    assert words in said
