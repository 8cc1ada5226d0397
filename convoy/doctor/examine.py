"""Examinations: of this machine alone, of all devices of a job together, and of a fleet over ssh."""

import os
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from convoy._version import __version__
from convoy.comm.accelerator import local_devices
from convoy.comm.environment import ProcessEnv, is_own
from convoy.comm.processes import within
from convoy.cost.table import Measurement, read_fleet_file
from convoy.doctor.exchange import Exchange, connect
from convoy.doctor.links import WallClock, scan_links
from convoy.doctor.probes import addresses_of, busy_cores, check_up, samples_per_s
from convoy.doctor.schema import (
    CHECKUP,
    CONTEXT,
    PACE,
    Checkup,
    Context,
    Examination,
    Finding,
    Pace,
    from_text,
    to_text,
)  # fmt: skip
from convoy.errors import ConvoyError
from convoy.fleet import Fleet, Host

PACE_LIMIT_S = 20.0
"""For the first convolution of a slow device. Once the others have been waiting so long, it counts as silent."""

LEAVE_S = 5.0
"""How long device 0 waits for the last word of a device that is slow or gone."""

LIMIT_S = 120.0
"""For all that comes after the meeting, on the largest fleets."""


def read_context(fleet_file: Path | None) -> Context:
    """What a fleet file says; or the one that CONVOY_FLEET names (an emulated fleet's) where none is given.

    Raises:
        InputError: the file cannot be read or used.
    """
    path = fleet_file or (Path(named) if (named := os.environ.get("CONVOY_FLEET")) else None)
    if path is None:
        return Context()
    fleet, measured = read_fleet_file(path)
    return Context(fleet, () if measured is None else past_samples_per_s(measured))


def past_samples_per_s(measured: Measurement) -> tuple[float, ...]:
    """How fast each device was at all that was measured on every one of them: comparable with each other only."""
    tables = [
        {
            replace(point, device="", forward_s=0.0, backward_s=0.0, spread=0.0): point.forward_s + point.backward_s
            for point in measured.layer
            if point.device == device.name
        }
        for device in measured.fleet.devices
    ]
    common = set(tables[0]).intersection(*tables[1:])
    seconds = [sum(table[key] for key in common) for table in tables]
    return tuple(1 / each for each in seconds) if all(each > 0 for each in seconds) else ()


def examine_alone(context: Context) -> Examination:
    """Examine this machine: its processor, and every GPU that torch sees."""
    *accelerators, cpu = local_devices()
    names = [cpu, *accelerators]
    checkups = [replace(check_up(None, name), device=index, devices=len(names)) for index, name in enumerate(names)]
    busy = busy_cores()
    paces = {own.device: _pace(own, 1.0, busy) for own in checkups}
    return Examination(len(names), tuple(checkups), paces, reports=context.reports)


def examine_job(
    env: ProcessEnv,
    own: Checkup,
    context: Context,
    wait_s: float,
    *,
    slowdown: float = 1.0,
    wall_ns: WallClock = time.time_ns,
) -> Examination | Finding | None:
    """Examine all devices of a job that come within the time, together. Each device calls it.

    Args:
        own: what this device says of itself.
        wait_s: how long those that are not there yet are waited for.
        slowdown: how many times slower this device is emulated to be.
        wall_ns: its clock.

    Returns:
        All facts on device 0; None on the others; and on a device that could not meet the others, what is in the way.
    """
    exchange = connect(env, wait_s, addresses_of(env.host))
    if isinstance(exchange, Finding):
        return exchange
    try:
        # Torch's store waits out of reach of signals, some of it without a limit.
        return within(wait_s + LIMIT_S, lambda: _examine(exchange, own, context, wait_s, slowdown, wall_ns))
    except (RuntimeError, TimeoutError) as error:
        reason = str(error).splitlines()[0]
        what = f"device {env.device} lost the meeting point {env.host} port {env.port} ({reason})"
        return Finding("error", what, "Its process, or its machine, is gone: see its own output, and start again")
    except ConvoyError as error:
        return Finding("error", str(error), "Then start the doctor again, on all devices at one time")


def _examine(
    exchange: Exchange, own: Checkup, context: Context, wait_s: float, slowdown: float, wall_ns: WallClock
) -> Examination | None:
    texts = exchange.gather("checkup", to_text(CHECKUP, own), wait_s)
    checkups = tuple(replace(from_text(CHECKUP, texts[d], f"device {d}"), device=d) for d in texts)
    token = exchange.put("token", uuid.uuid4().hex)
    # Nobody has anything to do now, so what is busy is not the doctor.
    pace = _pace(own, slowdown, busy_cores())
    texts = exchange.gather("pace", to_text(PACE, pace), PACE_LIMIT_S)
    paces = {d: from_text(PACE, texts[d], f"device {d}") for d in texts}
    links, reports = scan_links(exchange, tuple(each for each in checkups if each.device in paces), token, wall_ns)
    exchange.leave(LEAVE_S)
    if exchange.device != 0:
        return None
    reports, past = (*context.reports, *reports), context.past_samples_per_s
    return Examination(own.devices, checkups, paces, links, wait_s, context.fleet, past, reports)


