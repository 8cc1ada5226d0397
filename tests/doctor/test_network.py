"""The doctor on emulated hosts with real faults: blocked routes, lost packets."""

import ctypes
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.comm.environment import ProcessEnv
from convoy.comm.job_key import write_key_file
from convoy.doctor.examine import examine_job
from convoy.doctor.facts import Context, Examination, Finding, collect_facts
from convoy.doctor.findings import diagnose
from convoy.emulate import namespaces
from convoy.emulate.machine import RunName, call
from convoy.fleet import Nic
from tests.support.processes import on_processes
from tests.support.programs import needs

PORT = 29_511
GIGABIT = Nic(125e6, 125e6, 5e-5)
CLONE_NEWNET = 0x40000000

pytestmark = [pytest.mark.root, needs("ip", "tc", root=True)]


@contextmanager
def hosts(*cards: Nic) -> Iterator[namespaces.Wiring]:
    """Return emulated hosts a, b, c, ... on one switch."""
    wiring = namespaces.wire(RunName.mine(), "abcd"[: len(cards)])
    with namespaces.network(wiring):
        namespaces.shape(wiring, dict(zip("abcd", cards, strict=False)).__getitem__)
        yield wiring


def examine_on(device: int, wiring: list[list[str]], devices: int, wait_s: float) -> Any:
    """Return the findings of one device: all for device 0, its own fault for a stranded one."""
    with Path("/var/run/netns", wiring[device][0]).open() as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(
            ctypes.get_errno()
        )
    env = ProcessEnv(device, devices, 0, 1, wiring[0][1], PORT, False, 0)
    own = collect_facts(env, "cpu")
    own = replace(own, own=replace(own.own, name="abcd"[device]))
    found = examine_job(env, own, Context(), wait_s)
    findings = diagnose(found) if isinstance(found, Examination) else [found] if isinstance(found, Finding) else []
    return [f"{finding.severity}: {finding.what} | {finding.cure}" for finding in findings]


def examine(wiring: namespaces.Wiring, devices: int, wait_s: float) -> list[Sequence[str]]:
    ports = [[port.namespace, port.address] for port in wiring.ports]
    with tempfile.TemporaryDirectory() as folder:
        write_key_file(Path(folder) / "job.key")
        environment = {"CONVOY_JOB_KEY": str(Path(folder) / "job.key")}
        target = "tests.doctor.test_network:examine_on"
        return on_processes(len(ports), target, ports, devices, wait_s, joined=False, environment=environment)


def test_blocked_routes_and_absent_hosts_are_named() -> None:
    """b has no route to c; d has none to a, the rendezvous host."""
    with hosts(*[GIGABIT] * 4) as wiring:
        space = {port.host: port.namespace for port in wiring.ports}
        call("ip", "-netns", space["b"], "route", "add", "unreachable", wiring.port("c").address)
        call("ip", "-netns", space["d"], "route", "add", "unreachable", wiring.port("a").address)
        first, second, third, [stranded] = examine(wiring, 4, 3.0)
    assert (second, third) == ([], [])
    text = "\n".join(first)
    assert "error: b does not reach c: 10.77.0.3 port" in text
    assert "ip route get 10.77.0.3" in text
    assert "error: c does not reach b: 10.77.0.2 port" in text, "b cannot answer"
    assert "error: 1 of 4 devices did not connect within 3 s: device 3" in text
    assert stranded.startswith(f"error: device 3 cannot reach device 0 at 10.77.0.1 port {PORT}")
    assert "No route to host" in stranded


def test_lost_full_size_packets_are_an_mtu_error() -> None:
    """Jumbo frames on both hosts, not on the switch: small messages pass, data never arrives."""
    with hosts(GIGABIT, GIGABIT) as wiring:
        for port in wiring.ports:
            # Single packets: the virtual switch would pass on bundles of any size.
            call("ip", "-netns", port.namespace, "link", "set", namespaces.NIC, "mtu", "9000", "gso_max_segs", "1")
        first, _ = examine(wiring, 2, 5.0)
    assert first[0].startswith("error: the devices cannot work as one job: ")
    assert "MTU" in first[0]
