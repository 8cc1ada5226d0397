"""The doctor on emulated hosts with real troubles: closed ways, a slow card, a wrong clock, hosts that never come."""

import ctypes
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.comm.environment import ProcessEnv
from convoy.comm.job_key import write_key_file
from convoy.doctor.examine import examine_job
from convoy.doctor.findings import diagnose
from convoy.doctor.probes import check_up
from convoy.doctor.schema import Context, Examination, Finding, Reach
from convoy.emulate import namespaces
from convoy.emulate.machine import RunName, call
from convoy.fleet import Card
from tests.support.processes import on_processes
from tests.support.programs import needs

PORT = 29_511
GIGABIT, FAST_ETHERNET = Card(125e6, 125e6, 5e-5), Card(12.5e6, 12.5e6, 5e-5)
CLONE_NEWNET = 0x40000000

pytestmark = [pytest.mark.root, needs("ip", "tc", root=True)]


@contextmanager
def hosts(cards: Sequence[Card]) -> Iterator[namespaces.Wiring]:
    """Emulated hosts a, b, c, ... on one switch; gone afterwards."""
    wiring = namespaces.wire(RunName.mine(), "abcdefgh"[: len(cards)])
    with namespaces.network(wiring):
        namespaces.shape(wiring, dict(zip("abcdefgh", cards, strict=False)).__getitem__)
        yield wiring
    assert not [name for name in namespaces.namespaces() if name in {port.namespace for port in wiring.ports}]


def enter(namespace: str) -> None:
    """Move this process, which has one thread, into a network namespace."""
    with Path("/var/run/netns", namespace).open() as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(
            ctypes.get_errno()
        )


def examine_on(device: int, wiring: list[list[str]], devices: int, wait_s: float, troubles: dict[str, Any]) -> Any:
    """What one device of a job finds: device 0 all findings, a stranded one what is in its way."""
    namespace, _ = wiring[device]
    enter(namespace)
    env = ProcessEnv(device, devices, 0, 1, wiring[0][1], PORT, False, 0)
    names = troubles.get("names", {}).get(str(device), ["10.0.0.1"])
    facts = check_up(env, "cpu", environment={}, resolver=lambda name: [name] if name[0].isdigit() else names)
    facts = replace(facts, host="abcdefgh"[device], **troubles.get("facts", {}).get(str(device), {}))
    ahead_ns = int(troubles.get("ahead_s", {}).get(str(device), 0) * 1e9)
    start_s = time.monotonic()
    outcome = examine_job(env, facts, Context(), wait_s, wall_ns=lambda: time.time_ns() + ahead_ns)
    took_s = time.monotonic() - start_s
    if isinstance(outcome, Examination):
        reaches = {f"{link.source}{link.target}": link.reach.value for link in outcome.links}
        return [[f.severity, f.what, f.cure] for f in diagnose(outcome)], reaches, took_s
    return [outcome.severity, outcome.what, outcome.cure] if isinstance(outcome, Finding) else None


def examine(wiring: namespaces.Wiring, devices: int, wait_s: float, **troubles: Any) -> list[Any]:
    ports = [[port.namespace, port.address] for port in wiring.ports]
    target = "tests.doctor.test_doctor_network:examine_on"
    with tempfile.TemporaryDirectory() as folder:
        write_key_file(Path(folder) / "job.key")
        environment = {"CONVOY_JOB_KEY": str(Path(folder) / "job.key")}
        return on_processes(len(ports), target, ports, devices, wait_s, troubles, joined=False, environment=environment)


def found(findings: Sequence[Sequence[str]], words: str) -> Sequence[str]:
    matches = [finding for finding in findings if words in finding[1]]
    assert len(matches) == 1, (words, findings)
    return matches[0]


@pytest.mark.slow
def test_five_hosts_with_a_trouble_each() -> None:
    """b has no route to c; the card of d runs at 100 Mbit/s; the clock of b is wrong; c has another version, and its name
    leads to loopback; e has no route to a, where all meet; a sixth is never started. All is told, in seconds."""
    with hosts([GIGABIT, GIGABIT, GIGABIT, FAST_ETHERNET, GIGABIT]) as wiring:
        space = {port.host: port.namespace for port in wiring.ports}
        call("ip", "-netns", space["b"], "route", "add", "unreachable", wiring.port("c").address)
        call("ip", "-netns", space["e"], "route", "add", "unreachable", wiring.port("a").address)
        first, *others, stranded = examine(
            wiring, 6, 3.0, ahead_s={"1": 90}, facts={"2": {"convoy": "9.9.9"}}, names={"2": ["127.0.1.1"]}
        )
    assert others == [None] * 3
    findings, reaches, took_s = first
    closed = {pair: reach for pair, reach in reaches.items() if reach != Reach.OPEN.value}
    assert closed == {"12": Reach.NO_ROUTE.value, "21": Reach.SILENT.value}, "b cannot send, so c hears nothing"
    assert len(reaches) == 12

    assert found(findings, "b does not reach c")[0] == "error"
    assert "ip route get 10.77.0.3" in found(findings, "b does not reach c: there is no way to 10.77.0.3")[2]
    assert "firewall drops it" in found(findings, "c does not reach b: 10.77.0.2")[2]
    assert "device 4, device 5" in found(findings, "2 of 6 devices did not come within 3 s")[1]
    assert "9.9.9 on device 2 (cpu of c)" in found(findings, "not the same convoy everywhere")[1]
    assert found(findings, "the clock of b is 90 s ahead of the others'")[0] == "warning"
    assert found(findings, "on c the machine's own name leads to itself only (127.0.1.1)")[0] == "warning"
    slow = found(findings, "d sends and receives slowly, on all its links")
    assert (slow[0], "100 Mbit/s" in slow[2]) == ("warning", True)
    assert took_s < 30

    severity, what, cure = stranded
    assert severity == "error"
    assert (
        what
        == f"device 4 cannot come to the meeting point 10.77.0.1 port {PORT}: there is no way to it (no route to host)"
    )
    assert "ip route get 10.77.0.1" in cure


def test_data_that_a_switch_swallows() -> None:
    """Jumbo frames on both hosts, not on the switch: greetings pass, data never arrives."""
    with hosts([GIGABIT, GIGABIT]) as wiring:
        for port in wiring.ports:
            # Single packets: the virtual switch would pass on bundles of any size.
            call("ip", "-netns", port.namespace, "link", "set", namespaces.NIC, "mtu", "9000", "gso_max_segs", "1")
        (findings, reaches, _), other = examine(wiring, 2, 10.0)
    assert other is None
    assert set(reaches.values()) == {Reach.OPEN.value}
    assert "MTU" in found(findings, "small messages pass from a to b, but data does not")[2]
    assert found(findings, "small messages pass from b to a, but data does not")[0] == "error"


def test_a_meeting_point_behind_a_firewall() -> None:
    """Packets of b to a are answered nowhere: b says so, and a says who is missing."""
    with hosts([GIGABIT, GIGABIT]) as wiring:
        space = wiring.port("a").namespace
        call("ip", "-netns", space, "route", "add", "blackhole", wiring.port("b").address)
        (findings, _, _), (severity, what, cure) = examine(wiring, 2, 1.0)
    assert "device 1" in found(findings, "1 of 2 devices did not come within 1 s")[1]
    assert severity == "error"
    assert what == f"device 1 cannot come to the meeting point 10.77.0.1 port {PORT}: no answer (1 s)"
    assert f"sudo ufw allow {PORT}/tcp" in cure
