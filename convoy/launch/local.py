"""Starts all devices of one machine as processes of this one, and ends them together."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from convoy.comm.environment import LISTENER, listen_at
from convoy.comm.job_key import key_to_start
from convoy.comm.launch_env import hidden
from convoy.errors import InputError
from convoy.launch.again import Address, Again
from convoy.launch.host_job import CONVOY_COMMAND, device_environments, joining_environment, log_of
from convoy.launch.leaving import ending_text, ends_in_order, let_leave
from convoy.launch.stopped import Stopped
from convoy.launch.supervisor import (
    Interrupted,
    Interrupts,
    Output,
    Sink,
    Supervisor,
    by_line,
    conclude,
    note,
    once_first,
    to_stdout,
)

KILLED_GRACE_S = 0.5
"""Once a device was killed, the others get this long to end by themselves."""


def launch_local(
    argv: Sequence[str],
    devices: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    timeout_s: float = 5.0,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = CONVOY_COMMAND,
    script: bool = False,
    logs: Path | None = None,
    goes_on: bool = False,
    silence_s: float = 60.0,
    tries_again: bool = False,
) -> int:
    """Run ``command argv`` once per device, as one job, and wait for all of them.

    Device 0 has the terminal. The others' error output is kept and shown where it explains a failure; their standard
    output is dropped. Every device finds its rank in torchrun's variables (a script in Convoy's own) and its hardware in
    CONVOY_DEVICE.

    Args:
        devices: what each device computes on, such as ``("cpu", "cuda:0")``.
        host, port: where the devices meet; None takes a free port.
        timeout_s: once one has failed, or after Ctrl-C, the others get this long to end by themselves.
        environment: further variables for every device.
        command: what to start, in place of this Python's convoy. The store at which the devices meet is then kept here, since
            a program of one's own may want one before it joins; else by device 0, and this process needs no torch.
        script: it is one of the user's own, which is not to see that it is one of several processes.
        logs: a folder for what the devices but 0 print.
        goes_on: the devices go on without those of them that are lost. What the first prints that is left is shown then.
        silence_s: one that is stopped is killed after so long, where the others go on: for them it is lost by then.
        tries_again: a device that was lost is started again, by the same command (see `joining_environment`).

    Returns:
        0 if all ended well, 2 if devices ended with an error that has been printed, 128 + n after signal n: 130 after Ctrl-C.

    Raises:
        InputError: no devices, no such command, or the port is taken.
        DeviceLostError: a device crashed or was killed; the message says which, how, and its last words.
    """
    if not devices:
        raise InputError("there are no devices to start: name at least one, such as cpu")
    listener, hosted = listen_at(host, port or 0), command is not CONVOY_COMMAND
    address, port = listener.getsockname()[:2]
    environments = device_environments(
        {**os.environ, **(environment or {})}, range(len(devices)), devices, total=len(devices), address=address, port=port,
        hosted=hosted,
    )  # fmt: skip
    if not hosted:
        environments[0][LISTENER] = str(listener.fileno())
    key = key_to_start(environments[0]) if len(devices) > 1 else None
    store: object = None

    def start(number: int, device: str, variables: Mapping[str, str], **more: Any) -> None:
        processes.start(
            number, device, [*command, *argv], environment=hidden(variables) if script else variables, lifeline=True, key=key,
            log=log_of(logs, number), **more,
        )  # fmt: skip

    def start_again(device: int, number: int, doors: Sequence[Address]) -> None:
        processes.forget_ended()
        start(
            number,
            devices[device],
            joining_environment(environments[device], doors),
            stdout=to_stdout,
            told=hear(number),
        )

    def hear(number: int) -> Sink:
        return by_line(lambda line: again.hear(number, line))

    def over() -> bool:
        again.tend()
        if goes_on:
            stopped.tend()
        return processes.ends_job(goes_on, begun=again.begun) or not (
            again.members if tries_again else processes.running
        )

    titles = {rank: f"device {rank} ({name})" for rank, name in enumerate(devices)}
    again = Again(titles, start_again if tries_again else None, note)
    with listener, Interrupts() as interrupts, Supervisor(interrupts, again.note) as processes:
        stopped = Stopped(processes, silence_s)
        try:
            for rank, variables in enumerate(environments):
                terminal = None if rank == 0 else subprocess.DEVNULL
                stdout: Output = once_first(processes, rank) if goes_on and rank else terminal
                start(
                    rank, devices[rank], variables, stdin=terminal, stdout=stdout, stderr="keep" if rank else None,
                    pass_fds=[listener.fileno()] if rank == 0 and not hosted else (), told=hear(rank) if tries_again else None,
                )  # fmt: skip
            if hosted:  # while they start
                from convoy.comm.rendezvous import store_on

                store = store_on(listener)
            else:
                listener.close()
            processes.listen(over)
            again.stop()
            # A signal says which device was the cause: what the others would say is of no more use.
            killed = any(ending.status < 0 for ending in processes.endings)
            processes.end(min(KILLED_GRACE_S, timeout_s) if killed or tries_again else timeout_s)
        except OSError as error:
            raise InputError(f"cannot start {command[0]!r}: {error.strerror}; give a program that exists") from None
        except Interrupted as interrupted:
            again.stop()
            _end_at(interrupted, processes, len(again.members), timeout_s)
            return interrupted.status
        finally:
            del store  # which ends with it, also where an error keeps this frame
    return conclude([each for each in processes.endings if each.device in again.came], goes_on=goes_on)


def _end_at(interrupted: Interrupted, processes: Supervisor, members: int, timeout_s: float) -> None:
    count, in_order = len(processes.running), ends_in_order(interrupted)
    note(ending_text(count) if in_order else f"{interrupted.signum.name}: ending {count} devices")
    with suppress(Interrupted):  # a second one: no more waiting
        if in_order:
            let_leave(processes, members)
        # Ctrl-C has reached the devices, too.
        processes.end(timeout_s if interrupted.is_ctrl_c else 0.0)
