"""Survivors name every device that dies, freezes, leaves or diverges, with distinct messages."""

import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from convoy.comm.connection import Credentials
from convoy.comm.environment import listen_at
from convoy.comm.failure import FailureReport, Health, HealthServer, NoAnswer, find_failed
from convoy.comm.group import Group, Message
from convoy.comm.job_key import make_key
from convoy.comm.listener import Listener
from convoy.comm.processes import join
from convoy.errors import MismatchError
from tests.comm.test_group import say
from tests.support.networks import on_each_network, on_each_network_slowly
from tests.support.processes import on_processes


def lose_by_signal(group: Group, number: int) -> list[Any]:
    """Let 0 wait for 1, 1 for 2, 3 for a text of all; signal 2 while they wait."""
    group.agree("all are here", "")
    if group.device == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), number)
        time.sleep(30)
    if group.device == 3:
        return say(group, lambda: group.agree("never", ""))
    first = say(group, lambda: group.exchange([], [Message(group.device + 1, torch.zeros(1))]))
    assert first == say(group, lambda: group.exchange([Message(2, torch.zeros(1))], []))
    return first


@on_each_network
def test_all_survivors_name_a_killed_device(network: dict[str, str]) -> None:
    target = "tests.comm.test_failure:lose_by_signal"
    reports = on_processes(4, target, int(signal.SIGKILL), environment=network)
    assert reports[2] is None
    for device in (0, 1, 3):
        assert reports[device][0] == 2, reports
        assert "device 2 (host" in reports[device][1]
        assert "without a report" in reports[device][1]


@on_each_network_slowly
def test_all_survivors_name_a_frozen_device(network: dict[str, str]) -> None:
    target = "tests.comm.test_failure:lose_by_signal"
    reports = on_processes(4, target, int(signal.SIGSTOP), timeout_s=1.0, environment=network)
    assert reports[2] is None
    for device in (0, 1, 3):
        assert reports[device][0] == 2, reports
        assert "frozen" in reports[device][1]


def have_bad_days(device: int) -> list[Any]:
    """Run several groups with different faults on the same processes."""
    reports = []
    here = torch.zeros(1)

    with join("cpu", timeout_s=20) as group:  # device 2 raises; 0 waits for 1, 1 waits for 2
        if device == 2:
            group.start([], [Message(0, torch.zeros(1))])  # nobody will ever wait for this one
            group.close(ValueError("no such image"))
            reports.append([])
        else:
            reports.append(say(group, lambda: group.exchange([], [Message(device + 1, here)])))

    with join("cpu", timeout_s=20) as group:  # 1 waits for 2, 2 for 1, 0 for 1
        group.timeout_s = 0.5
        peer = {0: 1, 1: 2, 2: 1}[device]
        reports.append(say(group, lambda: group.exchange([], [Message(peer, here)])))

    with join("cpu", timeout_s=20) as group:  # 1 computes for long; 2 waits for it, and 0 for 2
        group.timeout_s = 0.5
        if device == 1:
            time.sleep(3.0)
            reports.append([])
        else:
            reports.append(say(group, lambda: group.exchange([], [Message({0: 2, 2: 1}[device], here)])))

    with join("cpu", timeout_s=20) as group:  # 1 sends more than 0 expects
        group.timeout_s = 0.5
        if device == 1:
            reports.append(say(group, lambda: group.exchange([Message(0, torch.ones(8))], [Message(0, here)])))
        elif device == 0:
            reports.append(say(group, lambda: group.exchange([], [Message(1, torch.zeros(4))])))
        else:
            reports.append([])

    for kind in (TimeoutError, RuntimeError):  # a signal handler of 1 raises while it waits for 2
        with join("cpu", timeout_s=20) as group:
            if device == 1:
                reports.append(interrupted(group, kind))
            else:
                reports.append(say(group, lambda: group.exchange([], [Message(1, here)])))

    with join("cpu", timeout_s=20) as group:  # 0 still waits for 1, which has finished
        if device == 0:
            reports.append(say(group, lambda: group.exchange([], [Message(1, here)])))
        else:
            group.timeout_s = 0.5  # also bounds the exit barrier
            reports.append([])

    with join("cpu", timeout_s=20) as group:
        try:
            group.agree("this" if device else "that", "")
        except MismatchError as error:
            reports.append(str(error))

    with join("cpu", timeout_s=20) as group:
        try:
            if device == 0:
                group.agree("this", "")
            reports.append("no error")
        except MismatchError as error:
            reports.append(str(error))

    with join("cpu", timeout_s=20) as group:  # and after all that everything is well again
        reports.append(list(group.agree("end", str(device))))
    return reports


def interrupted(group: Group, kind: type[Exception]) -> list[Any]:
    """Raise an exception in a signal handler during a wait, as a script's time limit or torch for a killed worker does."""

    def raises(*_: object) -> None:
        raise kind("own limit")

    before = signal.signal(signal.SIGALRM, raises)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(kind, match="own limit"):
        group.exchange([], [Message(2, torch.zeros(1))])
    signal.signal(signal.SIGALRM, before)
    return say(group, lambda: group.agree("after it", ""))


