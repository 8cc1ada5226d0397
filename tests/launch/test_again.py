"""Lost devices that are started again: which, when, what is told of it, and that nothing stays."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from convoy.launch.again import FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST_DEATHS, MOST_SILENCES, Again

from convoy.launch.exit_status import Ending
from convoy.launch.local import launch_local

DOORS = [("10.0.0.1", 7000), ("10.0.0.2", 7000)]


class Launcher:
    """What a launcher does with it, on a clock of its own."""

    def __init__(self, devices: int = 2) -> None:
        self.now_s, self.said, self.starts = 0.0, list[str](), list[tuple[int, int, list[tuple[str, int]]]]()
        self.again = Again(
            {d: f"device {d}" for d in range(devices)},
            lambda device, process, doors: self.starts.append((device, process, list(doors))),
            self.said.append,
            lambda: self.now_s,
        )
        self.tell(0, 0)

    def tell(self, process: int, generation: int, doors: list[tuple[str, int]] = DOORS) -> None:
        self.again.hear(process, json.dumps({"generation": generation, "doors": doors}).encode())

    def end(self, process: int, status: int, *lines: str, ends: str | None = None) -> None:
        if ends is not None:
            self.again.hear(process, json.dumps({"ends": ends}).encode())
        self.again.note(Ending(process, "cpu", status, lines=lines))

    def wait(self, s: float) -> list[tuple[int, int]]:
        """The devices that are started at the end of so many seconds, each with its number."""
        self.now_s += s
        count = len(self.starts)
        self.again.tend()
        return [(device, process) for device, process, _ in self.starts[count:]]


AGAIN = [(-signal.SIGKILL, None), (-signal.SIGSEGV, None), (2, "lost"), (2, "nobody"), (2, "memory")]
NOT = [(0, None), (1, None), (2, None), (2, "left"), (2, "stopped"), (-signal.SIGTERM, None), (-signal.SIGINT, None)]


@pytest.mark.parametrize(("status", "ends"), AGAIN)
def test_who_was_lost_is_started_again(status: int, ends: str | None) -> None:
    launcher = Launcher()
    launcher.end(1, status, "error: words", ends=ends)
    assert launcher.again.members == {0}
    assert launcher.wait(FIRST_PAUSE_S - 0.1) == []
    assert launcher.wait(0.1) == [(1, 2)]
    assert launcher.starts[0][2] == DOORS
    (said,) = launcher.said
    assert said.startswith("device 1 ")
    assert said.endswith("; it is started again")


@pytest.mark.parametrize(("status", "ends"), NOT)
def test_who_ended_by_itself_or_was_asked_to_is_not(status: int, ends: str | None) -> None:
    """Of an error of its own a person is told, once, if the others go on."""
    launcher = Launcher()
    launcher.end(1, status, "Traceback", "ValueError: no such image", ends=ends)
    assert launcher.wait(FIRST_PAUSE_S) == launcher.wait(LONGEST_PAUSE_S) == []
    own = status > 0 and ends is None
    assert launcher.said == ["device 1 ended: ValueError: no such image; it is not started again"] * own
    assert launcher.again.next_s == float("inf")


def test_pauses_grow_and_an_absent_host_is_tried_as_long_as_the_job_lasts() -> None:
    """It is told of each try until the pauses are the longest: a line every five minutes of a night helps nobody."""
    launcher = Launcher()
    pause_s, process = FIRST_PAUSE_S, 1
    for _ in range(40):
        launcher.again.lose_host(process, "ssh ended with status 255")
        assert launcher.wait(pause_s - 0.1) == []
        ((_, process),) = launcher.wait(0.1)
        assert launcher.again.members == {0}
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert launcher.said == ["device 1 was lost with its host: ssh ended with status 255; it is started again"] * 6


def test_who_is_killed_time_and_again_is_given_up() -> None:
    launcher = Launcher()
    process = 1
    for _ in range(MOST_DEATHS):
        launcher.end(process, -9)
        ((_, process),) = launcher.wait(LONGEST_PAUSE_S)
        launcher.tell(process, 1)
    launcher.end(process, -9)
    assert launcher.wait(LONGEST_PAUSE_S) == []
    assert launcher.said[-1] == "device 1 was killed by SIGKILL; it is not started again"


def test_who_trained_for_long_is_new() -> None:
    launcher = Launcher()
    process = 1
    for _ in range(2 * MOST_DEATHS):
        launcher.end(process, -9)
        ((_, process),) = launcher.wait(FIRST_PAUSE_S)
        launcher.wait(LONGEST_PAUSE_S)  # to load and measure; that is no training
        launcher.tell(process, 1)
        assert launcher.again.members == {0, process}
        launcher.wait(LONGEST_PAUSE_S + 1)


def test_a_host_alone_tries_until_nobody_has_answered_for_long() -> None:
    """It does not know who trains elsewhere: the job may be over. An answer in between begins the count anew."""
    launcher = Launcher(1)
    launcher.again = Again({3: "device 3"}, launcher.again._start, launcher.said.append, lambda: launcher.now_s,
                           devices=5, alone=True)  # fmt: skip
    launcher.tell(3, 0)
    launcher.end(3, -9)
    for tries in (MOST_SILENCES - 1, MOST_SILENCES):
        assert launcher.again.members == set()
        ((device, process),) = launcher.wait(LONGEST_PAUSE_S)
        assert (device, process) >= (3, 5)
        launcher.end(process, 2, "error: it is out", ends="lost")
        for _ in range(tries):
            ((_, process),) = launcher.wait(LONGEST_PAUSE_S)
            launcher.end(process, 2, "error: no job answers", ends="nobody")
    assert launcher.wait(LONGEST_PAUSE_S) == []
    assert launcher.again.next_s == float("inf")
    assert launcher.said[-1] == "device 3 ended: no job answers; it is not started again"


def test_a_host_alone_tries_no_more_once_a_device_has_done_its_work() -> None:
    launcher = Launcher(2)
    launcher.again = Again(dict.fromkeys((0, 1), "a device"), launcher.again._start, launcher.said.append, alone=True)
    launcher.tell(0, 0)
    launcher.end(0, -9)
    assert launcher.again.next_s < float("inf")
    launcher.end(1, 0)
    assert launcher.again.next_s == float("inf"), "the job is over"


def test_the_doors_are_those_of_the_latest_generation() -> None:
    launcher = Launcher(3)
    launcher.tell(2, 2, DOORS[1:])
    launcher.tell(1, 1, DOORS[:1])  # which was silent, and does not know better
    for line in (b"", b"\xff", b"[]", b"7", b"null", b'{"doors": 3}', b'{"generation": 9, "doors": [[1, "x"]]}'):
        launcher.again.hear(1, line)
    launcher.end(1, -9)
    launcher.wait(FIRST_PAUSE_S)
    assert launcher.starts == [(1, 3, DOORS[1:])]


def test_a_device_that_left_before_its_host_went_comes_back_with_the_host() -> None:
    """A workstation that is shut down asks its processes to end first."""
    launcher = Launcher()
    launcher.end(1, 2, "error: device 1 has left the job", ends="left")
    launcher.again.lose_host_of([0, 1], "ssh ended with status 255")
    assert launcher.wait(FIRST_PAUSE_S) == [(1, 2)]


def test_the_job_is_over_when_nobody_trains_and_then_nobody_is_started() -> None:
    launcher = Launcher()
    launcher.end(1, -9)
    launcher.wait(FIRST_PAUSE_S)
    assert launcher.again.running == {0, 2}
    launcher.end(0, 0)
    assert launcher.again.members == set(), "who asks to be let in finds nobody any more"
    launcher.again.stop()
    launcher.end(2, -9)
    assert launcher.wait(LONGEST_PAUSE_S) == []


# --------------------------------------------------------------------------------------- processes of this machine

DEVICE = """
import json, os, signal, sys, time
def tell(**words):
    os.write(int(os.environ["CONVOY_LAUNCHER_PIPE"]), json.dumps(words).encode() + b"\\n")
