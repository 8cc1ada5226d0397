"""What the doctor says of hand-made facts: each finding by its story, and nothing of a healthy fleet."""

import math
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from convoy.cost.table import DeviceCosts, LayerPoint, Measurement
from convoy.doctor.conditions import ahead_of_most, listed, usual_rate
from convoy.doctor.examine import past_samples_per_s
from convoy.doctor.findings import diagnose, merged
from convoy.doctor.links import MIN_EACH_S, TOTAL_S, clock_ahead_s, schedule_for
from convoy.doctor.schema import (
    CHECKUP,
    TEXT_BYTES,
    Checkup,
    Examination,
    Finding,
    Gpu,
    Interface,
    Link,
    Pace,
    Reach,
    from_text,
    to_text,
)
from convoy.errors import MismatchError
from convoy.fleet import Card, Device, Fleet, Host

GIGABIT = 118e6
GB = 1 << 30


def checkup(device: int, devices: int = 3, **facts: Any) -> Checkup:
    """A machine that nothing is wrong with."""
    name, address = "abcdefghij"[device], f"10.0.0.{device + 1}"
    healthy: dict[str, Any] = {
        "host": name, "machine": f"machine {name}", "hardware": "Xeon", "address": address,
        "meets_at": ("10.0.0.1 port 29500", "10.0.0.1"), "interfaces": (Interface("eth0", (address,), 125e6),),
        "resolves_to": (address,), "python": "3.11", "torch": "2.13.0+cpu", "convoy": "0.1.0", "cores": 4, "threads": 4,
        "free_bytes": 12 * GB, "memory_bytes": 16 * GB, "shared_bytes": 8 * GB, "open_files": 1024,
    }  # fmt: skip
    return Checkup(device=device, devices=devices, **{**healthy, **facts})


def link(source: int, target: int, **facts: Any) -> Link:
    healthy = {"reach": Reach.OPEN, "round_trip_s": 2e-4, "ahead_s": 0.001, "bytes_per_s": GIGABIT}
    return Link(source, target, f"10.0.0.{target + 1} port 4242", **{**healthy, **facts})


def closed(source: int, target: int, reach: Reach) -> Link:
    return Link(source, target, f"10.0.0.{target + 1} port 4242", reach)


def fleet_job(devices: int = 3, **changed: Any) -> Examination:
    """So many healthy hosts with a device each; `checkups`, `links` and `paces` by key in place of the healthy ones."""
    checkups = {device: checkup(device, devices) for device in range(devices)} | changed.pop("checkups", {})
    links = {pair: link(*pair) for pair in permutations(range(devices), 2)} | changed.pop("links", {})
    paces = {device: Pace(100.0) for device in range(devices)} | changed.pop("paces", {})
    came = {device: each for device, each in checkups.items() if each is not None}
    ways = tuple(each for pair, each in links.items() if came.keys() >= set(pair))
    paces = {device: pace for device, pace in paces.items() if device in came}
    return Examination(devices, tuple(came.values()), paces, ways, **changed)


def only(examination: Examination) -> Finding:
    """The one finding there is."""
    findings = diagnose(examination)
    assert len(findings) == 1, findings
    return findings[0]


def told(finding: Finding, severity: str, what: str, cure: str) -> None:
    assert (finding.severity, finding.what) == (severity, what)
    assert cure in finding.cure


def described(rate: float = 125e6, cores: float | None = None, hosts: str = "abc") -> Fleet:
    card = Card(rate, rate, 1e-4)
    devices = tuple(Device(f"{name}-cpu", name, "cpu", cores) for name in hosts)
    return Fleet(tuple(Host(name) for name in hosts), devices, card)


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_of_a_healthy_fleet_nothing_is_said(devices: int) -> None:
    assert diagnose(fleet_job(devices)) == ()


def test_errors_come_first_then_warnings_then_notes() -> None:
    examination = fleet_job(
        checkups={0: checkup(0, python="3.12"), 1: checkup(1, free_bytes=GB), 2: checkup(2, convoy="0.2.0")}
    )
    assert [finding.severity for finding in diagnose(examination)] == ["error", "warning", "note"]


