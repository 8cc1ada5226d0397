"""The doctor's probes on this machine: connections, data, clocks, quotas, the exchange, a job of threads and processes."""

import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed import HashStore

from convoy.comm.environment import ProcessEnv
from convoy.doctor import command, examine
from convoy.doctor import exchange as exchange_file
from convoy.doctor import links as links_file
from convoy.doctor.examine import examine_job
from convoy.doctor.exchange import Exchange, connect, unreached
from convoy.doctor.findings import diagnose
from convoy.doctor.links import Address, Server, bytes_per_s, reach_all, scan_links, schedule_for
from convoy.doctor.probes import check_up, ping, samples_per_s
from convoy.doctor.report import show
from convoy.doctor.schema import CONTEXT, Context, Examination, Finding, Pace, Reach, to_text
from convoy.errors import DeviceLostError, InputError
from convoy.profile.load import quota_cores
from tests.doctor.test_doctor import checkup, closed, fleet_job
from tests.support.processes import free_port, on_processes

HANG_S = 20.0
TOKEN = "of this job"


# --- one connection ---------------------------------------------------------------------------------------------------


@contextmanager
def deaf_server() -> Iterator[int]:
    """A port whose queue is full: the kernel drops further attempts, as a firewall does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = [socket.socket() for _ in range(4)]
        try:
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(server.getsockname())
            yield int(server.getsockname()[1])
        finally:
            for each in waiting:
                each.close()


def outcome(host: str, port: int) -> Reach:
    reach, visit = ping(host, port, 0.3)
    assert (visit is not None) == (reach is Reach.OPEN)
    if visit is not None:
        visit.close()
    return reach


def test_failures_are_told_apart(free_port: int) -> None:
    with Server("127.0.0.1", TOKEN) as listener:
        assert outcome("127.0.0.1", listener.port) is Reach.OPEN
    assert outcome("127.0.0.1", free_port) is Reach.REFUSED
    with deaf_server() as port:
        assert outcome("127.0.0.1", port) is Reach.SILENT
    assert outcome("no-such-name.invalid", 1) is Reach.NO_ROUTE


# --- one link ---------------------------------------------------------------------------------------------------------


def test_a_link_is_timed_and_the_other_clock_compared() -> None:
    """The listener's clock is an hour ahead."""
    with Server("127.0.0.1", TOKEN, lambda: time.time_ns() + 3600 * 10**9) as listener:
        address = Address(7, listener.address, listener.port)
        (found,) = reach_all(3, [address], TOKEN)
        rate = bytes_per_s(address, TOKEN, 0.05)
    assert (found.source, found.target, found.reach) == (3, 7, Reach.OPEN)
    assert found.ahead_s == pytest.approx(3600, abs=1)
    assert found.round_trip_s is not None
    assert 0 < found.round_trip_s < HANG_S
    assert rate > 1e6


