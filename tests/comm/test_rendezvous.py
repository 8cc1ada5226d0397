"""Rendezvous: every way it can fail, and the address that each process chooses."""

import os
import resource
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from convoy.comm import environment, processes, rendezvous
from convoy.comm.connection import credentials_of
from convoy.comm.environment import ProcessEnv, listen_at
from convoy.comm.failure import Health, HealthServer, NoAnswer
from convoy.comm.group import Message
from convoy.comm.processes import join, meet
from convoy.comm.rendezvous import ProcessInfo, check_infos, own_info
from convoy.comm.store import close_store, connect_torch_store, host_store, host_torch_store
from convoy.errors import ConvoyError, DeviceLostError, InputError, MismatchError
from tests.support.networks import on_each_network_slowly
from tests.support.processes import on_processes


def meet_badly(device: int) -> list[Any]:
    """Run joins that fail: a missing device, other versions, a rank taken twice."""
    reports: list[Any] = []
    world = dict(os.environ)

    os.environ["WORLD_SIZE"] = "4"
    reports.append(say_join(timeout_s=30.0 if device else 2.0))  # one gives up, all know
    os.environ.update(world)

    if device == 2:
        rendezvous.__version__ = "9.9.9"
    reports.append(say_join())
    rendezvous.__version__ = "0.1.0"

    os.environ["RANK"] = str(min(device, 1))
    reports.append(say_join(timeout_s=1.0))
    os.environ.update(world)
    reports.append(say_join())
    return reports


def say_join(timeout_s: float = 10.0) -> list[str]:
    try:
        with join("cpu", timeout_s=timeout_s):
            return ["joined"]
    except ConvoyError as error:
        return [type(error).__name__, str(error)]


@on_each_network_slowly
def test_failed_rendezvous_says_why(network: dict[str, str]) -> None:
    absent, versions, twice, well = zip(
        *on_processes(3, "tests.comm.test_rendezvous:meet_badly", joined=False, environment=network), strict=True
    )
    for kind, text in absent:
        assert kind == "DeviceLostError"
        assert text.startswith("device 3 of 4 did not join")
    for kind, text in versions:
        assert kind == "MismatchError"
        assert "9.9.9 on device 2 (host" in text
    kinds = [report[0] for report in twice]
    assert sorted(kinds[1:]) == ["DeviceLostError", "InputError"], twice
    assert any("two processes are device 1" in report[1] for report in twice)
    assert list(well) == [["joined"]] * 3


def be_beside_torch(device: int, torch_first: bool) -> int:
    """Use the script's own process group, created before or after joining."""
    if torch_first:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    with join("cpu", timeout_s=10) as group:
        if not torch_first:
            torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
        total, got = torch.full((1,), device + 1), torch.zeros(1)
        torch.distributed.all_reduce(total)
        group.exchange([Message(1 - device, torch.full((1,), float(device)))], [Message(1 - device, got)])
        torch.distributed.destroy_process_group()
    return int(total) * 10 + int(got)


@pytest.mark.parametrize("torch_first", [True, False])
def test_script_can_use_its_own_process_group(torch_first: bool) -> None:
    target = "tests.comm.test_rendezvous:be_beside_torch"
    assert on_processes(2, target, torch_first, joined=False) == [31, 30]