# --- the job ----------------------------------------------------------------------------------------------------------


def test_devices_that_never_came_are_named() -> None:
    examination = fleet_job(checkups={2: None}, waited_s=30.0)
    finding = only(examination)
    told(finding, "error", "1 of 3 devices did not come within 30 s: device 2", "cannot reach 10.0.0.1 port 29500")
    finding = only(replace(examination, fleet=described()))
    assert finding.what.endswith("device 2 (c-cpu) on host c")
    assert finding.about == ("device 2 (c-cpu)",)


def test_a_meeting_point_on_loopback_explains_why_nobody_came() -> None:
    """MASTER_ADDR=lab1, and Debian's /etc/hosts on lab1 says 127.0.1.1: device 0 listens where nobody can come."""
    alone = checkup(0, meets_at=("lab1 port 29500", "127.0.1.1"))
    finding = only(Examination(2, (alone,), {0: Pace(1.0)}, waited_s=30.0))
    told(finding, "error", "1 of 2 devices did not come within 30 s: device 1", "lab1 port 29500 is 127.0.1.1 on a")
    assert finding.cure.endswith("set MASTER_ADDR to its address in the network, such as eth0 with 10.0.0.1")


def test_a_device_that_fell_silent_is_named() -> None:
    examination = fleet_job()
    silent = replace(examination, paces={0: Pace(100.0), 2: Pace(100.0)})
    told(only(silent), "error", "device 1 (cpu of b) came, then fell silent while it was examined", "died or froze")


def test_version_skew_names_the_minority() -> None:
    finding = only(fleet_job(checkups={1: checkup(1, torch="2.11.1")}))
    told(finding, "error", "not the same torch everywhere: 2.13 on most, but 2.11 on device 1 (cpu of b)", "same torch")
    assert only(fleet_job(checkups={2: checkup(2, convoy="0.0.9")})).about == ("device 2 (cpu of c)",)
    assert diagnose(fleet_job(checkups={1: checkup(1, torch="2.13.1+cu128")})) == (), "patch releases work together"


def test_a_device_that_computes_in_another_mode_is_named() -> None:
    tf32 = {"torch.get_float32_matmul_precision": "high"}
    usual = {each: checkup(each, modes={"torch.get_float32_matmul_precision": "highest"}) for each in (0, 2)}
    finding = only(fleet_job(checkups=usual | {1: checkup(1, modes=tf32)}))
    told(
        finding,
        "error",
        "torch computes in other modes: torch.get_float32_matmul_precision is highest on most, but high on device 1 (cpu of b)",
        "TF32",
    )


def test_other_pythons_are_a_note() -> None:
    told(
        only(fleet_job(checkups={1: checkup(1, python="3.13")})),
        "note",
        "the hosts run Python 3.11 and 3.13",
        "Nothing",
    )


def test_a_device_that_counts_another_number_of_devices_is_named() -> None:
    finding = only(fleet_job(checkups={1: checkup(1, devices=2)}))
    assert finding.what.startswith(
        "not the same number of devices (WORLD_SIZE) everywhere: 3 on most, but 2 on device 1"
    )


def test_one_address_on_two_machines() -> None:
    """Docker gives the first container of every machine 172.17.0.2."""
    bridged = {d: checkup(d, address="172.17.0.2", interfaces=(Interface("eth0", ("172.17.0.2",)),)) for d in (0, 1)}
    told(
        only(fleet_job(2, checkups=bridged)),
        "error",
        "a and b both say that their address is 172.17.0.2",
        "--network=host",
    )


def test_a_host_that_names_loopback_to_the_others() -> None:
    finding = only(fleet_job(checkups={1: checkup(1, address="127.0.1.1")}))
    told(finding, "error", "b would tell the others to reach it at 127.0.1.1, which leads to themselves", "eth0")


