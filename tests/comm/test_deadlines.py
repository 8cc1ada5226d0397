"""Time limits follow measured times: a slow link loses nobody, a pulled cable is noticed although the upper bound is far."""

import io
import json
import math
import subprocess
import sys

import pytest

from convoy.comm.connection import Credentials
from convoy.comm.deadlines import wait_limit
from convoy.comm.environment import listen_at
from convoy.comm.failure import FailureReport, Health, HealthServer, NoAnswer, find_failed
from convoy.comm.listener import Listener
from convoy.emulate.run import emulate
from convoy.fleet import Device, Fleet, Host, Nic
from tests.support.processes import ROOT
from tests.support.programs import needs


@pytest.mark.parametrize(
    ("recent_s", "most_s", "expected_s"),
    [
        ([], 600.0, 3.0),  # nothing measured: the floor
        ([0.001, 0.2], 600.0, 3.0),  # 8 x 0.2 s = 1.6 s, below the floor
        ([0.5, 0.75, 0.6], 600.0, 6.0),  # 8 x 0.75 s
        ([100.0], 600.0, 600.0),  # 800 s, above the upper bound
        ([], 1.0, 1.0),  # the upper bound is below the floor
    ],
)
def test_a_limit_is_eight_times_the_longest_recent_time(
    recent_s: list[float], most_s: float, expected_s: float
) -> None:
    assert wait_limit(recent_s, most_s) == expected_s


def test_limits_follow_measured_round_trips() -> None:
    listener = Listener(listen_at("127.0.0.1", 0), Credentials(None))
    server = HealthServer(0, listener, "token", 60.0)
    try:
        assert not isinstance(server.ask(listener.address, "health"), NoAnswer)
        assert server.limit_s == 3.0
        server.note_trip(1.5)
        assert (server.limit_s, server.limit_of(4)) == (12.0, 48.0)
        for _ in range(32):
            server.note_trip(0.01)
        assert server.limit_s == 3.0
    finally:
        server.close()


class Peers(HealthServer):
    """Devices with given replies."""

    def __init__(self, replies: dict[int, Health | NoAnswer]) -> None:
        self.replies = replies

    def ping(self, device: int) -> Health | NoAnswer:
        return self.replies[device]

    def report_from(self, device: int, timeout_s: float) -> FailureReport | None:  # noqa: ARG002
        return None


@pytest.mark.parametrize(
    ("replies", "holds", "moved"),
    [
        ({1: NoAnswer.DEAD}, 0.0, 0),
        ({1: Health(2, moved=5), 2: NoAnswer.UNREACHABLE}, 3.0, 5),
        ({1: Health(2, moved=5), 2: Health(0, moved=7)}, 20.0, 12),
        ({1: Health(done=True, moved=5)}, 1.0, 5),
        ({1: Health(2, moved=5), 2: Health(moved=7)}, math.inf, 12),
    ],
)
def test_only_an_ended_process_is_lost_at_once(replies: dict[int, Health | NoAnswer], holds: float, moved: int) -> None:
    verdict = find_failed(Peers(replies), me=0, peer=1, silent_s=3.0, ids=range(3))
    assert (verdict.holds, verdict.moved) == (holds, moved)


# --- on real links ------------------------------------------------------------------------------------------------

JOINS = """
import subprocess, sys, time
import torch, convoy
from convoy.comm.group import Message
group = convoy.join(timeout_s=float(sys.argv[1]))
"""

# A message of 0.5 MB takes 4 s at 1 Mbit/s: twice the upper bound of a wait without a byte.
SENDS = """
if group.device == 1:
    subprocess.run("tc qdisc change dev eth0 root tbf rate 1mbit burst 5kb latency 1s".split(), check=True)
place = torch.ones(125_000) * group.device
group.exchange([Message(0, place)] if group.device else [], [] if group.device else [Message(1, place)])
group.agree("end", "")
if group.device == 0: print("arrived", place.sum().item())
"""

PULLS = """
group.agree("all are here", "")
begin_s = time.monotonic()
if group.device == 1:
    subprocess.run("ip link set eth0 down".split(), check=True)
    time.sleep(300)
try:
    group.exchange([], [Message(1, torch.zeros(1))])
except convoy.DeviceLostError as error:
    sys.exit(f"{time.monotonic() - begin_s:.1f} s: {error}")
"""

SCRIPT = str(ROOT / "tests" / "support" / "members_script.py")


def on_hosts(count: int, *words: str, continues: bool = False) -> tuple[int, str]:
    hosts = tuple(Host("abc"[index]) for index in range(count))
    devices = tuple(Device(f"{host.name}-cpu", host.name, "cpu") for host in hosts)
    output, command = io.StringIO(), [sys.executable, *words]
    fleet = Fleet(hosts, devices, Nic(125e6, 125e6, 5e-5))
    return emulate(fleet, command, timeout_s=100.0, output=output, continues=continues), output.getvalue()


@pytest.mark.root
@needs("ip", "tc", root=True)
def test_a_message_may_take_longer_than_the_upper_bound_while_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    status, printed = on_hosts(2, "-c", JOINS + SENDS, "2")
    assert (status, "arrived 125000.0" in printed) == (0, True), printed


@pytest.mark.slow
@pytest.mark.root
@needs("ip", "tc", root=True)
def test_a_pulled_cable_is_noticed_long_before_the_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    _, printed = on_hosts(2, "-c", JOINS + PULLS, "600")
    assert "device 1" in printed, printed
    assert "it is off, or its cable is out" in printed, printed


@pytest.mark.slow
@pytest.mark.root
@needs("ip", "tc", root=True)
@pytest.mark.parametrize(
    ("command", "lost"),
    [
        ("tc qdisc change dev eth0 root tbf rate 40kbit burst 5kb latency 4s", False),
        ("ip link set eth0 down", True),
    ],
)
def test_a_link_that_becomes_slow_loses_nobody_and_a_pulled_cable_does(
    command: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    status, printed = on_hosts(3, SCRIPT, "2", "0", command, continues=True)
    assert status == 0, printed
    assert ("2 continue after step" in printed) == lost, printed
    alone = subprocess.check_output([sys.executable, SCRIPT, "2"], text=True)
    losses = [[json.loads(row)["loss"] for row in text.splitlines() if row[:1] == "{"] for text in (printed, alone)]
    assert len(losses[0]) == 8
    assert losses[0] == pytest.approx(losses[1], rel=1e-10, abs=1e-12)
