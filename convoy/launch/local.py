"""Starts all devices of this machine as child processes, and ends them together."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from convoy.comm.environment import LISTENER, listen_at
from convoy.comm.job_key import key_to_start
from convoy.errors import InputError
from convoy.launch.exit_status import Ending, conclude
from convoy.launch.host_job import CONVOY_COMMAND, DEFAULTS, JobOptions, device_environments, log_of
from convoy.launch.supervisor import Interrupts, Output, Signalled, Start, Supervisor, to_stdout
from convoy.machine.launch_env import hidden

KILLED_GRACE_S = 0.5  # seconds for the others to end by themselves after a device was killed


def launch_local(
    argv: Sequence[str],
    devices: Sequence[str],
    options: JobOptions = DEFAULTS,
    *,
    host: str = "127.0.0.1",
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = CONVOY_COMMAND,
    script: bool = False,
) -> int:
    """Run ``command argv`` once per device, as one job, and wait for all of them.

    Device 0 has the terminal. The others' error output is shown only if it explains a failure; their standard output is
    dropped. Every device finds its rank in torchrun's variables and its hardware in CONVOY_DEVICE.

    Args:
        devices: a torch device for each process, such as ``("cpu", "cuda:0")``.
        host: the rendezvous address.
        environment: more variables for every device.
        command: the program to start instead of this Python's convoy. Then this process hosts the rendezvous store, because
            the program may need it before it joins. Otherwise device 0 hosts it, and this process needs no torch.
        script: the program is a user script: it gets its rank in Convoy's own variables only, and sees one device.

    Returns:
        0 after success, 2 if devices ended with a printed error, 128 + n after signal n: 130 after Ctrl-C.

    Raises:
        InputError: no devices, no such command, or the port is taken.
        DeviceLostError: a device crashed or was killed; the message names it and ends with its last output.
    """
    if not devices:
        raise InputError("there are no devices to start: name at least one, such as cpu")
    listener, hosted = listen_at(host, options.port or 0), command is not CONVOY_COMMAND
    address, port = listener.getsockname()[:2]
    environments = device_environments(
        {**os.environ, **(environment or {})}, range(len(devices)), devices, total=len(devices), address=address, port=port,
        hosted=hosted,
    )  # fmt: skip
    if not hosted:
        environments[0][LISTENER] = str(listener.fileno())
    key = key_to_start(environments[0]) if len(devices) > 1 else None
    store: Any = None

    with listener, Interrupts() as interrupts, Supervisor(interrupts) as processes:
        try:
            for rank, (device, variables) in enumerate(zip(devices, environments, strict=True)):
                terminal = None if rank == 0 else subprocess.DEVNULL
                stdout: Output = to_stdout if options.goes_on and rank else terminal
                start = Start(
                    device=rank, name=device, command=[*command, *argv], environment=hidden(variables) if script else variables,
                    stdin=terminal, stdout=stdout, stderr="keep" if rank else None, lifeline=True, key=key,
                    pass_fds=[listener.fileno()] if rank == 0 and not hosted else (), log=log_of(options.logs, rank),
                )  # fmt: skip
                processes.start(start)
            if hosted:  # while they start
                from convoy.comm.store import host_torch_store

                store = host_torch_store(listener)
            else:
                listener.close()
            processes.listen(lambda: processes.over(options.goes_on, options.silence_s))
            if script and len(devices) > 1:
                _warn_if_none_joined(processes.endings, store)
            # A killed device is the cause: errors of the others would add nothing.
            killed = any(ending.status < 0 for ending in processes.endings)
            processes.end(min(KILLED_GRACE_S, options.grace_s) if killed else options.grace_s)
        except OSError as error:
            raise InputError(f"cannot start {command[0]!r}: {error.strerror}; give a program that exists") from None
        except Signalled as interrupted:
            print(interrupted.text(len(processes.running)), file=sys.stderr, flush=True)
            with suppress(Signalled):  # a second signal ends the wait
                if interrupted.after_step:
                    processes.end_after_step(len(processes.running))
                # The devices also got Ctrl-C.
                processes.end(options.grace_s if interrupted.signum == signal.SIGINT else 0.0)
            return interrupted.status
        finally:
            del store  # closes the store even if an exception keeps this frame
    return conclude(processes.endings, goes_on=options.goes_on)


def _warn_if_none_joined(endings: Sequence[Ending], store: Any) -> None:
    if not any(ending.status for ending in endings) and not store.num_keys():
        print(
            f"note: the script joined no job, so each of the {len(endings)} processes ran all of it by itself: call "
            "convoy.prepare (or convoy.join) in it",
            file=sys.stderr,
        )