def test_a_firewall_that_is_waited_for_makes_no_strangers_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The story: connections that stood idle while another was tried were hung up on, and counted as strangers."""
    monkeypatch.setattr(links_file, "TALK_S", 0.3)
    with Server("127.0.0.1", TOKEN) as listener, deaf_server() as port:
        here = [Address(1, "127.0.0.1", listener.port), Address(2, "127.0.0.1", port)]
        found = reach_all(0, here, TOKEN, limit_s=1.0)
    assert [link.reach for link in found] == [Reach.OPEN, Reach.SILENT]


def test_rates_are_those_the_listener_counted() -> None:
    """What the kernel of the sender still holds when the time is over has not arrived."""
    sent = bytearray()

    def count_slowly(server: socket.socket) -> None:
        visitor, _ = server.accept()
        with visitor:
            visitor.settimeout(HANG_S)
            assert json.loads(visitor.makefile("rb").readline())["ask"] == "take"
            visitor.sendall(b'{"ready": true}\n')
            sent.extend(visitor.recv(1000))
            visitor.sendall(b'{"bytes": 1000, "seconds": 0.5}\n')
            with suppress(ConnectionError):
                while visitor.recv(1 << 20):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=count_slowly, args=[server])
        thread.start()
        assert bytes_per_s(Address(1, "127.0.0.1", server.getsockname()[1]), TOKEN, 0.05) == 2000.0
        thread.join(HANG_S)
    assert sent


def test_the_answer_survives_data_that_comes_after_the_time() -> None:
    """The story: a listener that hung up on bytes nobody took destroyed its own answer, and the link counted as dead."""
    with (
        Server("127.0.0.1", TOKEN) as listener,
        socket.create_connection((listener.address, listener.port), timeout=HANG_S) as late,
        late.makefile("rb") as lines,
    ):
        late.sendall(json.dumps({"token": TOKEN, "ask": "take", "seconds": 0.02}).encode() + b"\n")
        assert json.loads(lines.readline()) == {"ready": True}
        for _ in range(20):
            late.sendall(bytes(100_000))
            time.sleep(0.005)
        assert json.loads(lines.readline())["bytes"] > 0


@pytest.mark.parametrize(
    "answer", [b"", b"220 mail.example.org ESMTP\r\n", b"[]\n", b'{"came_ns": "x"}\n', b"9" * 99 + b"\n"]
)
def test_other_programs_are_strangers(answer: bytes) -> None:
    def serve(server: socket.socket) -> None:
        for _ in range(3):
            visitor, _ = server.accept()
            with visitor, suppress(OSError):
                visitor.sendall(answer)
                visitor.shutdown(socket.SHUT_WR)
                visitor.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=[server])
        thread.start()
        address = Address(1, "127.0.0.1", server.getsockname()[1])
        assert reach_all(0, [address], TOKEN)[0].reach is Reach.STRANGER
        assert bytes_per_s(address, TOKEN, 0.05) == 0.0
        thread.join(HANG_S)


def test_strangers_get_no_answer_and_hold_nobody_up() -> None:
    with Server("127.0.0.1", TOKEN) as listener:
        address = Address(1, "127.0.0.1", listener.port)
        assert reach_all(0, [address], "of another job")[0].reach is Reach.STRANGER
        for words in (
            b"\xff\xfe\n",
            b"[" * 70_000,
            b"{}\n",
            b'{"token": "of this job", "ask": "take", "seconds": null}\n',
        ):
            visit = socket.create_connection((address.host, address.port), timeout=HANG_S)
            # Hung up on in the middle of what it says, or after.
            with visit, suppress(OSError), visit.makefile("rb") as lines:
                visit.sendall(words)
                visit.shutdown(socket.SHUT_WR)
                assert lines.read() in (b"", b'{"ready": true}\n')
        assert reach_all(0, [address], TOKEN)[0].reach is Reach.OPEN


def test_a_server_closes_while_somebody_is_silent() -> None:
    """Threads and ports are gone afterwards: every test is watched for that."""
    listener = Server("127.0.0.1", TOKEN)
    with socket.create_connection((listener.address, listener.port), timeout=HANG_S) as silent:
        silent.sendall(json.dumps({"token": TOKEN, "ask": "time"}).encode() + b"\n")
        assert b"came_ns" in silent.recv(1000)
        start_s = time.monotonic()
        listener.close()
        assert time.monotonic() - start_s < HANG_S / 2
        assert silent.recv(1) == b""


# --- this machine -----------------------------------------------------------------------------------------------------


def test_this_machine_says_what_it_is() -> None:
    known = check_up(None, environment={"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO", "HOME": "/root"})
    assert known.torch == torch.__version__
    assert known.threads == torch.get_num_threads()
    assert known.loopback_works
    assert known.environment == {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO"}
    assert 0 < known.free_bytes <= known.memory_bytes


def test_names_are_looked_up_where_they_are_used() -> None:
    asked: list[str] = []

    def resolver(name: str) -> Sequence[str]:
        asked.append(name)
        return ["127.0.1.1"]

    here = ProcessEnv(0, 2, 0, None, "127.0.0.1", 29500, False, 0)
    known = check_up(here, environment={}, resolver=resolver)
    assert asked == ["127.0.0.1", known.host]
    assert known.resolves_to == ("127.0.1.1",)
    assert known.meets_at == ("127.0.0.1 port 29500", "127.0.1.1")


def test_what_cannot_be_used_is_a_fact_not_an_end() -> None:
    known = check_up(None, "cuda:99", environment={"GLOO_SOCKET_IFNAME": "^lo"})
    assert known.on == "cpu"
    assert "cuda:99 cannot be used" in known.on_problem
    assert known.address == ""
    assert "no such interface" in known.address_problem


def control_groups(folder: Path, lines: str, mounts: str, files: Mapping[str, str]) -> float | None:
    for name, text in ({"self/cgroup": lines, "mounts": mounts} | dict(files)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return quota_cores(folder / "self", folder / "mounts")


def test_quotas_of_both_versions_are_found(tmp_path: Path) -> None:
    v2 = f"cgroup2 {tmp_path}/v2 cgroup2 rw 0 0\n"
    job_group = {"v2/jobs/7/cpu.max": "max 100000\n", "v2/jobs/cpu.max": "150000 100000\n"}
    assert control_groups(tmp_path, "0::/jobs/7\n", v2, job_group) == 1.5, "the tightest on the way up counts"
    assert control_groups(tmp_path, "0::/elsewhere\n", v2, {"v2/cpu.max": "50000 100000\n"}) == 0.5, (
        "inside a container"
    )
    v1 = f"cgroup {tmp_path}/cpu cgroup rw,cpu,cpuacct 0 0\ncgroup {tmp_path}/set cgroup rw,cpuset 0 0\n"
    files = {"cpu/d/cpu.cfs_quota_us": "2000\n", "cpu/d/cpu.cfs_period_us": "10000\n"}
    assert control_groups(tmp_path, "4:cpuset:/d\n3:cpu,cpuacct:/d\n", v1, files) == 0.2
    assert control_groups(tmp_path, "3:cpu,cpuacct:/d\n", v1, {"cpu/d/cpu.cfs_quota_us": "-1\n"}) is None
    assert quota_cores(tmp_path / "none", tmp_path / "none") is None


def test_a_device_that_plays_slower_is_slower() -> None:
    once = samples_per_s(torch.device("cpu"), seconds=0.02)
    assert once > 0
    assert samples_per_s(torch.device("cpu"), seconds=0.02, slowdown=1000.0) < once / 10


# --- the exchange -----------------------------------------------------------------------------------------------------


def side_by_side(devices: Sequence[int], of: int, work: Callable[[Exchange], Any]) -> list[Any]:
    """What each of some devices of a job gets, or the error it meets."""
    store = HashStore()

    def run(device: int) -> Any:
        try:
            return work(Exchange(store, device, tuple(range(of))))
        except (InputError, DeviceLostError) as error:
            return error

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(run, devices, timeout=HANG_S))


def test_all_learn_what_all_said() -> None:
    gathered = side_by_side([0, 1, 2], 3, lambda exchange: exchange.gather("x", f"by {exchange.device}", HANG_S))
    assert gathered == [{0: "by 0", 1: "by 1", 2: "by 2"}] * 3


def test_who_does_not_come_is_not_waited_for_again() -> None:
    def two_rounds(exchange: Exchange) -> tuple[dict[int, str], float]:
        exchange.gather("first", "", 0.3)
        start_s = time.monotonic()
        return exchange.gather("second", str(exchange.device), HANG_S), time.monotonic() - start_s

    for gathered, took_s in side_by_side([0, 2], 3, two_rounds):
        assert gathered == {0: "0", 2: "2"}
        assert took_s < HANG_S / 2


def test_a_late_device_is_told_so() -> None:
    def come(exchange: Exchange) -> Any:
        if exchange.device == 1:
            exchange.wait(["x/came"], HANG_S)
        return exchange.gather("x", "", 0.1)

    assert "device 1 came too late" in str(side_by_side([0, 1], 2, come)[1])


def test_without_device_0_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_file, "SLACK_S", 0.2)
    (error,) = side_by_side([1], 2, lambda exchange: exchange.gather("x", "", 0.1))
    assert "device 0, which leads the examination, did not answer" in str(error)


def test_a_place_that_two_claim() -> None:
    outcomes = side_by_side([0, 1, 1], 2, lambda exchange: exchange.gather("x", "", 5.0))
    assert sum("two processes claim to be device 1" in str(each) for each in outcomes) == 1


def test_long_texts_are_left_out() -> None:
    def shout(exchange: Exchange) -> Any:
        return exchange.gather("x", "y" * (70_000 if exchange.device else 1), 0.3)

    assert side_by_side([0, 1], 2, shout)[0] == {0: "y"}


# --- the tour ---------------------------------------------------------------------------------------------------------


def test_the_first_devices_of_all_hosts_try_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_file, "schedule_for", lambda hosts: schedule_for(hosts, each_s=0.02))
    machines = ("m", "m", "n", "o")
    here = [checkup(d, 4, machine=machine, address="127.0.0.1") for d, machine in enumerate(machines)]
    results = side_by_side(range(4), 4, lambda exchange: scan_links(exchange, here, TOKEN, time.time_ns))
    links, deaf = results[0]
    assert {(each.source, each.target) for each in links} == {(a, b) for a in (0, 2, 3) for b in (0, 2, 3) if a != b}
    assert all(each.reach is Reach.OPEN and each.bytes_per_s > 0 for each in links)
    assert deaf == ()


def test_a_host_that_cannot_listen_holds_nobody_up() -> None:
    """Its address is none of this machine; or it has none."""
    addresses = {0: "127.0.0.1", 1: "127.0.0.1", 2: "", 3: "127.0.0.1"}
    here = [checkup(d, 4, address=at, address_problem="" if at else "no such interface") for d, at in addresses.items()]
    links, deaf = side_by_side(range(4), 4, lambda exchange: scan_links(exchange, here, TOKEN, time.time_ns))[0]
    assert {frozenset((each.source, each.target)) for each in links} >= {frozenset((0, 1)), frozenset((1, 3))}
    assert [finding.what for finding in deaf] == ["device 2 cannot listen for the others: no such interface"]


# --- coming to the meeting point --------------------------------------------------------------------------------------


def place_at(host: str, port: int, device: int = 1) -> ProcessEnv:
    return ProcessEnv(device, 2, 0, None, host, port, False, 0)


def test_what_is_between_a_device_and_the_meeting_point(free_port: int) -> None:
    refused = connect(place_at("127.0.0.1", free_port), 0.1, ["127.0.0.1"])
    assert isinstance(refused, Finding)
    assert f"127.0.0.1 port {free_port}: 127.0.0.1 is 127.0.0.1 on this machine" in refused.what
    unknown = connect(place_at("no-such-name.invalid", 1), HANG_S, [])
    assert isinstance(unknown, Finding)
    assert unknown.what.endswith("the name no-such-name.invalid is unknown on this machine")


@pytest.mark.parametrize(
    ("reach", "what", "cure"),
    [
        (
            Reach.REFUSED,
            "lab1 port 4 (10.0.0.1): its machine answered, but nobody listens there (30 s)",
            "Start device 0",
        ),
        (Reach.SILENT, "lab1 port 4 (10.0.0.1): no answer (30 s)", "sudo ufw allow 4/tcp"),
        (Reach.NO_ROUTE, "lab1 port 4 (10.0.0.1): there is no way to it (no route to host)", "ip route get 10.0.0.1"),
    ],
)
def test_each_failure_has_its_own_cure(reach: Reach, what: str, cure: str) -> None:
    finding = unreached(place_at("lab1", 4), reach, ["10.0.0.1"], 30.0)
    assert finding.what == f"device 1 cannot come to the meeting point {what}"
    assert cure in finding.cure


def test_a_port_that_is_taken_is_found_by_device_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        finding = connect(place_at("127.0.0.1", other.getsockname()[1], device=0), 1.0, ["127.0.0.1"])
    assert isinstance(finding, Finding)
    assert "Address already in use" in finding.what


# --- a job of processes -----------------------------------------------------------------------------------------------


def examine_as(device: int, devices: int, port: int, skewed: int) -> Any:
    env = ProcessEnv(device, devices, device, devices, "127.0.0.1", port, False, 0)
    facts = replace(check_up(env, "cpu", environment={}), machine=f"machine {device}")
    if device == skewed:
        facts = replace(facts, torch="1.13.1")
    outcome = examine_job(env, facts, Context(), 2.0)
    if isinstance(outcome, Examination):
        return {
            "came": [each.device for each in outcome.checkups],
            "links": len(outcome.links),
            **said(diagnose(outcome)),
        }
    return None if outcome is None else outcome.what


def said(findings: Sequence[Finding]) -> dict[str, list[str]]:
    return {"errors": [finding.what for finding in findings if finding.severity == "error"]}


def test_processes_examine_each_other_over_the_store() -> None:
    first, *others = on_processes(3, "tests.doctor.test_doctor_probes:examine_as", 3, free_port(), 1, joined=False)
    assert others == [None, None]
    assert (first["came"], first["links"]) == ([0, 1, 2], 6)
    assert first["errors"][:1] == [
        "not the same torch everywhere: 2.13 on most, but 1.13 on device 1 (cpu of " + HOSTNAME + "#2)"
    ]


HOSTNAME = check_up(None, "cpu").host.split(".")[0]


def test_who_does_not_come_does_not_stop_the_others() -> None:
    first, other = on_processes(2, "tests.doctor.test_doctor_probes:examine_as", 4, free_port(), -1, joined=False)
    assert other is None
    assert (first["came"], first["links"]) == ([0, 1], 2)
    assert first["errors"][:1] == ["2 of 4 devices did not come within 2 s: device 2, device 3"]


# --- the command ------------------------------------------------------------------------------------------------------


def printed(examination: Examination, width: int) -> str:
    console = Console(width=width, record=True, highlight=False, markup=False, emoji=False, file=io.StringIO())
    show(examination, diagnose(examination), 2.34, console)
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_terminal(width: int) -> None:
    links = {(0, 1): closed(0, 1, Reach.SILENT)}
    hardware = {d: checkup(d, 4, hardware="Intel(R) Core(TM) i7-10700K CPU @ 3.80GHz") for d in (1, 2)}
    text = printed(fleet_job(4, links=links, checkups=hardware, paces={2: Pace(50.0)}), width)
    assert max(map(len, text.splitlines())) <= width
    for words in (
        "10.0.0.4",
        "i7-10700K",
        "118, 0.2",
        "no answer",
        "convoy 0.1.0, torch 2.13.0+cpu, Python 3.11",
    ):
        assert words in " ".join(text.split()) or words in text
    assert "ERROR: a does not reach b" in text
    assert "\n    A firewall drops it" in text
    assert text.splitlines()[-1] == "Not ready to train: 1 error, 1 warning, 1 note. Examined in 2.3 s."


def test_many_hosts_show_the_slowest_links() -> None:
    links = {(0, 1): closed(0, 1, Reach.NO_ROUTE), (3, 4): replace(fleet_job(9).links[27], bytes_per_s=5e6)}
    text = printed(fleet_job(9, links=links), 100)
    assert "the slowest 10 of 72" in text
    rows = [line.split("│")[1:5] for line in text.splitlines() if line.count("│") == 5]
    assert [cell.strip() for cell in rows[0][:3]] == ["a", "b", "no route"]
    assert rows[1][2].strip() == "5"


def test_alone_it_is_ready_to_train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "CONVOY_FLEET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(examine, "busy_cores", lambda: 0.0)
    facts = tmp_path / "facts.json"
    assert command.run_doctor(None, facts, 5.0) == 0
    assert "Ready to train" in capsys.readouterr().out.splitlines()[-1]
    written = json.loads(facts.read_text())
    assert written["examination"]["checkups"][0]["torch"] == torch.__version__
    assert written["examination"]["paces"]["0"]["samples_per_s"] > 0


def test_an_error_alone_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "CONVOY_FLEET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo")
    monkeypatch.setattr(examine, "busy_cores", lambda: 0.0)
    assert command.run_doctor(None, None, 5.0) == 1
    assert "Not ready to train: 1 error" in capsys.readouterr().out
    assert command.run_doctor(None, None, 5.0, context_text=to_text(CONTEXT, Context())) == 2, (
        "as its launcher over ssh wants it"
    )


def test_options_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "CONVOY_FLEET"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=r"--wait 0: give a number of seconds above 0"):
        command.run_doctor(None, None, 0.0)


def test_a_stranded_device_tells_why(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "LINGER_S", 0.0)
    assert command.run_doctor(None, None, 0.2) == 1
    assert "ERROR: device 1 cannot come to the meeting point 127.0.0.1" in capfd.readouterr().err