def test_a_fleet_file_of_another_job() -> None:
    told(
        only(fleet_job(2, fleet=described())),
        "error",
        "the fleet file has 3 devices, this job has 2",
        "Start one process",
    )
    gpu = replace(described(), devices=(*described().devices[:2], Device("c-gpu", "c", "cuda")))
    told(
        only(fleet_job(fleet=gpu)),
        "error",
        "device 2 (c-gpu) is of kind cuda in the fleet file, but computes on cpu",
        "order",
    )
    swapped = fleet_job(fleet=described(), checkups={1: checkup(1, machine="machine a")})
    assert (
        only(swapped).what
        == "device 0 (a-cpu) and device 1 (b-cpu) are on two hosts in the fleet file, but not in this job"
    )


def test_what_ssh_met_comes_along() -> None:
    report = Finding("error", "c at 10.0.0.9 cannot be used", "ssh-copy-id", ("c",))
    assert diagnose(fleet_job(reports=(report,))) == (report,)


# --- one machine ------------------------------------------------------------------------------------------------------


def alone(**facts: Any) -> Examination:
    return fleet_job(1, checkups={0: checkup(0, 1, **facts)})


def test_names_that_lead_to_loopback_are_told_once_for_all_hosts() -> None:
    """Debian: 127.0.1.1 lab1 in /etc/hosts."""
    finding = only(fleet_job(checkups={d: checkup(d, resolves_to=("127.0.1.1",)) for d in (0, 2)}))
    told(finding, "warning", "on a and c the machine's own name leads to itself only (127.0.1.1)", "MASTER_ADDR")
    assert finding.about == ("a", "c")
    assert diagnose(alone(resolves_to=("127.0.1.1",), interfaces=())) == (), "without a network it does no harm"


def test_a_device_that_cannot_be_used() -> None:
    told(only(alone(on_problem="no CUDA")), "error", "a: no CUDA", "CONVOY_DEVICE")


def test_an_interface_that_does_not_exist() -> None:
    """`^lo` means "not lo" to NCCL, and breaks gloo."""
    problem = "GLOO_SOCKET_IFNAME='^lo': this machine has no such interface, it has eth0, lo"
    told(only(alone(address="", address_problem=problem)), "error", f"a has no address: {problem}", "no other host")


def test_loopback_that_does_not_work() -> None:
    told(only(alone(loopback_works=False)), "error", "a cannot connect to itself at 127.0.0.1", "ip link set lo up")


def test_a_faster_interface_that_is_not_used() -> None:
    cards = (Interface("eno1", ("10.0.0.1",), 125e6), Interface("ib0", ("10.9.0.1",), 5e9))
    finding = only(alone(interfaces=cards))
    told(
        finding,
        "warning",
        "a talks through eno1 (1 Gbit/s), though ib0 (40 Gbit/s, 10.9.0.1) is up",
        "GLOO_SOCKET_IFNAME=ib0",
    )


def test_a_radio() -> None:
    radio = (Interface("wlan0", ("10.0.0.1",), None, wireless=True), Interface("eth0", ("10.8.0.1",)))
    told(
        only(alone(interfaces=radio)),
        "warning",
        "a talks through wlan0, a radio: slow, and slower at times",
        "=eth0 where",
    )


def test_of_several_interfaces_the_used_one_is_named() -> None:
    cards = (Interface("eno1", ("10.0.0.1",), 125e6), Interface("eno2", ("10.8.0.1",), 125e6))
    what = "a talks through eno1 (10.0.0.1), where its route leads; it also has eno2 (10.8.0.1)"
    told(only(alone(interfaces=cards)), "note", what, "GLOO_SOCKET_IFNAME")


GPUS = (Gpu("RTX 3090", 24 * GB, 24 * GB), Gpu("RTX 3090", 24 * GB, 24 * GB))


@pytest.mark.parametrize(
    ("chosen", "fits"), [("eth", True), ("=eth", False), ("ib0,eth0", True), ("^lo", True), ("ib", False)]
)
def test_nccl_interfaces_are_prefixes(chosen: str, fits: bool) -> None:
    findings = diagnose(alone(environment={"NCCL_SOCKET_IFNAME": chosen}, gpus=GPUS))
    assert [finding.severity for finding in findings] == ([] if fits else ["error"])


