"""The doctor over ssh: what each host's answer means, and who is examined without those that give none."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import pytest

from convoy.doctor import command
from convoy.doctor.examine import check_host, kept_past, without
from convoy.doctor.schema import CONTEXT, Context, Finding, from_text, to_text
from convoy.errors import InputError
from convoy.fleet import Card, Device, Fleet, Host
from tests.doctor.test_doctor import described


def said(status: int | None, words: str) -> CompletedProcess[str]:
    """What ssh gives; no status: it took too long."""
    if status is None:
        raise TimeoutExpired("ssh", 20.0)
    return CompletedProcess("ssh", status, "" if status else words, words if status else "")


LAB = Host("lab", address="192.0.2.77", user="ann")


@pytest.mark.parametrize(
    ("status", "words", "what", "cure"),
    [
        (0, "Welcome\n0.1.0 2.13.0+cpu", None, None),
        (0, "0.0.9 2.13.0", "lab has convoy 0.0.9, here is 0.1.0", "Install the same"),
        (
            255,
            "ann@lab: Permission denied (publickey).",
            "lab at 192.0.2.77 cannot be used: ann@lab: Permission",
            "ssh-copy-id",
        ),
        (
            255,
            "ssh: connect to host lab port 22: Connection timed out",
            "lab at 192.0.2.77 cannot be used: ssh: c",
            "is on",
        ),
        (
            127,
            "sh: 1: exec: /opt/python: not found",
            "lab at 192.0.2.77 cannot be used: sh: 1",
            "/opt/python cannot be run",
        ),
        (
            1,
            "ModuleNotFoundError: No module named 'convoy'",
            "lab at 192.0.2.77 cannot be used: Module",
            "has no Convoy",
        ),
        (
            1,
            "PackageNotFoundError: No package metadata was found for torch",
            "lab: /opt/python there has no torch",
            "Install",
        ),
        (None, "", "lab at 192.0.2.77 did not answer ssh within 20 s", "ssh 192.0.2.77"),
    ],
)
def test_what_ssh_meets_is_a_finding(status: int | None, words: str, what: str | None, cure: str | None) -> None:
    found = check_host(replace(LAB, python="/opt/python", folder="/home/ann"), lambda *_: said(status, words))
    assert (found is None) == (what is None)
    if found is not None and what is not None and cure is not None:
        assert found.what.startswith(what)
        assert cure in found.cure
        assert (found.severity, found.about) == ("error", ("lab",))


def test_hosts_are_asked_for_their_versions_by_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVOY_SSH", "ssh -F lab.config")
    calls: list[Sequence[str]] = []

    def caller(call: Sequence[str], _: float) -> CompletedProcess[str]:
        calls.append(call)
        return said(255, "ssh: Could not resolve hostname lab")

    finding = check_host(replace(LAB, python="/opt/my python", folder="~/cnn"), caller)
    assert finding is not None
    assert list(calls[0][:3]) == ["ssh", "-F", "lab.config"]
    assert calls[0][-1].startswith("cd '~/cnn' && exec '/opt/my python' -c ")
    assert check_host(Host("here", address="127.0.0.1"), caller) is None
    assert len(calls) == 1, "this machine needs no ssh"


def test_the_others_are_examined_without_those_that_ssh_does_not_reach() -> None:
    fleet = described(hosts="abc")
    smaller = without(fleet, {"b"})
    assert smaller is not None
    assert [device.name for device in smaller.devices] == ["a-cpu", "c-cpu"]
    assert kept_past(fleet, smaller, Context(fleet, (1.0, 2.0, 3.0))) == (1.0, 3.0)
    assert without(fleet, {"a", "b", "c"}) is None
    context = Context(smaller, (1.0, 3.0), (Finding("error", "b cannot be used", "ssh-copy-id", ("b",)),))
    assert from_text(CONTEXT, to_text(CONTEXT, context), "--case") == context


def test_hosts_without_addresses_cannot_be_visited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "CONVOY_FLEET"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "fleet.toml"
    path.write_text(
        Fleet((Host("a"), Host("b")), (Device("x", "a", "cpu"), Device("y", "b", "cpu")), Card(1e8, 1e8, 0.0)).to_toml()
    )
    with pytest.raises(InputError, match="its hosts have no address"):
        command.run_doctor(path, None, 5.0)