@on_each_network_slowly
def test_failure_causes_are_distinguished(network: dict[str, str]) -> None:
    raised, circle, slow, sizes, timeout, worker, finished, topics, alone, end = zip(
        *on_processes(3, "tests.comm.test_failure:have_bad_days", joined=False, environment=network), strict=True
    )
    for device in (0, 1):
        assert raised[device][0] == 2, raised
        assert "ValueError: no such image" in raised[device][1]
    for device in (0, 1, 2):
        assert circle[device][0] in (1, 2), circle
        assert "circle" in circle[device][1]
    for device in (0, 2):
        assert slow[device][0] == 1, slow
        assert "alive" in slow[device][1]
    for device in (0, 1):
        assert "do not run the same steps" in sizes[device][1], sizes
    for device in range(3):
        assert timeout[device][0] == worker[device][0] == 1, (timeout, worker)
        assert "left because of its own error: TimeoutError: own limit" in timeout[device][1]
        assert "left because of its own error: RuntimeError: own limit" in worker[device][1]
    assert finished[0][0] == 1, finished
    assert "had ended its work" in finished[0][1]
    assert all("'this'" in text and "'that'" in text for text in topics), topics
    assert re.match(
        r"device 0 is at 'this' \(test_failure.py line \d+, `group.agree.*`\) while device 1 is at", alone[0]
    )
    assert "'exit barrier'" in alone[0]
    assert list(end) == [["0", "1", "2"]] * 3


@dataclass(frozen=True)
class LateReport:
    """A report in transit: it is found only after a short wait."""

    note: FailureReport


Said = Health | NoAnswer | FailureReport | LateReport


class StoryPeers:
    """Peer replies given by a test."""

    def __init__(self, story: dict[int, Said]) -> None:
        self.story = story

    def ping(self, device: int) -> Health | NoAnswer:
        said = self.story[device]
        return said if isinstance(said, (Health, NoAnswer)) else NoAnswer.DEAD

    def report_from(self, device: int, timeout_s: float) -> FailureReport | None:
        said = self.story[device]
        if isinstance(said, LateReport) and timeout_s > 0:
            return said.note
        return said if isinstance(said, FailureReport) else None


@pytest.mark.parametrize(
    ("story", "silent_s", "lost", "words"),
    [
        ({1: NoAnswer.DEAD}, None, 1, "without a report"),
        ({1: NoAnswer.FROZEN}, 60.0, 1, "sent nothing for 60 s, and its process exists but does not answer"),
        ({1: NoAnswer.UNREACHABLE}, 60.0, 1, "cable"),
        ({1: Health(2), 2: Health(3), 3: NoAnswer.DEAD}, 60.0, 3, "without a report"),
        ({1: Health(2), 2: Health(3), 3: NoAnswer.FROZEN}, None, 3, "frozen"),
        ({1: Health(2), 2: FailureReport(2, 3, "was lost: a story")}, 60.0, 3, "a story"),
        ({1: Health(2), 2: LateReport(FailureReport(2, 3, "was lost: a story"))}, 60.0, 3, "a story"),
        ({1: LateReport(FailureReport(1, 1, "left because of its own error"))}, None, 1, "own error"),
        ({1: FailureReport(1, 1, "left because of its own error")}, None, 1, "own error"),
        ({1: Health(2), 2: Health(None)}, 60.0, 2, "alive but sent nothing"),
        ({1: Health(None)}, None, 1, "continued after an error"),
        ({1: Health(2), 2: Health(done=True)}, 60.0, 2, "had ended its work"),
        ({1: Health(0)}, 60.0, 1, r"0 -> 1 -> 0"),
    ],
)
def test_root_cause_of_a_loss_is_found(story: dict[int, Said], silent_s: float | None, lost: int, words: str) -> None:
    verdict = find_failed(StoryPeers(story), me=0, peer=1, silent_s=silent_s, ids=range(4))
    assert verdict.device == lost
    assert words in verdict.cause


def test_connections_to_lost_devices_are_closed() -> None:
    """Regression: a device that had been asked whether it is alive kept its connection."""
    credentials = Credentials(make_key())
    listeners = [Listener(listen_at("127.0.0.1", 0), credentials) for _ in range(3)]
    servers = [HealthServer(device, listener, "a test") for device, listener in enumerate(listeners)]
    try:
        for other in servers[1:]:
            assert servers[0].ask(other.address, "health") == {
                "waits_for": None,
                "done": False,
                "line": ANY,
                "moved": 0,
            }
        gone, stays = (servers[0]._open[other.address] for other in servers[1:])
        servers[0].keep_open([servers[2].address])
        assert (gone.socket.fileno() < 0, stays.socket.fileno() < 0) == (True, False)
        assert not isinstance(servers[0].ask(servers[1].address, "health"), NoAnswer), "it is called again"
    finally:
        for server in servers:
            server.close()
