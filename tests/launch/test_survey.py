"""`convoy fleet init` and `show`: reports of hosts become a fleet file."""

import socket
import sys
from pathlib import Path

import pytest

from convoy.errors import InputError
from convoy.fleet import Host, Nic, read_fleet
from convoy.launch.survey import QUESTIONS, Answer, ask, class_of, fleet_of, host_of, latency_to, read_answer
from tests.support.commands import convoy_in_process
from tests.support.ssh_hosts import lab, needs_ssh

WORKSTATION = """
Welcome to Ubuntu! 3 updates can be applied.
survey 1
cores 16
memory_kib 65536000
memory_bytes
processor AMD Ryzen 9 5950X 16-Core Processor
gpu NVIDIA GeForce RTX 3060
gpu NVIDIA GeForce RTX 3060 Ti
server 10.0.0.7 2222
mbit_per_s 2500
"""
MAC = "survey 1\ncores 8\nmemory_bytes 17179869184\nprocessor Apple M2\nserver \nmbit_per_s \n"


def test_linux_machine_report_is_parsed() -> None:
    """Additional output of the login shell does not matter."""
    assert read_answer(WORKSTATION) == Answer(
        16, 65536000 * 1024, "AMD Ryzen 9 5950X 16-Core Processor",
        ("NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 3060 Ti"), ("10.0.0.7", 2222), 312.5e6,
    )  # fmt: skip
    assert read_answer("Permission denied") is None
    assert read_answer(WORKSTATION.replace("mbit_per_s 2500", "mbit_per_s -1")).bytes_per_s is None  # type: ignore[union-attr]


def test_hosts_get_catalogue_figures() -> None:
    answers = [read_answer(WORKSTATION), read_answer(MAC)]
    hosts = [host_of("ann@box.lab:2222"), host_of("mac")]
    fleet, notes = fleet_of(hosts, [answer for answer in answers if answer is not None])
    assert [(host.name, host.address, host.user, host.ssh_port) for host in fleet.hosts] == [
        ("box", "box.lab", "ann", 2222), ("mac", "mac", None, None),
    ]  # fmt: skip
    assert fleet.hosts[0].card == Nic(312.5e6, 312.5e6, 1e-4)
    rows = [(d.name, d.kind, d.class_name, d.cores) for d in fleet.devices]
    assert rows == [
        ("box-gpu0", "cuda", "rtx3060", None), ("box-gpu1", "cuda", None, None), ("box-cpu", "cpu", "ryzen-9-5950x", 16.0),
        ("mac-gpu", "mps", "apple-m2", None), ("mac-cpu", "cpu", None, 8.0),
    ]  # fmt: skip
    assert fleet.devices[0].memory_bytes == 12e9
    assert fleet.devices[2].memory_bytes == int(0.8 * 65536000 * 1024), "the host's own, not the catalogue's"
    assert notes == [
        "box-gpu1 (NVIDIA GeForce RTX 3060 Ti): the catalogue has no such class; `convoy measure` will find its speed",
        "host mac: its NIC does not report its speed; 1 Gbit/s is assumed",
    ]
    assert fleet == type(fleet).from_toml(fleet.to_toml()), "what is written can be read"


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("NVIDIA GeForce RTX 3060 Ti", None),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", None),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("AMD EPYC 7763 64-Core Processor", "epyc-7763"),
        ("12th Gen Intel(R) Core(TM) i5-12400", "core-i5-12400"),
        ("Intel(R) Xeon(R) CPU E5-2630 v3 @ 2.40GHz", "xeon-e5-2630v3"),
        ("Apple M2 Pro", None),
        ("", None),
    ],
)
def test_product_names_are_not_confused(product: str, name: str | None) -> None:
    known = class_of(product)
    assert (None if known is None else known.name) == name


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("attic", Host("attic", "attic")),
        ("ann@attic.lab.example", Host("attic", "attic.lab.example", user="ann")),
        ("192.168.1.20:2222", Host("192-168-1-20", "192.168.1.20", ssh_port=2222)),
        ("[fe80::1]:22", Host("fe80--1", "fe80::1", ssh_port=22)),
    ],
)
def test_host_spellings_are_read(text: str, host: Host) -> None:
    assert host_of(text) == host


@pytest.mark.parametrize("text", ["", "a b", "a:b:c", "ann@", "a:99999", "-oProxyCommand=x"])
def test_invalid_hosts_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        host_of(text)


def test_latency_is_half_a_round_trip() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert 0 < (latency_to(("127.0.0.1", port)) or 0) < 0.1
    assert latency_to(("127.0.0.1", port)) is None, "nobody listens there any more"


def test_local_machine_is_surveyed_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lab.toml"
    assert convoy_in_process(monkeypatch, ["fleet", "init", ".", "-o", str(path)]) == 0
    written = capsys.readouterr().out
    fleet = read_fleet(path)
    assert [device.kind for device in fleet.devices][-1] == "cpu"
    assert fleet.devices[-1].cores is not None
    assert convoy_in_process(monkeypatch, ["fleet", "show", str(path)]) == 0
    assert capsys.readouterr().out.strip() in written
    assert convoy_in_process(monkeypatch, ["fleet", "init", ".", "-o", str(path)]) == 2
    assert "is there already: give another -o, or --force" in capsys.readouterr().err


@pytest.mark.root
@needs_ssh
def test_hosts_are_surveyed_over_ssh_and_silent_ones_reported(tmp_path: Path) -> None:
    """A login shell is enough; nothing of Convoy is installed."""
    with lab(tmp_path, ["desk", "attic", "cellar"]) as hosts:
        init = [sys.executable, "-m", "convoy", "fleet", "init"]
        argv = [*init, "10.77.0.2", "10.77.0.3", "-o", str(tmp_path / "lab.toml")]
        status, output, errors = hosts.run("desk", ["env", *argv])
        assert (status, errors) == (0, "")
        assert "2 devices on 2 hosts" in output
        fleet = read_fleet(tmp_path / "lab.toml")
        assert [host.address for host in fleet.hosts] == ["10.77.0.2", "10.77.0.3"]
        assert all(host.card is not None and 0 < host.card.latency_s < 0.05 for host in fleet.hosts)
        status, output, errors = hosts.run("desk", ["env", *argv[:5], "10.77.0.2", "10.77.0.3:2222", "-o", "x.toml"])
        assert status == 2
        assert "host 10-77-0-3: ssh ended with status 255" in errors
        assert "ssh -p 2222 10.77.0.3" in errors


def test_survey_script_runs_in_any_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """It uses no bash syntax, and replies even without nvidia-smi and ip."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert "[[" not in QUESTIONS
    assert ask([host_of(".")])[0].cores >= 1
