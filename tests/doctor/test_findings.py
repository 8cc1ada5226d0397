"""Findings for given facts, and none for a healthy fleet."""

import io
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from rich.console import Console

from convoy.comm.rendezvous import ProcessInfo
from convoy.doctor.doctor import show
from convoy.doctor.examine import absent
from convoy.doctor.facts import (
    CONTEXT,
    FACTS,
    Context,
    DeviceFacts,
    Examination,
    Finding,
    Pace,
    Reach,
    Way,
    assemble,
    from_text,
)
from convoy.doctor.findings import diagnose
from convoy.errors import MismatchError
from convoy.fleet import Device, Fleet, Host, Link, Nic
from convoy.launch.survey import Answer
from convoy.measure.device_info import DeviceInfo

GB = 10**9


def facts(device: int, devices: int = 3, *, info: dict[str, Any] | None = None, **changed: Any) -> DeviceFacts:
    """Return a healthy machine a, b, c, ...; `info` changes its report on joining a job."""
    name = "abcdefghij"[device]
    own = DeviceInfo(name, f"machine {name}", "cpu", 4, 12 * GB, 1.0)
    reported = ProcessInfo("cpu", "x86_64", name, f"10.0.0.{device + 1}", str(devices), "0.1.0", "2.13", accelerator="")
    healthy: dict[str, Any] = {
        "own": own, "inventory": Answer(4, 16 * GB, "Xeon", ()), "cores": 4.0, "free_bytes": 12 * GB,
        "memory_bytes": 16 * GB, "shm_bytes": (8 << 30, 8 << 30), "open_files": 4096,
    }  # fmt: skip
    return DeviceFacts(device, replace(reported, **(info or {})), **{**healthy, **changed})


def described(hosts: str = "abc", rate: float = 125e6, cores: float | None = None) -> Fleet:
    devices = tuple(Device(f"{name}-cpu", name, "cpu", cores) for name in hosts)
    return Fleet(tuple(Host(name) for name in hosts), devices, Nic(rate, rate, 1e-4))


def job(
    *changed: DeviceFacts, devices: int = 3, rates: dict[tuple[int, int], float] | None = None,
    closed: dict[tuple[int, int], Reach] | None = None, latency_s: float = 1e-4, file: Fleet | None = None,
    missing: tuple[int, ...] = (),
) -> Examination:  # fmt: skip
    """Return a healthy job of one device per host, except for given link rates (bytes/s) and blocked routes."""
    new = {each.device: each for each in changed}
    came = [new.get(device, facts(device, devices)) for device in range(devices) if device not in missing]
    found = replace(
        assemble(devices, came, Context(file)), paces={each.device: Pace(100.0) for each in came},
        ways=tuple(
            Way(a.device, b.device, b.info.address, 4242, (closed or {}).get((a.device, b.device), Reach.OPEN))
            for a, b in permutations(came, 2)
        ),
    )  # fmt: skip
    links = tuple(
        Link(found.host[a], found.host[b], (rates or {}).get((a, b), 118e6), latency_s)
        for a, b in permutations(sorted(found.host), 2)
        if found.host[a] != found.host[b]
    )
    return found if closed else replace(found, measured=replace(found.fleet, links=links))


def only(found: Examination) -> Finding:
    findings = diagnose(found)
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.parametrize("devices", [1, 3])
def test_a_healthy_fleet_has_no_findings(devices: int) -> None:
    assert diagnose(job(devices=devices)) == ()


def test_errors_come_first_then_warnings_then_notes() -> None:
    found = job(facts(0, info={"convoy": "0.2.0"}), facts(1, free_bytes=GB))
    found = replace(found, paces={**found.paces, 2: Pace(20.0)})
    assert [finding.severity for finding in diagnose(found)] == ["error", "warning", "note"]


# --- the job ----------------------------------------------------------------------------------------------------------


def test_absent_devices_are_named() -> None:
    [finding] = absent(job(missing=(2,)), "10.0.0.1 port 29500", 30.0)
    assert finding.what == "1 of 3 devices did not connect within 30 s: device 2"
    assert "cannot reach 10.0.0.1 port 29500" in finding.cure
    [finding] = absent(job(missing=(2,), file=described()), "10.0.0.1 port 29500", 30.0)
    assert finding.about == ("device 2 (c-cpu)",)
    assert absent(job(), "", 30.0) == []


def test_loopback_master_address_explains_absent_devices() -> None:
    """With MASTER_ADDR=lab1 and Debian's 127.0.1.1 entry, device 0 listens where no other device can connect."""
    found = job(facts(0, 2, info={"address": "127.0.1.1"}), devices=2, missing=(1,))
    [finding] = absent(found, "lab1 port 29500", 30.0)
    assert "device 0's machine resolves lab1 port 29500 to 127.0.1.1, which only it can reach" in finding.cure