def _pace(own: Checkup, slowdown: float, busy: float) -> Pace:
    return Pace(0.0 if own.on_problem else samples_per_s(torch.device(own.on), slowdown=slowdown), busy)


# ------------------------------------------------------------------------------------------------ over ssh

SSH_CALLS = 16
"""Hosts that are asked at a time."""

PYTHON_START_S = 10.0
_ASK = (
    "from importlib.metadata import version; from convoy._version import __version__ as v; print(v, version('torch'))"
)


Caller = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]


def call(command: Sequence[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end, or to the limit."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
    )  # fmt: skip


def examine_fleet(
    fleet: Fleet, context: Context, json_file: Path | None, wait_s: float
) -> tuple[int, tuple[Finding, ...]]:
    """Examine the hosts of a fleet that can be used, together; device 0 of those prints, the others' reports included.

    Returns:
        The exit status of the examination there, and what kept it from beginning or ending, still to be told.
    """
    from convoy.launch.fleet import run_on_fleet

    with ThreadPoolExecutor(SSH_CALLS, thread_name_prefix="convoy-doctor-ssh") as pool:
        reports = tuple(found for found in pool.map(check_host, fleet.hosts) if found is not None)
    smaller = without(fleet, {name for report in reports for name in report.about})
    if smaller is None:
        return 1, reports
    told = replace(context, fleet=smaller, past_samples_per_s=kept_past(fleet, smaller, context), reports=reports)
    argv = ["doctor", "--case", to_text(CONTEXT, told), "--wait", f"{wait_s:g}"]
    try:
        return run_on_fleet(smaller, argv if json_file is None else [*argv, "--json", str(json_file)]), ()
    except ConvoyError as error:
        return 1, (*reports, Finding("error", str(error), "The devices that were started have ended; then start again"))


def check_host(host: Host, caller: Caller = call) -> Finding | None:
    """Ask a host over ssh whether it can take part; returns what is in the way if it cannot. This machine always can."""
    from convoy.launch.ssh import CONNECT_S, remedy, ssh_call, ssh_program

    if is_own(str(host.address)):
        return None
    python, folder = host.python or sys.executable, host.folder or os.getcwd()
    command = f"cd {shlex.quote(folder)} && exec {shlex.join([python, '-c', _ASK])}"
    limit_s = CONNECT_S + PYTHON_START_S
    words, status = ssh_call(ssh_program(os.environ), host, command), None
    try:
        done = caller(words, limit_s)
        status, said = done.returncode, (done.stderr if done.returncode else done.stdout).strip()
    except subprocess.TimeoutExpired:
        said = ""
    except OSError as error:
        status, said = 127, f"{words[0]}: {error.strerror}"
    last = said.splitlines()[-1] if said else "no message"
    # A login shell may greet before the line with both versions.
    versions = last.split()
    if status == 0 and len(versions) == 2 and versions[0] == __version__:
        return None
    if status is None:
        what = f"{host.name} at {host.address} did not answer ssh within {limit_s:g} s"
        cure = f"Try it by hand: {shlex.join(['ssh', str(host.address)])}; it may be overloaded, or wait for a password"
    elif "No package metadata was found for torch" in said:
        what, cure = f"{host.name}: {python} there has no torch", "Install the same torch there as here"
    elif status != 0:
        what, cure = f"{host.name} at {host.address} cannot be used: {last}", remedy(host, said, python, folder)
    else:
        what = f"{host.name} has convoy {versions[0] if len(versions) == 2 else repr(last)}, here is {__version__}"
        cure = "A job refuses to start. Install the same on every host"
    return Finding("error", what, cure[:1].upper() + cure[1:], (host.name,))


def without(fleet: Fleet, names: set[str]) -> Fleet | None:
    """A fleet without some of its hosts; None if no device is left."""
    kept = [index for index, device in enumerate(fleet.devices) if device.host not in names]
    return fleet.with_only(kept) if kept else None


def kept_past(fleet: Fleet, smaller: Fleet, context: Context) -> tuple[float, ...]:
    """What was measured of the devices that are left."""
    past = dict(zip((device.name for device in fleet.devices), context.past_samples_per_s, strict=False))
    return tuple(past[device.name] for device in smaller.devices if device.name in past)