def set_place(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in (
        *environment.RANK_VARIABLES,
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_USE_AGENT_STORE",
        "GLOO_SOCKET_IFNAME",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        set_place(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(InputError, match=f"port {port}: Address already in use.*another port"):
            join("cpu", timeout_s=5)


def test_a_low_limit_of_open_files_is_named_at_once(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    set_place(monkeypatch, RANK="1", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (24, 24))
    with pytest.raises(InputError, match=r"may open 24 files, and a job of 3 devices needs 52: .* ulimit -n 1024"):
        join("cpu")


def test_an_unreachable_master_is_named(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    set_place(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
    with pytest.raises(DeviceLostError, match=f"nobody listens at 127.0.0.1 port {free_port}") as caught:
        join("cpu", timeout_s=0.5)
    assert caught.value.device == 0


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "no RANK"),
        ({"RANK": "1"}, "no WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK='2'.*from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "x", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE='x'"),
    ],
)
def test_incomplete_rank_is_an_error(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    set_place(monkeypatch, **variables)
    with pytest.raises(InputError, match=words):
        join("cpu")


def test_missing_device_is_an_error() -> None:
    with pytest.raises(InputError, match=r"'gpu0'.*this machine has cpu; choose one of them"):
        join("gpu0")


def test_gloo_interfaces_are_listed_when_one_is_unknown() -> None:
    with pytest.raises(InputError, match=r"has no such interface, it has .*lo"):
        environment.own_address("127.0.0.1", 1, {"GLOO_SOCKET_IFNAME": "^lo"})
    assert environment.own_address("127.0.0.1", 1, {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"


def test_addresses_follow_the_route() -> None:
    assert environment.own_address("127.0.0.1", 1, {}) == "127.0.0.1"
    assert environment.reachable_address("127.0.0.1", ["127.0.0.1", "127.0.1.1"]) == "127.0.0.1"
    assert environment.reachable_address("192.0.2.7", ["127.0.0.1", "192.0.2.7"]) == "192.0.2.7"


def test_loopback_device_takes_the_interface_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian maps a machine's own name to loopback, so on that machine the route to MASTER_ADDR says nothing."""
    asked = []
    monkeypatch.setattr(environment, "route_to", lambda host, _: asked.append(host) or f"the way to {host}")
    assert environment.reachable_address("127.0.1.1", ["127.0.1.1", "10.0.0.2", "10.0.0.3"]) == "the way to 10.0.0.2"
    assert environment.reachable_address("fd00::3", ["10.0.0.1", "fd00::3"]) == "the way to 10.0.0.1"
    assert asked == ["10.0.0.2", "10.0.0.1"]


def test_a_master_that_others_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    here = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}
    set_place(monkeypatch, **here, MASTER_ADDR="localhost", MASTER_PORT=str(free_port))
    with pytest.raises(InputError, match=r"MASTER_ADDR=localhost is (127.0.0.1|::1) on this machine"):
        join("cpu", timeout_s=5)


INFO = ProcessInfo(device="cpu", name="x", host="lab1", address="10.0.0.1", devices="2", convoy="1.0", torch="2.13")


def test_two_processes_on_one_accelerator_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers say nothing: under Slurm each process may see its own GPU as cuda:0."""
    first, second = (replace(INFO, device="cuda:0", accelerator=f"GPU-{n}") for n in (1, 2))
    check_infos([first, second, INFO, replace(first, accelerator=""), replace(first, accelerator="?")])
    claim = r"device 1 \(host lab1, cuda:0\) and device 2 \(host lab1, cuda:0\) are two processes on one accelerator \(GPU-1\)"
    with pytest.raises(InputError, match=f"{claim}: leave CONVOY_DEVICE unset, .* CONVOY_SHARED_ACCELERATOR=1"):
        check_infos([INFO, first, first])
    monkeypatch.setattr("convoy.comm.rendezvous.uuid_of", lambda _: "GPU-1")
    assert own_info(torch.device("cpu"), 2, "10.0.0.1").accelerator == "GPU-1"
    monkeypatch.setenv("CONVOY_SHARED_ACCELERATOR", "1")
    assert own_info(torch.device("cpu"), 2, "10.0.0.1").accelerator == ""


def test_invalid_memory_is_refused_before_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_MEMORY", "6 Gbit")
    with pytest.raises(InputError, match=r"CONVOY_MEMORY='6 Gbit': .* is no unit of an amount of memory"):
        join("cpu")


def test_hello_of_other_versions_is_read() -> None:
    assert ProcessInfo.from_text('{"convoy": "2.0", "colour": "red"}') == ProcessInfo(convoy="2.0")
    assert ProcessInfo.from_text("no JSON") == ProcessInfo()
    check_infos([INFO, INFO])
    with pytest.raises(MismatchError, match=r"torch: 2.13 on most, but 2.12 on device 1 \(host lab2, cpu\)"):
        check_infos([INFO, ProcessInfo("cpu", "x", "lab2", "a", "2", "1.0", "2.12"), INFO])


def test_nccl_shares_one_torch_store() -> None:
    hosted = host_torch_store(listen_at("127.0.0.1", 0))
    connected = connect_torch_store("127.0.0.1", hosted.port, time.monotonic() + 10)
    connected.set("key", "text")
    assert hosted.get("key") == b"text"


def met(monkeypatch: pytest.MonkeyPatch, slow: int) -> list[int | str]:
    """Return each device's number of peers or its error, where device 1 answers the first requests late."""
    asked, ask = [0], HealthServer.ping

    def ping(self: HealthServer, device: int) -> Health | NoAnswer:
        asked[0] += device
        return NoAnswer.FROZEN if device == 1 and asked[0] <= slow else ask(self, device)

    monkeypatch.setattr(HealthServer, "ping", ping)
    monkeypatch.setattr(processes, "GREETING_S", 0.2)
    credentials = credentials_of(ProcessEnv(0, 2, 0, 2, "127.0.0.1", 1, hosted=False, attempt=0))
    port = host_store("127.0.0.1", credentials)
    found: list[int | str] = ["", ""]

    def live(device: int) -> None:
        env = ProcessEnv(device, 2, device, 2, "127.0.0.1", port, hosted=False, attempt=0)
        try:
            group = meet(env, torch.device("cpu"), 1.5, 0, credentials)
        except DeviceLostError as error:
            found[device] = str(error)
            return
        found[device] = group.devices
        group.close()

    threads = [threading.Thread(target=live, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    close_store("127.0.0.1", port)  # where it failed
    return found


def test_slow_first_reply_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with 25 processes on two cores, 2 of 290 trainings failed to start."""
    assert met(monkeypatch, slow=3) == [2, 2]


def test_silent_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = met(monkeypatch, slow=10**9)
    assert "device 1" in str(first)
    assert "cannot reach it" in str(first)