def test_a_silent_device_is_named() -> None:
    found = job()
    finding = only(replace(found, paces={0: Pace(100.0), 2: Pace(100.0)}))
    assert finding.what == "device 1 (b-cpu0): it stopped answering during the examination"


@pytest.mark.parametrize(
    ("info", "what"),
    [
        ({"torch": "2.11"}, "do not run the same torch: 2.13 on most, but 2.11 on device 1 (host b, cpu)"),
        ({"convoy": "0.0.9"}, "do not run the same convoy: 0.1.0 on most, but 0.0.9 on device 1"),
        ({"devices": "2"}, "number of devices (WORLD_SIZE): 4 on most, but 2 on device 1"),
    ],
)
def test_unstartable_job_is_an_error(info: dict[str, str], what: str) -> None:
    finding = only(job(facts(1, 4, info=info), devices=4))
    assert what in finding.what
    assert finding.severity == "error"
    assert what in only(job(facts(1, 4, info=info), devices=4, missing=(3,))).what, "numbered as in the whole job"


def test_a_fleet_file_of_another_job_is_an_error() -> None:
    assert "the fleet file has 3 devices, this job has 2" in only(job(devices=2, file=described())).what
    gpu = replace(described(), devices=(*described().devices[:2], Device("c-gpu", "c", "cuda")))
    assert "device 2 (c-gpu) is cuda in the fleet file, but computes on cpu" in only(job(file=gpu)).what
    together = facts(1, 2, own=replace(facts(1).own, machine="machine a"))
    first = diagnose(job(together, devices=2, file=described("ab")))[0]
    assert "a-cpu and b-cpu are on two hosts in the fleet file" in first.what


def test_one_address_on_two_machines_is_an_error() -> None:
    """Docker gives the first container of every machine 172.17.0.2."""
    bridged = [facts(device, info={"address": "172.17.0.2"}) for device in (0, 1)]
    finding = only(job(*bridged))
    assert finding.what == "a and b both have the address 172.17.0.2"
    assert "--network=host" in finding.cure


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reach", "what", "cure"),
    [
        (Reach.NO_ROUTE, "b does not reach c: 10.0.0.3 port 4242 cannot be reached (no route", "ip route get 10.0.0.3"),
        (Reach.SILENT, "b does not reach c: 10.0.0.3 port 4242 does not answer, though c listens", "firewall"),
        (Reach.REFUSED, "b does not reach c: 10.0.0.3 port 4242 refuses the connection", "any port from 1024 up"),
    ],
)
def test_blocked_route_is_an_error(reach: Reach, what: str, cure: str) -> None:
    finding = only(job(closed={(1, 2): reach}))
    assert finding.severity == "error"
    assert finding.what.startswith(what)
    assert cure in finding.cure
    both = only(job(devices=4, closed={(1, 2): reach, (2, 1): reach}))
    assert both.what.startswith("b and c do not reach each other: 10.0.0.3")


def test_unreachable_host_is_one_finding() -> None:
    into = {(device, 2): Reach.SILENT for device in (0, 1, 3)}
    assert only(job(devices=4, closed=into)).what.startswith("no host reaches c: 10.0.0.3 port 4242 does not answer")
    out = {(2, device): Reach.NO_ROUTE for device in (0, 1, 3)}
    assert only(job(devices=4, closed=out)).what.startswith("c reaches no host: 10.0.0.1 port 4242 cannot be reached")


def test_a_slow_host_is_one_finding() -> None:
    finding = only(job(rates={pair: 11.8e6 for pair in permutations(range(3), 2) if 1 in pair}))
    assert finding.what == (
        "b sends and receives slowly on all its links: at most 11.8 MB/s of the 118 MB/s of the other links"
    )
    assert finding.cure.startswith("This is the rate of 100 Mbit/s Ethernet: a bad cable")


def test_a_slow_link_is_compared_with_the_fleet_file() -> None:
    rates = dict.fromkeys(permutations(range(2), 2), 50e6)
    assert diagnose(job(devices=2, rates=rates)) == ()
    finding = diagnose(job(devices=2, rates=rates, file=described("ab")))[0]
    assert finding.what == "the link from a to b is slow: 50 MB/s of the 125 MB/s of the fleet file"
    assert diagnose(job(devices=2, rates=rates, file=described("ab", rate=60e6))) == ()