def await_(name):
    while not os.path.exists(f"FOLDER/{name}"):
        time.sleep(0.01)
rank = os.environ.get("RANK")
if rank is not None:
    tell(generation=0, doors=[["127.0.0.1", 7], ["127.0.0.1", 8]])
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    await_("joined")
    print("the last of the first", flush=True)
else:
    told = {name: os.environ.get(name) for name in ("CONVOY_DEVICE", "WORLD_SIZE", "MASTER_ADDR", "TOPIC", "CONVOY_JOIN")}
    with open(f"FOLDER/told", "a") as file:
        file.write(json.dumps([sys.argv[1:], told, len(os.listdir("/proc/self/fd"))]) + "\\n")
    if sum(1 for _ in open(f"FOLDER/told")) < FAILURES:
        tell(ends="lost")
        sys.exit("error: nobody answers")
    WORK
"""


JOINS = "tell(generation=1, doors=[['127.0.0.1', 7], ['127.0.0.1', 9]]); open(f'FOLDER/joined', 'w').close()"
QUICK = (sys.executable, "-S", "-c")


def launch(folder: Path, work: str, failures: int = 3) -> int:
    script = DEVICE.replace("WORK", work).replace("FOLDER", str(folder)).replace("FAILURES", str(failures))
    return launch_local(
        [script, "words"], ["cpu", "cpu:0"], command=QUICK, environment={"TOPIC": "ships"}, goes_on=True, tries_again=True
    )  # fmt: skip


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.launch.again.FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("convoy.launch.supervisor.TERMINATE_S", 0.3)
    monkeypatch.setattr("convoy.launch.local.CONVOY_COMMAND", QUICK)  # for which no store is kept here


@pytest.mark.usefixtures("_soon")
def test_a_killed_process_is_started_again_until_it_has_come_in(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It asks at the doors that were told; what it prints as the first that is left is shown; its end is that of the job."""
    before = len(os.listdir("/proc/self/fd"))
    assert launch(tmp_path, f"{JOINS}; time.sleep(0.3); print('the last', flush=True)") == 0
    tries = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    told = {"CONVOY_DEVICE": "cpu:0", "WORLD_SIZE": None, "MASTER_ADDR": None, "TOPIC": "ships"}
    told["CONVOY_JOIN"] = "127.0.0.1:7,127.0.0.1:8"
    assert [each[:2] for each in tries] == [[["words"], told]] * 3
    assert len({files for *_, files in tries}) == 1, "each with as many open files"
    out, err = capfd.readouterr()
    assert out == "the last of the first\nthe last\n"
    assert err.splitlines() == [
        "device 1 (cpu:0) was killed by SIGKILL; it is started again",
        *["device 1 (cpu:0) ended: nobody answers; it is started again"] * 2,
    ]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("_soon")
def test_when_the_others_have_ended_who_still_asks_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One that waits to be let in is no part of the job."""
    work = "open('FOLDER/joined', 'w').write(str(os.getpid())); time.sleep(60)"
    assert launch(tmp_path, work, failures=0) == 0
    assert capfd.readouterr().out == "the last of the first\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "joined").read_text()), 0)