def test_gpus_that_may_not_talk_directly() -> None:
    finding = only(alone(environment={"NCCL_P2P_DISABLE": "1"}, gpus=GPUS))
    told(finding, "warning", "NCCL_P2P_DISABLE=1 on a: its 2 GPUs talk the slow way", "Unset")


def test_a_driver_without_a_torch_that_uses_it() -> None:
    assert "is a build for processors only" in only(alone(nvidia_driver=True)).what
    assert "finds no GPU" in only(alone(nvidia_driver=True, torch="2.13.0+cu128", cuda="12.8")).what
    hidden = only(alone(nvidia_driver=True, cuda="12.8", environment={"CUDA_VISIBLE_DEVICES": ""}))
    assert (hidden.severity, "hides the GPUs" in hidden.what) == ("note", True)
    assert diagnose(alone(nvidia_driver=True, cuda="12.8", gpus=GPUS)) == ()


def test_little_memory() -> None:
    told(only(alone(free_bytes=GB)), "warning", "a has 1.1 GB of 17.2 GB memory free", "smaller share")
    taken = only(alone(gpus=(GPUS[0], Gpu("RTX 3090", 4 * GB, 24 * GB))))
    told(taken, "warning", "other programs hold 21.5 GB of the 25.8 GB of cuda:1 on a", "nvidia-smi")
    told(only(alone(shared_bytes=64 << 20)), "warning", "/dev/shm on a holds 64 MiB, as Docker's default", "--ipc=host")


def test_few_open_files() -> None:
    told(
        only(alone(open_files=256)),
        "warning",
        "on a a process may open 256 files, connections included",
        "ulimit -n 4096",
    )
    assert diagnose(alone(open_files=-1)) == (), "unlimited"


def test_threads_that_do_not_fit_the_cores() -> None:
    many = only(alone(threads=16, cores=16, quota_cores=2.0))
    told(many, "warning", "a: 16 threads compute, where 2 cores may be used", "OMP_NUM_THREADS=2")
    few = only(alone(threads=1, cores=16, environment={"OMP_NUM_THREADS": "1"}))
    told(few, "warning", "a: 1 thread computes, since OMP_NUM_THREADS=1 (torchrun sets 1 by itself), though there are 16 cores",
         "OMP_NUM_THREADS=16")  # fmt: skip
    assert diagnose(alone(threads=8, cores=16)) == (), "torch takes one thread for two hyperthreads"


def test_processes_of_one_host_share_its_cores() -> None:
    two = {d: checkup(d, 2, host="a", machine="m", cores=8, threads=8) for d in (0, 1)}
    finding = only(fleet_job(2, checkups=two, links={(0, 1): link(0, 1), (1, 0): link(1, 0)}))
    assert finding.what == "device 0 (cpu of a) and device 1 (cpu of a): 8 threads compute, where 4 cores may be used"


def test_cores_that_a_rehearsal_imposes_are_the_devices_own() -> None:
    examination = fleet_job(checkups={d: checkup(d, threads=1, cores=16) for d in range(3)}, fleet=described(cores=0.8))
    assert diagnose(examination) == ()


def test_a_machine_that_others_use() -> None:
    finding = only(fleet_job(paces={1: Pace(100.0, busy_cores=3.1)}))
    told(finding, "warning", "other programs keep 3.1 of the 4 cores of b busy", "top")


# --- links ------------------------------------------------------------------------------------------------------------


def test_a_pair_that_no_way_joins() -> None:
    nothing = {pair: closed(*pair, Reach.NO_ROUTE) for pair in ((1, 2), (2, 1))}
    finding = only(fleet_job(4, links=nothing))
    what = "b and c do not reach each other: there is no way to 10.0.0.3 port 4242 (no route to host)"
    told(finding, "error", what, "See on b: ip route get 10.0.0.3")
    assert finding.about == ("b", "c")


def test_a_firewall_that_drops_on_one_side() -> None:
    finding = only(fleet_job(links={(1, 2): closed(1, 2, Reach.SILENT)}))
    told(
        finding, "error", "b does not reach c: 10.0.0.3 port 4242 does not answer", "sudo ufw allow from 10.0.0.2, on c"
    )
    assert finding.cure.endswith("the other way works, so look at the firewall of c first")


