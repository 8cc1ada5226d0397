"""Starting all devices of one machine as processes of this one, and ending them together."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from convoy.comm.rendezvous import host_store
from convoy.errors import InputError
from convoy.launch.exit_status import judge
from convoy.launch.processes import CONVOY_COMMAND, INTERRUPTED_STATUS, Crew, Part


def launch_local(
    argv: Sequence[str],
    devices: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    timeout_s: float = 5.0,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = CONVOY_COMMAND,
) -> int:
    """Run ``command argv`` once per device, as one job, and wait for all of them.

    Device 0 has the terminal. The others' error output is kept and shown where it explains a failure; their standard
    output is dropped. Every device finds its place in torchrun's variables and its hardware in CONVOY_DEVICE.

    Args:
        devices: what each device computes on, such as ``("cpu", "cuda:0")``.
        host, port: where the devices meet; None takes a free port.
        timeout_s: once one has failed, or after Ctrl-C, the others get this long to end by themselves.
        environment: further variables for every device.
        command: what to start, in place of this Python's convoy.

    Returns:
        0 if all ended well, 2 if devices ended with an error that has been printed, 130 after Ctrl-C.

    Raises:
        InputError: no devices, or the port is taken.
        DeviceLostError: a device crashed or was killed; the message says which, how, and its last words.
    """
    if not devices:
        raise InputError("there are no devices to start: name at least one, such as cpu")
    store = host_store(host, port or 0)
    ranks = tuple(range(len(devices)))
    part = Part(ranks, tuple(devices), len(devices), store.host, store.port, hosted=True)
    variables = part.variables({**os.environ, **(environment or {})})
    # Only this process holds the write end, so the devices see the end of it whichever way this process ends.
    lifeline, held = os.pipe()
    crew = Crew(dict(enumerate(devices)))
    try:
        for device in ranks:
            crew.start(device, [*command, *argv], variables[device], lifeline)
        crew.await_trouble()
        crew.end(timeout_s)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # a second Ctrl-C: no more waiting
            crew.end(timeout_s)
        return INTERRUPTED_STATUS
    finally:
        crew.kill()
        os.close(held)
        os.close(lifeline)
        del store
    outcome = judge(crew.endings)
    if outcome.lost is not None:
        raise outcome.lost
    for line in outcome.lines:
        print(line, file=sys.stderr)
    return outcome.status
