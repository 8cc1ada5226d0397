"""One rehearsal from start to end: check the ground, build the hosts, run the command, judge, clear away."""

import math
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from convoy.emulate import cgroups, leftovers, namespaces, programs, shaping
from convoy.emulate.crew import Crew, Launch
from convoy.emulate.interrupts import Interrupts
from convoy.emulate.names import RunName
from convoy.errors import InputError
from convoy.fleet import Fleet

TIMED_OUT = 124  # the status that timeout(1) gives

_PORT = 29_500
_GRACE_S = 3.0  # for the others, once one has failed: long enough to say what they noticed
_TERMINATE_S = 2.0
_KILL_S = 5.0
_LINES = 20
# One way between two namespaces, a byte over TCP: 10 us at rest, 40 us in the slowest tenth.
_REAL_LATENCY_S = 1e-4


def rehearse(
    fleet: Fleet,
    command: Sequence[str],
    *,
    timeout_s: float,
    output: TextIO | None = None,
    fleet_path: Path | None = None,
) -> int:
    """Run a command on every device of a fleet, emulated on this machine.

    Every host gets a network namespace with its card's rates, every device one process with its cores as a CPU quota
    and torchrun's environment: RANK (its index), WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT;
    also GLOO_SOCKET_IFNAME, OMP_NUM_THREADS, CONVOY_DEVICE (its kind), CONVOY_SLOWDOWN and CONVOY_FLEET. Latencies
    and measured links are not imposed. Call it from the main thread, so that signals are seen. It returns or raises
    only when all it made is gone.

    Args:
        fleet: the machines.
        command: program and arguments.
        timeout_s: seconds until the command is ended.
        output: takes what the first device prints, and notes. None: the first device writes to this process's own
            stdout and stderr, notes go to stderr. What other devices print is shown if they fail.
        fleet_path: the fleet's file, for the command.

    Returns:
        0 if every process ended with 0; else the status of the first that did not (128 + n after signal n), 124 if
        the time ran out, 128 + n if this process was asked to end by signal n.

    Raises:
        InputError: no such command, a limit that is none, or a machine that cannot do it: not Linux, not root, a
            program or a part of the kernel missing.
    """
    _check_call(command, timeout_s)
    check_ground()
    notes = output or sys.stderr

    def note(line: str) -> None:
        print(f"rehearse: {line}", file=notes, flush=True)

    for line in caveats(fleet, len(os.sched_getaffinity(0))):
        note(line)
    orphans = leftovers.find()
    with Interrupts() as interrupts:
        if orphans:
            leftovers.remove(orphans)
            note(f"removed what was {orphans}")
        with _launches(fleet, command, fleet_path) as launches:
            if interrupts.caught is None:
                with Crew(launches, output) as crew:
                    return _watch(crew, fleet, timeout_s, interrupts, note)
        return 128 + interrupts.caught


def check_ground() -> None:
    """InputError if this machine cannot rehearse, with what it lacks and how to get it."""
    if platform.system() != "Linux":
        raise InputError(
            f"a rehearsal needs Linux's network namespaces; this is {platform.system()}: use a Linux machine"
        )
    if os.geteuid() != 0:
        raise InputError(
            f"a rehearsal makes network namespaces and control groups, which only root may; this is user "
            f"{os.geteuid()}: run it with sudo"
        )
    for program in ("ip", "tc", "sh"):
        programs.find(program)
    if not hasattr(os, "pidfd_open"):
        raise InputError("this Python was built for a kernel before 5.3, without pidfd: use a newer build")


def caveats(fleet: Fleet, machine_cores: int) -> list[str]:
    """What a rehearsal on a machine of so many cores will not show as it is; one line each."""
    lines = []
    asked = sum(device.cores or 0.0 for device in fleet.devices)
    if asked > machine_cores:
        lines.append(
            f"the fleet asks for {asked:g} cores, this machine has {machine_cores}: devices will run too slowly"
        )
    if any(device.kind == "cpu" and device.cores is None for device in fleet.devices):
        lines.append("CPU devices without `cores` share this whole machine, without a limit")
    late = max(fleet.card(host.name).latency_s for host in fleet.hosts) if len(fleet.hosts) > 1 else 0.0
    if late > _REAL_LATENCY_S:
        lines.append(f"a latency of {late:g} s is not imposed: here a byte takes less than {_REAL_LATENCY_S:g} s")
    if fleet.links:
        lines.append(f"{len(fleet.links)} measured links are not imposed: only the cards' rates are")
    slow = [device.name for device in fleet.devices if device.slowdown != 1]
    if slow:
        lines.append(f"the slowdown of {', '.join(slow)} is passed on as CONVOY_SLOWDOWN; the command must apply it")
    return lines