def test_a_firewall_that_rejects() -> None:
    finding = only(fleet_job(2, links={(0, 1): closed(0, 1, Reach.REFUSED)}))
    what = "a does not reach b: 10.0.0.2 port 4242 refuses the connection, though b listens there"
    told(finding, "error", what, "A firewall rejects it: training connects to any port from 1024 up")


def test_a_host_that_nobody_reaches_is_one_finding() -> None:
    into = {(d, 2): closed(d, 2, Reach.SILENT) for d in (0, 1, 3)}
    assert only(fleet_job(4, links=into)).what == "no host reaches c: 10.0.0.3 port 4242 does not answer"
    both = into | {(2, d): closed(2, d, Reach.SILENT) for d in (0, 1, 3)}
    assert only(fleet_job(4, links=both)).what == (
        "no host reaches c, and c reaches none: 10.0.0.3 port 4242 does not answer"
    )
    out = {(2, d): closed(2, d, Reach.NO_ROUTE) for d in (0, 1, 3)}
    assert only(fleet_job(4, links=out)).what.startswith("c reaches no host: there is no way to 10.0.0.1")


def test_somebody_else_answers() -> None:
    finding = only(fleet_job(links={(0, 1): closed(0, 1, Reach.STRANGER)}))
    told(
        finding,
        "error",
        "a does not reach b: at 10.0.0.2 port 4242 answers another program than the doctor of b",
        "NAT",
    )


def test_large_packets_that_are_lost() -> None:
    """Jumbo frames on the hosts, not on the switch: greetings pass, gradients do not."""
    finding = only(fleet_job(links={(0, 1): link(0, 1, bytes_per_s=0.0)}))
    told(finding, "error", "small messages pass from a to b, but data does not", "MTU")


def test_one_slow_link() -> None:
    finding = only(fleet_job(links={(0, 2): link(0, 2, bytes_per_s=30e6)}))
    told(finding, "warning", "the link from a to c is slow: 30 MB/s of the 118 MB/s that others carry", "ethtool on a")


@pytest.mark.parametrize("devices", [3, 4, 6])
def test_a_slow_host_is_one_finding(devices: int) -> None:
    """Of three hosts with a slow one, four of six links are slow: their median would call the slow ones usual."""
    slow = {pair: link(*pair, bytes_per_s=11.8e6) for pair in permutations(range(devices), 2) if 1 in pair}
    finding = only(fleet_job(devices, links=slow))
    what = "b sends and receives slowly, on all its links: at most 11.8 MB/s of the 118 MB/s that others carry"
    told(finding, "warning", what, "This is what 100 Mbit/s carry: a bad cable")


def test_a_host_that_only_sends_slowly() -> None:
    slow = {(1, target): link(1, target, bytes_per_s=40e6) for target in (0, 2, 3)}
    assert only(fleet_job(4, links=slow)).what.startswith("b sends slowly, on all its links: at most 40 MB/s")


def test_the_fleet_file_says_what_a_link_should_carry() -> None:
    everywhere = {pair: link(*pair, bytes_per_s=50e6) for pair in permutations(range(3), 2)}
    assert diagnose(fleet_job(links=everywhere)) == ()
    finding = only(fleet_job(links=everywhere, fleet=described()))
    told(finding, "warning", "all links are slow: at most 50 MB/s of the 125 MB/s of the fleet file", "convoy measure")
    one = {(0, 1): link(0, 1, bytes_per_s=50e6)}
    assert only(fleet_job(links=one, fleet=described())).what == (
        "the link from a to b is slow: 50 MB/s of the 125 MB/s of the fleet file"
    )
    assert diagnose(fleet_job(links=everywhere, fleet=described(rate=60e6))) == ()


def test_what_was_not_tried_is_not_slow() -> None:
    assert diagnose(fleet_job(links={pair: link(*pair, bytes_per_s=None) for pair in permutations(range(3), 2)})) == ()