def test_late_messages_are_a_warning() -> None:
    finding = only(job(devices=2, latency_s=0.0123))
    assert finding.what == "a message between a and b takes 12.3 ms"


# --- devices and hosts ------------------------------------------------------------------------------------------------


def alone(**changed: Any) -> Examination:
    return job(facts(0, 1, **changed), devices=1)


def gpu(**changed: Any) -> Examination:
    return alone(own=replace(facts(0).own, kind="cuda", cores=None), info={"device": "cuda:0"}, **changed)


@pytest.mark.parametrize(
    ("found", "severity", "what", "cure"),
    [
        (alone(problems=(("no CUDA", "Set CONVOY_DEVICE"),)), "error", "device 0 (a-cpu0): no CUDA", "CONVOY_DEVICE"),
        (alone(free_bytes=GB), "warning", "device 0 (a-cpu0): 1.0 GB of 16.0 GB memory are free", "smaller share"),
        (gpu(free_bytes=4 * GB), "warning", "other programs hold 12.0 GB of the 16.0 GB of cuda:0", "nvidia-smi"),
        (alone(shm_bytes=(60 << 20, 1 << 30)), "warning", "a: /dev/shm has 60 MiB free of 1,024 MiB", "--shm-size=2g"),
        (alone(open_files=256), "warning", "a: a process may open 256 files", "ulimit -n 4096"),
        (alone(open_files=24), "error", "a: a process may open 24 files", "ulimit -n 4096"),
        (alone(cores=2.0, own=replace(facts(0).own, cores=16)), "warning", "16 threads for 2 cores", "=2 there"),
        (alone(cores=16.0, own=replace(facts(0).own, cores=1)), "warning", "1 threads for 16 cores", "=16 there"),
    ],
)  # fmt: skip
def test_machine_limits_are_findings_with_a_remedy(found: Examination, severity: str, what: str, cure: str) -> None:
    finding = only(found)
    assert (finding.severity, what in finding.what, cure in finding.cure) == (severity, True, True), finding


def test_gpus_not_found_by_torch_are_a_warning() -> None:
    inventory = Answer(4, 16 * GB, "Xeon", ("RTX 3090",))
    assert "torch 2.13, built for processors only, finds no GPU" in only(alone(inventory=inventory)).what
    assert "torch 2.13, built for CUDA 12.8, finds no GPU" in only(alone(inventory=inventory, cuda="12.8")).what
    assert diagnose(alone(inventory=inventory, cuda="12.8", accelerators=1)) == ()


def test_machine_load_by_other_programs_is_a_warning() -> None:
    found = job()
    finding = only(replace(found, paces={**found.paces, 1: Pace(100.0, busy_cores=3.1)}))
    assert finding.what == "b: other programs keep 3.1 of the 4 cores busy"


def test_the_slowest_device_is_a_note_with_its_share() -> None:
    found = job()
    finding = only(replace(found, paces={**found.paces, 2: Pace(25.0)}))
    assert finding.what == "device 2 (c-cpu0) is the slowest: 4.0 times slower than device 0 (a-cpu0)"
    assert "11% of the work" in finding.cure


# --- texts and the report ---------------------------------------------------------------------------------------------


def test_facts_travel_as_json() -> None:
    full = facts(1, problems=(("a", "b"),), cuda="12.8")
    assert from_text(FACTS, FACTS.dump_json(full).decode(), "device 1") == full
    context = Context(described(), (Finding("error", "b", "c", ("a",)),))
    assert from_text(CONTEXT, CONTEXT.dump_json(context).decode(), "--case") == context
    for text in ("", "no JSON", '{"device": "first"}', "[" * 10_000):
        with pytest.raises(MismatchError, match="device 3 sent an answer that this convoy doctor cannot read"):
            from_text(FACTS, text, "device 3")


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_terminal(width: int) -> None:
    console = Console(width=width, record=True, highlight=False, markup=False, emoji=False, file=io.StringIO())
    named = facts(1, inventory=Answer(4, 16 * GB, "Intel(R) Core(TM) i7-10700K CPU @ 3.80GHz", ()))
    for found in (job(named, closed={(0, 1): Reach.SILENT}), job(rates={(2, 0): 5e6})):
        show(found, diagnose(found), 2.34, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    for words in ("10.0.0.3", "i7-10700K", "a to b: no answer", "c to a: 5 MB/s, 0.1 ms one way", "torch 2.13"):
        assert words in text
    assert "\n    A firewall blocks the connection" in text
    assert "Not ready to train: 1 error. Examined in 2.3 s." in text
    assert text.splitlines()[-1] == "Ready to train: 1 warning. Examined in 2.3 s."
