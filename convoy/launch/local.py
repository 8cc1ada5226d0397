"""Starts all devices of this machine as child processes, and ends them together. Also runs a notebook's cell as a script:
`%%convoy --devices 4`, after `%load_ext convoy`.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from convoy.comm.environment import LISTENER, listen_at
from convoy.comm.job_key import key_to_start
from convoy.errors import ConvoyError, InputError
from convoy.launch.exit_status import conclude
from convoy.launch.host_job import CONVOY_COMMAND, DEFAULTS, JobOptions, device_environments, log_of
from convoy.launch.supervisor import Interrupts, Output, Signalled, Start, Supervisor, decoded, to_stdout
from convoy.machine.launch_env import hidden

KILLED_GRACE_S = 0.5  # seconds for the others to end by themselves after a device was killed
CELL_GRACE_S = 10.0  # seconds for the devices of a notebook's cell to end by themselves after an interrupt


def launch_local(
    argv: Sequence[str],
    devices: Sequence[str],
    options: JobOptions = DEFAULTS,
    *,
    host: str = "127.0.0.1",
    command: Sequence[str] = CONVOY_COMMAND,
    script: bool = False,
) -> int:
    """Run ``command argv`` once per device, as one job, and wait for all of them.

    Device 0 has the terminal. The others' error output is shown only if it explains a failure; their standard output is
    dropped. Returns and raises as `run_on_fleet`.

    Args:
        devices: a torch device for each process, such as ``("cpu", "cuda:0")``.
        command: the program to start instead of this Python's convoy. Then this process hosts the rendezvous store, because
            the program may need it before it joins. Otherwise device 0 hosts it, and this process needs no torch.
        script: the program is a user script: it gets its rank in Convoy's own variables only, and sees one device.
    """
    if not devices:
        raise InputError("there are no devices to start: name at least one, such as cpu")
    listener, hosted = listen_at(host, options.port or 0), command is not CONVOY_COMMAND
    address, port = listener.getsockname()[:2]
    environments = device_environments(
        os.environ, range(len(devices)), devices, total=len(devices), address=address, port=port, hosted=hosted
    )
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
            processes.listen(lambda: processes.over(options.goes_on))
            failed = any(ending.status for ending in processes.endings)
            if script and len(devices) > 1 and not failed and not store.num_keys():
                print(
                    f"note: the script joined no job, so each of the {len(devices)} processes ran all of it by itself: call "
                    "convoy.prepare (or convoy.join) in it",
                    file=sys.stderr,
                )
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


def notebook(source: str, options: str = "") -> None:
    """Run Python source as a script on several devices of this machine or a fleet, and print the output of device 0.

    The source is a separate program without the notebook's variables, because threads and devices of the notebook's process
    cannot be shared. Return results as files. `options` are those of `convoy run`, such as "--devices 4".
    """
    with tempfile.TemporaryDirectory(prefix="convoy-cell-") as folder:
        script = Path(folder) / "cell.py"
        script.write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "convoy", "run", *shlex.split(options), str(script)]
        to_cell = decoded(lambda text: print(text, end="", flush=True))  # a cell shows only the output of this process
        start = Start(device=0, name="cell", command=command, stdout=to_cell, stderr=to_cell, own_session=True)
        with Interrupts() as interrupts, Supervisor(interrupts) as processes:
            process = processes.start(start)
            try:
                processes.listen(lambda: not processes.running)
            except Signalled:
                process.popen.send_signal(signal.SIGINT)
                processes.listen(lambda: not processes.running, CELL_GRACE_S)
                raise KeyboardInterrupt from None
        status = process.popen.returncode
    if status:
        raise ConvoyError(f"the cell ended with status {status} on its devices; the reason is printed above")


def load_ipython_extension(shell: Any) -> None:
    """Register `%%convoy` in a notebook (`%load_ext convoy`)."""
    shell.register_magic_function(lambda line, cell: notebook(cell, line), magic_kind="cell", magic_name="convoy")
