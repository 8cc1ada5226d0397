"""Examinations of this machine, of jobs of threads and processes, over ssh, and by the command."""

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.comm.connection import Credentials
from convoy.comm.environment import ProcessEnv, listen_at
from convoy.comm.store import HostedStore
from convoy.doctor import doctor, examine
from convoy.doctor.examine import Exchange, examine_fleet, examine_job, reach, try_ways
from convoy.doctor.facts import (
    CONTEXT,
    Context,
    Examination,
    Finding,
    Reach,
    collect_facts,
    from_text,
    home_problem,
)
from convoy.doctor.findings import diagnose
from convoy.errors import DeviceLostError, InputError
from convoy.fleet import Fleet, Host
from convoy.launch.survey import Answer
from tests.doctor.test_findings import described, facts
from tests.support.processes import free_port, on_processes

HANG_S = 20.0


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "CONVOY_FLEET", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


# --- this machine -----------------------------------------------------------------------------------------------------


def test_unusable_interface_is_reported_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's `^lo` means "not lo", which is no interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo")
    found = collect_facts(None, "cuda:99")
    assert found.info.device == "cpu"
    problems = " ".join(what for what, _ in found.problems)
    assert "'cuda:99' cannot be used" in problems
    assert "no such interface" in problems


def test_a_missing_home_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """docker run --user 12345: no HOME, and no line in /etc/passwd."""
    assert home_problem({"HOME": str(tmp_path / "later")}) == ""
    assert home_problem({"XDG_CACHE_HOME": str(tmp_path)}) == ""
    monkeypatch.setattr(os, "getuid", lambda: 1_234_567)
    assert "HOME is not set, and user 1234567 has no home directory" in home_problem({"XDG_CACHE_HOME": "relative"})
    monkeypatch.setattr(os, "access", lambda folder, _: str(folder) != "/")
    assert "cannot write to /, where /nowhere/.cache would be" in home_problem({"HOME": "/nowhere"})


# --- ways and the exchange --------------------------------------------------------------------------------------------


@contextmanager
def deaf_server() -> Iterator[int]:
    """Return a port with a full queue: the kernel drops further attempts, as a firewall does."""
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


def test_blocked_and_refused_ports_are_distinguished() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert reach("127.0.0.1", listener.getsockname()[1], 0.3) is Reach.OPEN
    assert reach("127.0.0.1", free_port(), 0.3) is Reach.REFUSED
    with deaf_server() as port:
        assert reach("127.0.0.1", port, 0.3) is Reach.SILENT
    assert reach("255.255.255.255", 1, 0.3) is Reach.NO_ROUTE


def side_by_side(devices: Sequence[int], of: int, work: Callable[[Exchange], Any]) -> list[Any]:
    """Return the result or error of each device of a job."""
    store = HostedStore(listen_at("127.0.0.1", 0), Credentials(None))

    def run(device: int) -> Any:
        try:
            return work(Exchange(store, "a test", device, tuple(range(of))))
        except (InputError, DeviceLostError) as error:
            return error

    with closing(store), ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(run, devices, timeout=HANG_S))


def test_absent_devices_are_waited_for_once() -> None:
    def two_rounds(exchange: Exchange) -> dict[int, str]:
        exchange.gather("first", "", 0.3)
        return exchange.gather("second", f"by {exchange.device}", 10 * HANG_S)

    assert side_by_side([0, 2], 3, two_rounds) == [{0: "by 0", 2: "by 2"}] * 2


def test_exchange_errors_name_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "SLACK_S", 0.2)

    def come_late(exchange: Exchange) -> Any:
        if exchange.device == 1:
            exchange.wait(["x/came"], HANG_S)
        return exchange.gather("x", "y" * (70_000 if exchange.device == 2 else 1), 0.1)

    first, late, too_long = side_by_side([0, 1, 2], 3, come_late)
    assert first == {0: "y"}
    assert "device 1 started too late" in str(late)
    assert "device 2 started too late" in str(too_long)
    [alone] = side_by_side([1], 2, lambda exchange: exchange.gather("x", "", 0.1))
    assert "device 0, which leads the examination, did not answer" in str(alone)
    outcomes = side_by_side([0, 1, 1], 2, lambda exchange: exchange.gather("x", "", 1.0))
    assert sum("two processes claim to be device 1" in str(each) for each in outcomes) == 1


def test_first_device_of_each_host_probes_every_route() -> None:
    """One host has a foreign address and cannot listen; it delays no other."""
    addresses = ("127.0.0.1", "127.0.0.1", "127.0.0.1", "192.0.2.7")
    machines = ("m", "m", "n", "o")
    here = [
        replace(facts(d, 4, info={"address": addresses[d]}), own=replace(facts(d).own, machine=machines[d]))
        for d in range(4)
    ]
    ways = side_by_side(range(4), 4, lambda exchange: try_ways(exchange, here))
    assert ways[0] == ways[3]
    assert {(way.source, way.target) for way in ways[0]} == {(0, 2), (2, 0), (3, 0), (3, 2)}
    assert all(way.reach is Reach.OPEN for way in ways[0])


