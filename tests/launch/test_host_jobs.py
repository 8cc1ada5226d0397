"""Jobs on several hosts as values: start commands, printed lines, ssh errors, forwarded options."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy import cli
from convoy.config.run_file import resolve_settings
from convoy.errors import InputError
from convoy.fleet import Device, Fleet, Host, Nic, read_fleet
from convoy.launch.agent import from_line, meeting_point, to_line
from convoy.launch.fleet import startable, train_on_fleet
from convoy.launch.host_job import MALLOC_NAMES, JobOptions, device_environments, host_jobs, memory_environment
from convoy.launch.ssh import remedy, ssh_call, ssh_program
from convoy.launch.supervisor import by_line
from tests.support.commands import TINY, convoy_in_process
from tests.support.processes import PLACE

FLEET = Fleet(
    hosts=(Host("cellar", "10.0.0.2"), Host("attic", "10.0.0.1")),
    devices=(
        Device("a-gpu", "attic", "cuda"),
        Device("c-cpu", "cellar", "cpu", cores=2.5, slowdown=2.0),
        Device("a-cpu", "attic", "cpu"),
        Device("a-gpu2", "attic", "cuda"),
        Device("c-cpu2", "cellar", "cpu"),
    ),
    network=Nic(1e8, 1e8, 1e-4),
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PLACE, "CONVOY_DEVICE", "CONVOY_SSH"):
        monkeypatch.delenv(name, raising=False)


# -------------------------------------------------------------------------------------------------------- who, and what


def test_hosts_get_their_devices_with_device_0_first() -> None:
    attic, cellar = host_jobs(FLEET)
    assert (attic.host.name, attic.ranks, attic.names) == ("attic", (0, 2, 3), ("cuda:0", "cpu", "cuda:1"))
    assert (cellar.host.name, cellar.ranks, cellar.names) == ("cellar", (1, 4), ("cpu", "cpu"))
    assert cellar.own == ({"OMP_NUM_THREADS": "3", "CONVOY_SLOWDOWN": "2.0"}, {})
    assert attic.title(3) == "host attic, cuda:1"


def test_accelerator_named_twice_gets_shared_memory_limits() -> None:
    limited = replace(FLEET, devices=tuple(replace(each, memory_bytes=6_000_000_000) for each in FLEET.devices))
    attic, _ = host_jobs(limited)
    assert attic.own == ({"CONVOY_MEMORY": "6000000000"}, {}, {"CONVOY_MEMORY": "6000000000"})
    for names, shared in ((("cuda:0", "cuda:1"), None), (("cuda:0", "cuda:0"), "1"), (("cpu", "cpu"), None)):
        rows = device_environments({}, (0, 1), names, total=2, address="127.0.0.1", port=1)
        assert [row.get("CONVOY_SHARED_ACCELERATOR") for row in rows] == [shared, shared], names


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [((None, None), "none"), (("10.0.0.1", "b"), "all"), (("10.0.0.1", None), "hosts b have no address")],
)
def test_only_hosts_with_addresses_are_started(
    addresses: tuple[str | None, str | None], expected: str, tmp_path: Path
) -> None:
    hosts = tuple(Host(name, address) for name, address in zip("ab", addresses, strict=True))
    devices = (Device("a0", "a", "cpu"), Device("b0", "b", "cpu"))
    path = tmp_path / "fleet.toml"
    path.write_text(Fleet(hosts, devices, Nic(1e8, 1e8, 1e-4)).to_toml())
    if expected == "none":
        assert startable(path) is None
    elif expected == "all":
        assert startable(path) == read_fleet(path)
    else:
        with pytest.raises(InputError, match=f"{expected}.*or none"):
            startable(path)
    assert startable(None) is None


# ---------------------------------------------------------------------------------------------------------------- ssh


def test_ssh_never_waits_or_prompts() -> None:
    host = Host("a", "10.0.0.1", user="ann", ssh_port=2222, folder="my nets")
    call = ssh_call(ssh_program({"CONVOY_SSH": "ssh -F 'lab config'"}), host, "cd 'my nets' && true")
    assert call[:3] == ["ssh", "-F", "lab config"]
    assert {"BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5"} <= set(call)
    assert call[-7:-1] == ["-l", "ann", "-p", "2222", "--", "10.0.0.1"]
    assert call[-1] == "cd 'my nets' && true"
    assert ssh_program({}) == ["ssh"]
    with pytest.raises(InputError, match=r"CONVOY_SSH=\"ssh 'x\": no command line"):
        ssh_program({"CONVOY_SSH": "ssh 'x"})


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("No RSA host key is known for 10.0.0.1\nHost key verification failed.", "connect once by hand"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "ssh-keygen -R 10.0.0.1",
        ),
        ("ssh: Could not resolve hostname a: Name or service not known", "add a Host to ~/.ssh/config"),
        ("ssh: connect to host a port 2222: No route to host", "ssh -p 2222 ann@10.0.0.1"),
        ("Timeout, server 10.0.0.1 not responding.\nConnection closed", "check that the machine is on"),
        ("sh: 1: exec: /opt/python: not found", "/opt/python cannot be run there"),
        ("bash: line 1: /opt/python: Permission denied", "/opt/python cannot be run there"),
        ("/opt/python: Error while finding module specification (ModuleNotFoundError: No module named 'convoy')", "no Convoy"),
        ("sh: 1: cd: can't cd to /srv/x", "the folder /home/me is not there"),
        ("zsh:cd:1: no such file or directory: /srv/x", "the folder /home/me is not there"),
        ("something that nobody has seen", "try it by hand: ssh -p 2222 ann@10.0.0.1"),
    ],
)  # fmt: skip
def test_ssh_and_shell_errors_have_a_remedy(words: str, cure: str) -> None:
    host = Host("a", "10.0.0.1", user="ann", ssh_port=2222, python="/opt/python")
    assert cure in remedy(host, words, "/usr/bin/python3", "/home/me")


def test_login_shell_output_is_ignored() -> None:
    assert from_line(b"Welcome!") is None
    assert from_line(b'{"name": "value"}') is None
    assert from_line(b"42") is None
    assert from_line(to_line("here", version="1").strip()) == {"convoy": "here", "version": "1"}


@given(st.lists(st.text(st.characters(exclude_characters="\n"), max_size=9), max_size=9), st.integers(1, 7))
def test_lines_arrive_as_they_were_sent(texts: list[str], cut: int) -> None:
    """Use any content, split anywhere in transit."""
    lines = [text.encode(errors="replace") for text in texts] + [b"the last has no end"]
    sent, arrived = b"\n".join(lines), []
    sink = by_line(arrived.append)
    for start in range(0, len(sent), cut):
        sink(sent[start : start + cut])
    assert arrived == lines[:-1]
    sink(b"")
    assert arrived == lines


# ---------------------------------------------------------------------------------------------------------- addresses


def test_master_address_is_on_the_route_with_a_free_port() -> None:
    host, port = meeting_point(["127.0.0.1"], None)
    assert host == "127.0.0.1"
    assert port > 0
    assert meeting_point([], None)[0] == "127.0.0.1", "one host alone"
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(
            InputError, match=rf"cannot listen at 127.0.0.1 port {taken}: Address already in use.*--port"
        ):
            meeting_point(["127.0.0.1"], taken)


# -------------------------------------------------------------------------------------------------------- the command


def test_all_settings_are_forwarded_as_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pass the run file's and the command line's settings to every device, so that all resolve the same."""
    run = tmp_path / "run.toml"
    run.write_text(
        'net = "two-conv:4:6"\nslowdown = [1, 1, 2, 4, 1.5]\nrebalance = true\nclip-norm = 1e-3\nfleet = "f.toml"\n'
    )
    settled = resolve_settings(run, {"compare": False, "data_dir": Path("it's there"), "plan": "hybrid"})
    told: list[Any] = []
    monkeypatch.setattr("convoy.launch.fleet.run_on_fleet", lambda *given, **named: told.append((given, named)) or 0)
    assert train_on_fleet(settled, FLEET) == 0
    (((fleet, argv, options), named),) = told
    assert fleet == FLEET
    assert options == JobOptions(goes_on=True)
    assert named == {"files": []}
    given: list[Any] = []
    monkeypatch.setattr("convoy.cli.train_job.run_device", given.append)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "5")):
        monkeypatch.setenv(name, value)
    cli.app(args=list(argv), standalone_mode=False)
    assert given[0].settings == settled.settings.model_copy(update={"fleet": None}), "the file has started the fleet"


