"""The examination of a fleet whose hosts have addresses, started from here: over ssh, on every host that can be used."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from convoy._version import __version__
from convoy.comm.environment import is_own
from convoy.doctor.case import CASE, Case
from convoy.doctor.facts import Finding, to_text
from convoy.errors import ConvoyError
from convoy.fleet import Fleet, Host
from convoy.launch.fleet import run_on_fleet
from convoy.launch.ssh import CONNECT_S, remedy, ssh_call, ssh_program

VISIT_S = CONNECT_S + 10.0
"""For the connection, and for Python to start there."""

VISITS = 16

_ASK = (
    "from importlib.metadata import version; from convoy._version import __version__ as v; print(v, version('torch'))"
)
_FIELDS = 2


@dataclass(frozen=True)
class Visit:
    """What calling ssh on one host gave: its exit status, None if it took too long, and the last it printed."""

    status: int | None
    said: str


Caller = Callable[[Sequence[str], float], Visit]


def call(command: Sequence[str], limit_s: float) -> Visit:
    """Run a command to its end, or to the limit."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Visit(None, "")
    except OSError as error:
        return Visit(127, f"{command[0]}: {error.strerror}")
    return Visit(done.returncode, (done.stdout if done.returncode == 0 else done.stderr).strip())


def visit(host: Host, caller: Caller = call) -> Finding | None:
    """Whether a host can take part; what is in the way if it cannot. This machine always can."""
    if is_own(str(host.address)):
        return None
    python, folder = host.python or sys.executable, host.folder or os.getcwd()
    command = f"cd {shlex.quote(folder)} && exec {shlex.join([python, '-c', _ASK])}"
    return judge_visit(host, caller(ssh_call(ssh_program(os.environ), host, command), VISIT_S), python, folder)


def judge_visit(host: Host, found: Visit, python: str, folder: str) -> Finding | None:
    """What the outcome of a visit means. Pure."""
    about = (host.name,)
    if found.status is None:
        what = f"{host.name} at {host.address} did not answer ssh within {VISIT_S:g} s"
        cure = f"Try it by hand: {shlex.join(['ssh', str(host.address)])}; it may be overloaded, or wait for a password"
        return Finding("error", what, cure, about)
    last = found.said.splitlines()[-1] if found.said else "no message"
    if "No package metadata was found for torch" in found.said:
        return Finding(
            "error", f"{host.name}: {python} there has no torch", "Install the same torch there as here", about
        )
    if found.status != 0:
        what = f"{host.name} at {host.address} cannot be used: {last}"
        return Finding("error", what, _sentence(remedy(host, found.said, python, folder)), about)
    # A login shell may greet before that.
    words = last.split()
    if len(words) != _FIELDS or words[0] != __version__:
        what = f"{host.name} has convoy {words[0] if len(words) == _FIELDS else repr(last)}, here is {__version__}"
        return Finding("error", what, "A job refuses to start. Install the same on every host", about)
    return None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def examine_fleet(fleet: Fleet, case: Case, json_file: Path | None, wait_s: float) -> tuple[int, tuple[Finding, ...]]:
    """Examine the hosts of a fleet that can be used, together; device 0 of those prints, the others' troubles included.

    Returns:
        The exit status of the examination there, and what kept it from beginning or ending, still to be told.
    """
    with ThreadPoolExecutor(min(VISITS, len(fleet.hosts)), thread_name_prefix="convoy-doctor-ssh") as pool:
        reports = tuple(found for found in pool.map(visit, fleet.hosts) if found is not None)
    smaller = without(fleet, {name for report in reports for name in report.about})
    if smaller is None:
        return 1, reports
    told = replace(case, fleet=smaller, past_samples_per_s=kept_past(fleet, smaller, case), reports=reports)
    argv = ["doctor", "--case", to_text(CASE, told), "--wait", f"{wait_s:g}"]
    if json_file is not None:
        argv += ["--json", str(json_file)]
    try:
        return run_on_fleet(smaller, argv), ()
    except ConvoyError as error:
        return 1, (*reports, Finding("error", str(error), "The devices that were started have ended; then start again"))


def without(fleet: Fleet, names: set[str]) -> Fleet | None:
    """A fleet without some of its hosts; None if no device is left."""
    devices = tuple(device for device in fleet.devices if device.host not in names)
    if not devices:
        return None
    hosts = tuple(host for host in fleet.hosts if host.name not in names)
    links = tuple(link for link in fleet.links if not {link.source, link.target} & names)
    return replace(fleet, hosts=hosts, devices=devices, links=links)


def kept_past(fleet: Fleet, smaller: Fleet, case: Case) -> tuple[float, ...]:
    """What was measured of the devices that are left."""
    past = dict(zip((device.name for device in fleet.devices), case.past_samples_per_s, strict=False))
    return tuple(past[device.name] for device in smaller.devices if device.name in past)
