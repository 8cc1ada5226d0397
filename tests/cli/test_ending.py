"""`convoy leave` and `convoy stop`: the processes they find, refusals, and effects."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.cli import training
from convoy.cli.training import leave, leaving, of_job, stop
from convoy.errors import ConvoyError, InputError
from convoy.machine import roster
from convoy.machine.roster import JobProcess
from tests.support.ssh_hosts import eventually


def row(
    device: int, members: tuple[int, ...] = (0, 1, 2), job: str = "10.0.0.5:7000", run: str = "/runs/one"
) -> JobProcess:
    return JobProcess(job, 100 + device, 1.0, 0, device, "cpu", members, run)


@pytest.mark.parametrize(
    ("here", "devices", "leaves"),
    [((1,), (), [1]), ((0, 1), (), [0, 1]), ((0, 1, 2), (2,), [2]), ((0, 2), (0, 2), [0, 2])],
)
def test_leave_removes_local_or_named_devices(
    here: tuple[int, ...], devices: tuple[int, ...], leaves: list[int]
) -> None:
    assert [each.device for each in leaving([row(d) for d in here], devices)] == leaves


@pytest.mark.parametrize(
    ("here", "devices", "says"),
    [
        ([row(0), row(1), row(2)], (), "no device of job 10.0.0.5:7000 (run /runs/one) would be left"),
        ([row(0, (0,))], (), "its devices are 0; `convoy stop` ends it"),
        (
            [row(0), row(2)],
            (1,),
            "--device 1: the devices of job 10.0.0.5:7000 (run /runs/one) on this machine are 0, 2",
        ),
        ([row(0, ()), row(2, ())], (2,), "device 2 (cpu) of job 10.0.0.5:7000 (run /runs/one) cannot leave"),
    ],
)
def test_devices_that_cannot_leave_get_a_reason(here: list[JobProcess], devices: tuple[int, ...], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        leaving(here, devices)


def test_job_must_be_named_if_there_are_several() -> None:
    rows = [row(0), row(0, job="10.0.0.5:7001", run="/runs/two"), row(1)]
    assert [each.device for each in of_job(rows, "10.0.0.5:7000")] == [0, 1]
    assert [each.job for each in of_job(rows, "two")] == ["10.0.0.5:7001"]
    assert [each.job for each in of_job(rows, "/runs/two")] == ["10.0.0.5:7001"]
    assert len(of_job(rows[::2], None)) == 2
    for name, says in ((None, "2 jobs run here"), ("three", "no job here is called 'three'")):
        with pytest.raises(InputError, match=f"{says}: name one(.*\n)*.*7000 .run /runs/one.(.*\n)*.*7001"):
            of_job(rows, name)
    with pytest.raises(InputError, match=r"no job of user .* runs on this machine"):
        of_job([], None)


DEVICE = """
import sys, time
from convoy.machine import roster
from convoy.machine.process import handle_signals
class Members:
    generation = None
    ends = False
    def leave(self): print("leaves", flush=True); self.ends = True
    def end(self): print("ends", flush=True); self.ends = True
roster.enter(sys.argv[1], 1, "cpu")
members = Members()
with handle_signals(members):
    if sys.argv[2] != "starting":
        members.generation = 1
        roster.update(members=(0, 1), run="/runs/one")
    print("here", flush=True)
    while not members.ends or sys.argv[2] == "deaf":
        time.sleep(0.02)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A roster folder with rows of this test only."""
    folder = tmp_path / "rows"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(roster, "_folder", lambda: folder)
    return folder


def device(folder: Path, kind: str) -> "subprocess.Popen[str]":
    own = (
        f"from convoy.machine import roster; from pathlib import Path; roster._folder = lambda: Path({str(folder)!r})\n"
    )
    command = [sys.executable, "-c", own + DEVICE, f"a job of {os.getpid()}", kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


def test_device_receives_the_request(folder: Path) -> None:
    with device(folder, "training") as process:
        try:
            stop()
            assert process.stdout is not None
            assert process.stdout.read() == "ends\n"
        finally:
            process.kill()
    assert list(folder.glob("*")) == []


def test_device_that_has_not_started_training_cannot_leave_but_stops_at_once(folder: Path) -> None:
    with device(folder, "starting") as process:
        try:
            with pytest.raises(InputError, match="cannot leave"):
                leave()
            assert process.poll() is None
            stop()
            assert process.stdout is not None
            assert process.stdout.read() == ""
        finally:
            process.kill()
    assert len(list(folder.glob("*"))) == 1, "it had no time for that"
    assert roster.rows() == []
    assert list(folder.glob("*")) == []


def test_remaining_devices_are_listed_with_a_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with device(folder, "deaf") as process:
        try:
            monkeypatch.setattr(training, "leave_limit", lambda _: 0.2)
            with pytest.raises(ConvoyError, match=f"did not end within 0.2 s.* kill -9 {process.pid}"):
                leave()
            assert process.stdout is not None
            assert process.stdout.readline() == "leaves\n"
            monkeypatch.undo()
            monkeypatch.setattr(roster, "_folder", lambda: folder)
            leave()  # the second time ends it
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_leave_removes_a_device_and_stopped_training_resumes(tmp_path: Path) -> None:
    convoy = [sys.executable, "-m", "convoy"]
    options = "--data digits --net two-conv:6:12 --devices cpu,cpu,cpu --plan model --speeds 1,1,1 --checkpoint run"
    printed = tmp_path / "printed"
    with printed.open("wb") as out:
        command = [*convoy, "train", *options.split(), "--epochs", "5000"]
        job = subprocess.Popen(command, stdout=out, stderr=out, cwd=tmp_path)
    try:
        assert eventually(lambda: "epoch 1/" in printed.read_text(), 100)
        for verb, says in (
            (
                ["leave", "run", "--device", "1"],
                r"device 1 \(cpu\) of job 127.0.0.1:\d+ .*: asked to leave after the step\n",
            ),
            (["stop", "run"], r"job .*: asked to end after the step, on all machines\n"),
        ):
            done = subprocess.run([*convoy, *verb], cwd=tmp_path, capture_output=True, text=True, timeout=100)
            assert (done.returncode, done.stderr) == (0, "")
            assert re.fullmatch(says, done.stdout)
        assert job.wait(60) == 2, printed.read_text()
    finally:
        job.kill()
        job.wait()
    text = printed.read_text()
    assert "; 2 continue after step" in text
    assert "repeated" not in text
    found = re.search(r"error: the training was stopped after step (\d+), as requested; --resume continues from", text)
    assert found, text
    epochs = int(found[1]) // 23 + 1
    command = [*convoy, "train", *options.split(), "--epochs", str(epochs), "--resume"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert f"step {found[1]}, epoch {epochs - 1}" in done.stdout