def environment(fleet: Fleet, index: int, wiring: namespaces.Wiring, fleet_path: Path | None) -> dict[str, str]:
    """The variables that the process of device `index` gets, beside those of this process."""
    device = fleet.devices[index]
    neighbours = fleet.devices_on(device.host)
    variables = {
        "RANK": str(index),
        "WORLD_SIZE": str(len(fleet.devices)),
        "LOCAL_RANK": str(neighbours.index(index)),
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
        "MASTER_ADDR": wiring.port(fleet.devices[0].host).address,
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": namespaces.NIC,
        "CONVOY_DEVICE": device.kind,
        "CONVOY_SLOWDOWN": repr(device.slowdown),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a namespace has no name service, and torch says so on every connection
        "PYTHONUNBUFFERED": "1",  # the last words of a process that is killed
    }
    if device.cores is not None:
        variables["OMP_NUM_THREADS"] = str(math.ceil(device.cores))
    if fleet_path is not None:
        variables["CONVOY_FLEET"] = str(fleet_path.resolve())
    return variables


@contextmanager
def _launches(fleet: Fleet, command: Sequence[str], fleet_path: Path | None) -> Iterator[list[Launch]]:
    """The emulated hosts, ready for one process per device, for as long as the context lasts."""
    run = RunName.mine()
    wiring = namespaces.wire(run, [host.name for host in fleet.hosts])
    with ExitStack() as stack:
        controller = stack.enter_context(cgroups.cpu_controller(run))
        stack.enter_context(namespaces.network(wiring))
        for port in wiring.ports if len(fleet.hosts) > 1 else ():
            shaping.shape(wiring, port, fleet.card(port.host))
        groups = stack.enter_context(cgroups.groups(controller, run, [device.cores for device in fleet.devices]))
        yield [
            Launch(
                namespace=wiring.port(device.host).namespace,
                group=groups[index],
                command=command,
                environment=os.environ | environment(fleet, index, wiring, fleet_path),
            )
            for index, device in enumerate(fleet.devices)
        ]


def _watch(crew: Crew, fleet: Fleet, timeout_s: float, interrupts: Interrupts, note: Callable[[str], None]) -> int:
    """Listen until the command has ended everywhere, end it where it has not, tell what failed."""
    crew.listen(timeout_s, until=lambda: crew.first_failure is not None or interrupts.caught is not None)
    cause = crew.first_failure
    if cause is not None:
        crew.listen(_GRACE_S, until=lambda: interrupts.caught is not None)
    by_themselves = dict(crew.statuses)
    stuck = crew.running
    for signum, limit_s in ((signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _KILL_S)):
        if crew.running:
            crew.signal(signum)
            crew.listen(limit_s, until=lambda: False)
    for index, status in by_themselves.items():
        if status != 0:
            _show(crew, fleet, index, f"ended with status {status}", note)
    if cause is not None:
        return by_themselves[cause]
    if interrupts.caught is not None:
        note(f"ended by {interrupts.caught.name}")
        return 128 + interrupts.caught
    if stuck:
        for index in stuck:
            _show(crew, fleet, index, f"was still running after {timeout_s:g} s", note)
        return TIMED_OUT
    return 0


def _show(crew: Crew, fleet: Fleet, index: int, what: str, note: Callable[[str], None]) -> None:
    device = fleet.devices[index]
    note(f"device {index} ({device.name} on host {device.host}) {what}")
    for line in crew.last_lines(index, _LINES):
        note(f"{device.host}: {line}")


def _check_call(command: Sequence[str], timeout_s: float) -> None:
    if not command:
        raise InputError("the command is empty: give the program to run on every host, with its arguments")
    if shutil.which(command[0]) is None:
        raise InputError(f"command {command[0]!r} is not on this machine: give a program's name or path")
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InputError(
            f"timeout_s = {timeout_s!r}: must be a finite number above 0; give the seconds to wait at most"
        )