def test_the_usual_rate_is_that_of_a_healthy_host() -> None:
    assert usual_rate({("a", "b"): 10.0}) is None
    assert usual_rate({("a", "b"): 10.0, ("b", "a"): 100.0}) == 100.0
    assert usual_rate({("a", "b"): 10.0, ("a", "c"): 10.0, ("b", "c"): 90.0, ("c", "b"): 100.0}) == 100.0


def test_late_messages() -> None:
    both = {pair: link(*pair, round_trip_s=0.0123) for pair in ((0, 1), (1, 0))}
    told(only(fleet_job(links=both)), "warning", "messages between a and b take long: 12.3 ms there and back", "cable")


def clocks(*, ahead_s: float, of: int) -> dict[tuple[int, int], Link]:
    offsets = {(0, of): ahead_s, (of, 0): -ahead_s} if of else {(0, d): -ahead_s for d in (1, 2)}
    return {pair: link(*pair, ahead_s=seconds) for pair, seconds in offsets.items()}


@pytest.mark.parametrize(
    ("ahead_s", "of", "what"),
    [
        (3.5, 1, "the clock of b is 3.5 s ahead of the others'"),
        (-7200.0, 2, "the clock of c is 2 hours behind the others'"),
        (86_400.0 * 30, 0, "the clock of a is 30 days ahead of the others'"),
    ],
)
def test_a_wrong_clock_is_blamed_on_the_odd_one(ahead_s: float, of: int, what: str) -> None:
    """Also where it is device 0's, which all others are compared to."""
    told(only(fleet_job(links=clocks(ahead_s=ahead_s, of=of))), "warning", what, "timedatectl")
    assert diagnose(fleet_job(links=clocks(ahead_s=math.copysign(0.9, ahead_s), of=of))) == ()


def test_clocks_are_compared_where_one_way_is_closed() -> None:
    assert ahead_of_most({("b", "a"): -4.0, ("a", "c"): 0.0}) == {"b": 4.0, "a": 0.0, "c": 0.0}
    assert ahead_of_most({}) == {}


# --- who is slow ------------------------------------------------------------------------------------------------------


def test_the_slowest_device_is_told_with_its_share() -> None:
    unequal = {d: checkup(d, hardware=f"processor {d}") for d in range(3)}
    finding = only(fleet_job(checkups=unequal, paces={2: Pace(25.0)}))
    told(
        finding,
        "note",
        "device 2 (cpu of c) is the slowest: 4.0 times slower than device 0 (cpu of a)",
        "11% of the work",
    )


def test_a_device_that_is_slower_than_its_equals() -> None:
    finding = diagnose(fleet_job(paces={1: Pace(60.0)}))[0]
    told(finding, "warning", "device 1 (cpu of b) computes at 60% of the speed of devices just like it", "heat")
    imposed = replace(
        described(), devices=tuple(replace(d, cores=c) for d, c in zip(described().devices, (1, 0.5, 1), strict=True))
    )
    paces = {1: Pace(60.0)}
    slow = {d: checkup(d, threads=1) for d in range(3)}
    assert [f.severity for f in diagnose(fleet_job(checkups=slow, paces=paces, fleet=imposed))] == ["note"], (
        "not its equals"
    )


def test_a_device_that_is_slower_than_its_past() -> None:
    unequal = {d: checkup(d, hardware=f"processor {d}") for d in range(3)}
    examination = fleet_job(checkups=unequal, fleet=described(), past_samples_per_s=(200.0, 100.0, 50.0))
    now = replace(examination, paces={0: Pace(20.0), 1: Pace(4.0), 2: Pace(5.0)})
    finding = diagnose(now)[0]
    what = "device 1 (b-cpu) computes at 40% of what it did, beside the others, when the fleet was measured"
    told(finding, "warning", what, "measure again")
    as_before = replace(examination, paces={0: Pace(20.0), 1: Pace(10.0), 2: Pace(5.0)})
    assert [finding.severity for finding in diagnose(as_before)] == ["note"]