def test_input_files_are_checked_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(
        "convoy.launch.fleet.run_on_fleet", lambda _, *given, **named: told.append((*given, named)) or 0
    )
    settled = resolve_settings(None, {"plan": "auto", "fleet": Path("fleet.toml"), "port": 4000})
    assert train_on_fleet(settled, FLEET) == 0
    assert told == [
        (
            ["train", "--plan", "auto", "--fleet", "fleet.toml", "--port", "4000"],
            JobOptions(port=4000, goes_on=True),
            {"files": [Path("fleet.toml")]},
        )
    ]


@pytest.fixture
def fleet_file(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET.to_toml())
    return path


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", *TINY, "--devices", "2"], "--devices with a fleet file, which names its 5 devices"),
        (
            ["train", *TINY, "--slowdown", "1,2"],
            "--slowdown 1,2: give one factor from 1 to 10000 for each of the 5 devices",
        ),
        (["train", *TINY, "--plan", "hybrd"], "unknown plan 'hybrd'"),
        (["measure", "-o", "x.toml", "--devices", "2"], "--devices with a fleet file"),
    ],
)
def test_options_that_conflict_with_a_fleet_are_refused(
    argv: list[str], words: str, fleet_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("convoy.launch.fleet.run_on_fleet", lambda *_, **__: pytest.fail("it went on"))
    assert convoy_in_process(monkeypatch, [*argv, "--fleet", str(fleet_file)]) == 2
    assert words in capsys.readouterr().err


def test_measure_starts_with_the_same_options(
    fleet_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["measure", "--fleet", str(fleet_file), "-o", "out.toml", "--budget", "3"]
    told: list[Any] = []
    monkeypatch.setattr(
        "convoy.launch.fleet.run_on_fleet", lambda _, *given, **named: told.append((*given, named)) or 0
    )
    assert convoy_in_process(monkeypatch, argv) == 0
    assert told == [(argv, JobOptions(), {"files": [fleet_file]})]
    assert capsys.readouterr().out == "Device 0 is on host attic: the job writes its files there.\n"


def test_fleet_file_inside_a_job_starts_nothing(fleet_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command under torchrun is one of its processes."""
    given: list[Any] = []
    monkeypatch.setattr("convoy.cli.train_job.run_device", given.append)
    monkeypatch.setattr("convoy.launch.fleet.run_on_fleet", lambda *_, **__: pytest.fail("it started a fleet"))
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "5")):
        monkeypatch.setenv(name, value)
    assert convoy_in_process(monkeypatch, ["train", *TINY, "--plan", "auto", "--fleet", str(fleet_file)]) == 0
    assert len(given) == 1


def test_memory_settings_keep_the_users_values() -> None:
    assert memory_environment({}).keys() == {"THP_MEM_ALLOC_ENABLE", *MALLOC_NAMES}
    for other in (*MALLOC_NAMES, "GLIBC_TUNABLES", "LD_PRELOAD"):
        assert memory_environment({other: "x"}) == {"THP_MEM_ALLOC_ENABLE": "1"}, (
            "another malloc, or other settings of it"
        )
    assert memory_environment({"THP_MEM_ALLOC_ENABLE": "0"})["THP_MEM_ALLOC_ENABLE"] == "0"