# --- jobs of processes ------------------------------------------------------------------------------------------------


def examine_as(device: int, devices: int, port: int, changed: dict[str, dict[str, str]]) -> Any:
    """Examine as one device of a multi-host job."""
    env = ProcessEnv(device, devices, device, devices, "127.0.0.1", port, False, 0)
    own = collect_facts(env, "cpu")
    info = replace(own.info, **changed.get(str(device), {}))
    own = replace(own, info=info, own=replace(own.own, name="abcd"[device], machine=f"machine {device}"))
    found = examine_job(env, own, Context(), 2.0)
    if isinstance(found, Examination):
        links = len(found.measured.links) if found.measured else 0
        errors = [finding.what for finding in diagnose(found) if finding.severity == "error"]
        return {"came": [each.device for each in found.facts], "links": links, "errors": errors}
    return None if found is None else found.what


def test_processes_examine_each_other_and_measure_their_links() -> None:
    first, *others = on_processes(3, "tests.doctor.test_examine:examine_as", 3, free_port(), {}, joined=False)
    assert others == [None, None]
    assert first == {"came": [0, 1, 2], "links": 6, "errors": []}


def test_device_that_cannot_join_the_rendezvous_says_why() -> None:
    def come(host: str, port: int, device: int = 1) -> str:
        found = examine_job(ProcessEnv(device, 2, 0, 2, host, port, False, 0), facts(device), Context(), 0.2)
        assert isinstance(found, Finding)
        return found.what

    port = free_port()
    assert come("127.0.0.1", port).startswith(
        f"device 1 cannot reach device 0 at 127.0.0.1 port {port} (this machine itself): device 0 was not found"
    )
    assert "'no-such-name.invalid' cannot be resolved" in come("no-such-name.invalid", 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert "Address already in use" in come("127.0.0.1", other.getsockname()[1], device=0)


# --- over ssh ---------------------------------------------------------------------------------------------------------


def test_unreachable_ssh_hosts_are_reported_and_the_others_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Fleet, Sequence[str]]] = []

    def ask(host: Host) -> Answer | str:
        return "ssh ended with status 255; ssh-copy-id b" if host.name == "b" else Answer(1, 1, "", ())

    monkeypatch.setattr(examine, "ask_one", ask)
    monkeypatch.setattr(examine, "run_on_fleet", lambda *order: started.append(order) or 0)
    fleet = described()
    fleet = replace(fleet, hosts=tuple(replace(host, address=f"192.0.2.{n}") for n, host in enumerate(fleet.hosts, 71)))
    assert examine_fleet(fleet, None, 5.0) == (0, ())
    [(smaller, argv)] = started
    assert [host.name for host in smaller.hosts] == ["a", "c"]
    context = from_text(CONTEXT, argv[argv.index("--case") + 1], "--case")
    assert context.fleet == smaller
    [report] = context.reports
    assert report.what == "b at 192.0.2.72 cannot be used: ssh ended with status 255; ssh-copy-id b"
    assert report.about == ("b",)
    only_b = fleet.with_only([1])
    assert examine_fleet(only_b, None, 5.0) == (1, context.reports)

    def refuse(*_: object) -> int:
        raise InputError("host a: python there has no Convoy")

    monkeypatch.setattr(examine, "run_on_fleet", refuse)
    status, findings = examine_fleet(fleet.with_only([0]), None, 5.0)
    assert (status, [finding.what for finding in findings]) == (1, ["host a: python there has no Convoy"])


# --- the command ------------------------------------------------------------------------------------------------------


def test_single_machine_findings_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "facts.json"
    assert doctor.run_doctor(None, file, 5.0) == 0
    assert "Ready to train" in capsys.readouterr().out.splitlines()[-1]
    written = json.loads(file.read_text())
    assert written["examination"]["facts"][0]["info"]["host"]
    assert written["examination"]["paces"]["0"]["samples_per_s"] > 0


def test_errors_exit_with_status_1_or_2_for_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo")
    assert doctor.run_doctor(None, None, 5.0) == 1
    assert "Not ready to train: 1 error" in capsys.readouterr().out
    assert doctor.run_doctor(None, None, 5.0, CONTEXT.dump_json(Context()).decode()) == 2


def test_unusable_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--wait 0: give a number of seconds above 0"):
        doctor.run_doctor(None, None, 0.0)
    path = tmp_path / "fleet.toml"
    path.write_text(described().to_toml())
    with pytest.raises(InputError, match="its hosts have no address"):
        doctor.run_doctor(path, None, 5.0)
