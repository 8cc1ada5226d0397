"""Runs a command on every device of an emulated fleet: checks the machine, makes the hosts, runs, and removes everything."""

import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from convoy.comm.job_key import key_to_start
from convoy.emulate import machine, namespaces
from convoy.emulate.machine import RunName
from convoy.errors import InputError
from convoy.fleet import Fleet
from convoy.launch.host_job import memory_environment, rank_variables
from convoy.launch.supervisor import Interrupts, Output, Signalled, Start, Supervisor, decoded, to_stdout

TIMED_OUT = 124  # the status that timeout(1) gives

_PORT = 29_500
_GRACE_S = 3.0  # after a device failed, the others have this long to print their errors
_LINES = 20
# One-way time of a byte over TCP between two namespaces: 10 us at rest, 40 us in the slowest tenth.
_REAL_LATENCY_S = 1e-4


def emulate(
    fleet: Fleet,
    command: Sequence[str],
    *,
    timeout_s: float,
    output: TextIO | None = None,
    fleet_path: Path | None = None,
    continues: bool = False,
) -> int:
    """Run a command on every device of a fleet emulated on this machine, and remove the emulated hosts afterwards.

    Every host gets a network namespace with its NIC's rates. Every device gets one process with its cores as a CPU quota and
    torchrun's environment, and CONVOY_DEVICE (its kind), CONVOY_SLOWDOWN, CONVOY_CPU_QUOTA (its cores) and CONVOY_FLEET.
    Latencies and measured links are not emulated. Call it from the main thread, which receives signals.

    Args:
        timeout_s: end the command after this many seconds.
        output: receives the first device's output, and notes. None: the first device writes to this process's stdout and
            stderr, notes go to stderr. Other devices' output is shown if they fail.
        fleet_path: the fleet's file, passed to the command as CONVOY_FLEET.
        continues: if devices are lost, the others continue. The output of all is shown.

    Returns:
        0 if every process ended with 0 (with `continues`: if one did); else the status of the first failed process (128 + n
        after signal n); 124 if the time ran out; 128 + n if this process received signal n.

    Raises:
        InputError: the command does not exist, the limit is invalid, or the machine cannot emulate: it is not Linux, this is
            not root, or a program or kernel feature is missing.
    """
    if not command:
        raise InputError("the command is empty: give the program to run on every host, with its arguments")
    if shutil.which(command[0]) is None:
        raise InputError(f"command {command[0]!r} is not on this machine: give a program's name or path")
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise InputError(
            f"timeout_s = {timeout_s!r}: must be a finite number above 0; give the seconds to wait at most"
        )
    check_machine()
    notes = output or sys.stderr

    def note(line: str) -> None:
        print(f"convoy emulate: {line}", file=notes, flush=True)

    for line in caveats(fleet, len(os.sched_getaffinity(0))):
        note(line)
    with Interrupts() as interrupts:
        try:
            if orphans := remove_orphans():
                note(f"removed leftovers of killed runs: {', '.join(orphans)}")
            key = key_to_start(os.environ)
            with _hosts(fleet, command, fleet_path) as starts:
                interrupts.check()
                with _Devices(fleet, output, interrupts, note, continues) as devices:
                    for start in starts:
                        devices.start(replace(start, key=key))
                    return devices.watch(timeout_s)
        except Signalled as interrupted:
            return interrupted.status


def check_machine() -> None:
    """Check that this machine can emulate a fleet.

    Raises:
        InputError: it cannot; the message says what is missing and how to get it.
    """
    if platform.system() != "Linux":
        raise InputError(
            f"an emulated fleet needs Linux's network namespaces; this is {platform.system()}: use a Linux machine"
        )
    if os.geteuid() != 0:
        raise InputError(
            "an emulated fleet needs network namespaces and control groups, which only root may make; this is user "
            f"{os.geteuid()}: run it with sudo"
        )
    for program in ("ip", "tc", "sh"):
        machine.find(program)


def remove_orphans() -> list[str]:
    """Remove the namespaces and control groups of killed runs, and kill the processes in them. Return their names.

    Raises:
        InputError: they cannot be removed.
    """

    def orphaned(name: str) -> bool:
        run = RunName.parse(name)
        return run is not None and not run.alive()

    groups = [path for path in machine.cpu_controller().root.iterdir() if path.is_dir() and orphaned(path.name)]
    for group in groups:
        machine.remove(group)
    found = [name for name in namespaces.namespaces() if orphaned(name)]
    for namespace in found:
        namespaces.delete(namespace)
    return [*(group.name for group in groups), *found]


def caveats(fleet: Fleet, machine_cores: int) -> list[str]:
    """Return one line for each difference between the fleet and its emulation on a machine with this number of cores."""
    lines = []
    asked = sum(device.cores or 0.0 for device in fleet.devices)
    if asked > machine_cores:
        lines.append(
            f"the fleet asks for {asked:g} cores, this machine has {machine_cores}: devices will run too slowly"
        )
    if any(device.kind == "cpu" and device.cores is None for device in fleet.devices):
        lines.append("CPU devices without `cores` share this whole machine, without a limit")
    late = max(fleet.nic(host.name).latency_s for host in fleet.hosts) if len(fleet.hosts) > 1 else 0.0
    if late > _REAL_LATENCY_S:
        lines.append(f"a latency of {late:g} s is not emulated: here a byte takes less than {_REAL_LATENCY_S:g} s")
    if fleet.links:
        lines.append(f"{len(fleet.links)} measured links are not emulated: only the NICs' rates are")
    slow = [device.name for device in fleet.devices if device.slowdown != 1]
    if slow:
        lines.append(f"the slowdown of {', '.join(slow)} is passed on as CONVOY_SLOWDOWN; the command must apply it")
    return lines