def test_the_past_is_what_was_measured_on_all_devices() -> None:
    def point(device: str, layer: str, samples: int, seconds: float) -> LayerPoint:
        return LayerPoint(device, layer, samples, 8, 3, seconds / 4, seconds * 3 / 4, 0.0)

    fleet = described(hosts="ab")
    layers = (point("a-cpu", "conv", 4, 1.0), point("a-cpu", "conv", 8, 2.0), point("b-cpu", "conv", 4, 4.0))
    costs = tuple(DeviceCosts(device.name, 0.0, 0.0, 0.0, *[0.0] * 10) for device in fleet.devices)
    measured = Measurement(fleet, "net", "print", 8, "0.1.0", "2.13", "2026", costs, layers)
    assert past_samples_per_s(measured) == (1.0, 0.25), "eight samples were measured on one device only"


# --- names, texts, turns, clocks --------------------------------------------------------------------------------------


def test_hosts_of_one_name_are_told_apart() -> None:
    same = {d: checkup(d, host="lab.example.org") for d in range(3)} | {2: checkup(2, host="lab", machine="machine a")}
    examination = fleet_job(checkups=same)
    assert examination.host == {0: "lab", 1: "lab#2", 2: "lab"}
    assert {host: own.device for host, own in examination.hosts.items()} == {"lab": 0, "lab#2": 1}


def test_findings_that_differ_stay_apart() -> None:
    shared, own = Finding("note", "on {about} x", "y", ("a",)), Finding("note", "a", "y", ("a",))
    other = Finding("note", "on {about} x", "y", ("b",))
    assert merged([shared, own, other]) == [Finding("note", "on a and b x", "y", ("a", "b")), own]
    assert [listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == ["", "a", "a and b", "a, b and c"]


def test_facts_travel_as_json() -> None:
    facts = checkup(1, gpus=GPUS, quota_cores=0.5, environment={"NCCL_DEBUG": "INFO"})
    assert from_text(CHECKUP, to_text(CHECKUP, facts), "device 1") == facts
    later = to_text(CHECKUP, facts).replace('"devices":3', '"devices":3,"colour":"red"')
    assert from_text(CHECKUP, later, "device 1") == facts, "a later version says more"
    assert from_text(CHECKUP, '{"convoy": "9.0"}', "device 1") == Checkup(convoy="9.0"), "another version says less"


@pytest.mark.parametrize(
    "text", ["", "no JSON", '{"device": "first"}', "[" * 10_000, '{"host":"' + "x" * TEXT_BYTES + '"}']
)
def test_texts_of_other_programs_are_refused(text: str) -> None:
    with pytest.raises(MismatchError, match="device 3 answered what this convoy doctor cannot read"):
        from_text(CHECKUP, text, "device 3")


@pytest.mark.parametrize("hosts", range(2, 60))
def test_every_host_sends_and_receives_equally_often_within_the_time(hosts: int) -> None:
    plan = schedule_for(hosts)
    assert len(set(plan.pairs)) == len(plan.pairs), "no pair twice"
    counts = [sum(host == end for end in ends) for ends in zip(*plan.pairs, strict=True) for host in range(hosts)]
    assert len(set(counts)) == 1
    assert all(source != target for source, target in plan.pairs)
    assert len(plan.pairs) * plan.each_s <= TOTAL_S + 1e-9
    assert plan.each_s >= MIN_EACH_S
    if hosts * (hosts - 1) * MIN_EACH_S <= TOTAL_S:
        assert set(plan.pairs) == set(permutations(range(hosts), 2)), "all, where there is time"


def test_few_hosts_have_long_turns_and_very_many_one_each() -> None:
    assert schedule_for(1).pairs == ()
    assert schedule_for(4).each_s == 0.3
    assert len(schedule_for(500).pairs) == 500


def test_a_clock_is_compared_as_ntp_does() -> None:
    """Sent at 10 s, 2 s on the way, received at 112 s of a clock 100 s ahead, answered 1 s later, 2 s back."""
    second = 10**9
    assert clock_ahead_s(10 * second, 112 * second, 113 * second, 15 * second) == 100.0
    assert clock_ahead_s(110 * second, 12 * second, 13 * second, 115 * second) == -100.0
    assert clock_ahead_s(0, 4 * second, 4 * second, 4 * second) == 2.0, (
        "half the difference of the ways, if they differ"
    )