def environment(fleet: Fleet, index: int, wiring: namespaces.Wiring, fleet_path: Path | None) -> dict[str, str]:
    """Return the environment variables that are added for the process of device `index`."""
    device = fleet.devices[index]
    neighbours = fleet.devices_on(device.host)
    address = wiring.port(fleet.devices[0].host).address
    variables = {
        **memory_environment(os.environ),
        **rank_variables(index, neighbours.index(index), len(fleet.devices), len(neighbours), address, _PORT),
        "GLOO_SOCKET_IFNAME": namespaces.NIC,
        "CONVOY_DEVICE": device.kind,
        "CONVOY_SLOWDOWN": repr(device.slowdown),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # a namespace has no name service, and torch warns on every connection
        "PYTHONUNBUFFERED": "1",  # else the last lines of a killed process are lost
    }
    if device.cores is not None:
        variables["OMP_NUM_THREADS"] = str(math.ceil(device.cores))
        variables["CONVOY_CPU_QUOTA"] = repr(device.cores)  # layers are timed in processor time
    if fleet_path is not None:
        variables["CONVOY_FLEET"] = str(fleet_path.resolve())
    return variables


@contextmanager
def _hosts(fleet: Fleet, command: Sequence[str], fleet_path: Path | None) -> Iterator[list[Start]]:
    """Make the emulated hosts. Each device's process joins its group and namespace, then executes the command."""
    run = RunName.mine()
    wiring = namespaces.wire(run, [host.name for host in fleet.hosts], fleet.segments)
    join = [machine.find("sh"), "-c", 'echo $$ > "$0" && exec "$@"']
    with ExitStack() as stack:
        stack.enter_context(namespaces.network(wiring))
        if len(fleet.hosts) > 1:
            namespaces.shape(wiring, fleet.nic)
        groups = stack.enter_context(
            machine.groups(machine.cpu_controller(), run, [device.cores for device in fleet.devices])
        )
        starts: list[Start] = []
        for index, (device, group) in enumerate(zip(fleet.devices, groups, strict=True)):
            enter = [machine.find("ip"), "netns", "exec", wiring.port(device.host).namespace]
            starts.append(
                Start(
                    device=index,
                    name=device.name,
                    command=[*join, str(machine.entrance(group)), *enter, *command],
                    environment=os.environ | environment(fleet, index, wiring, fleet_path),
                    lifeline=True,
                    own_session=True,
                )
            )
        yield starts


class _Devices:
    """The processes of an emulated fleet's devices. Leaving the context ends the running ones."""

    def __init__(
        self, fleet: Fleet, output: TextIO | None, interrupts: Interrupts, note: Callable[[str], None], continues: bool
    ) -> None:
        self._fleet, self._note, self._continues = fleet, note, continues
        self._first = None if output is None else decoded(partial(print, end="", file=output, flush=True))
        self._processes = Supervisor(interrupts)

    def __enter__(self) -> "_Devices":
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.__exit__()

    def start(self, start: Start) -> None:
        """Start a device. Show the output of device 0, with `continues` of all devices."""
        stdout: Output = "keep" if start.device else self._first
        if start.device and self._continues:
            stdout = self._first or to_stdout
        self._processes.start(replace(start, stdout=stdout, stderr=None if stdout is None else subprocess.STDOUT))

    def _failed(self) -> bool:
        return any(ending.status != 0 for ending in self._processes.endings)

    def watch(self, timeout_s: float) -> int:
        """Wait until the command has ended on all devices or the time is up; then end it, and show failed processes."""

        def over() -> bool:
            return (self._failed() and not self._continues) or not self._processes.running

        processes, interrupted, late = self._processes, None, []
        try:
            if not processes.listen(over, timeout_s):
                late = processes.running
            processes.end(_GRACE_S if self._failed() else 0.0)
        except Signalled as caught:
            interrupted = caught
            with suppress(Signalled):  # a second one: no more waiting
                processes.end(0.0)
        endings = processes.endings
        failed = [ending for ending in endings if ending.status != 0 and not ending.stopped_by_us]
        for ending in failed:
            self._show(ending.device, ending.lines, f"ended with status {ending.exit_status}")
        if failed and not (self._continues and any(ending.status == 0 for ending in endings)):
            return failed[0].exit_status
        if interrupted is not None:
            self._note(f"ended by {interrupted.signum.name}")
            return interrupted.status
        for process in late:
            self._show(process.start.device, process.lines(), f"was still running after {timeout_s:g} s")
        return TIMED_OUT if late else 0

    def _show(self, number: int, lines: Sequence[str], cause: str) -> None:
        """Print the last lines of a process."""
        device = self._fleet.devices[number]
        self._note(f"device {number} ({device.name} on host {device.host}) {cause}")
        for line in lines[-_LINES:]:
            self._note(f"{device.host}: {line}")
