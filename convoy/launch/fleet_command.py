"""Runs `--fleet` of convoy run, train and measure: one command for every host. Each function returns the exit status.

Errors are those of the settings and of :func:`run_on_fleet`.
"""

import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from convoy.comm.environment import is_loopback, is_own, resolve, route_to
from convoy.comm.job_key import variables_to_paste
from convoy.config.checks import check
from convoy.config.run_file import RunSettings
from convoy.config.train_options import key_of
from convoy.errors import InputError, unknown_name
from convoy.fleet import Fleet
from convoy.launch.batch_files import Command, jobset, line_to_paste, sbatch_file
from convoy.launch.fleet import run_on_fleet, startable
from convoy.launch.host_job import DEFAULTS, JobOptions, host_jobs
from convoy.plan.presets import AUTO, PLANS

PASTED_PORT = 29_500  # rendezvous port of pasted lines without --port: a free port cannot be found in advance

PRINTED = ("shell", "slurm", "kubernetes")  # formats of `convoy run --print`


def fleet_to_start(path: Path | None, print_lines: bool) -> Fleet | None:
    """Return the fleet of `--fleet` if its hosts have addresses; None: start this machine's devices."""
    fleet = startable(path)
    if fleet is None and print_lines:
        raise InputError(
            "--print without hosts: give --fleet FILE with an address in each [[host]] section; this machine's own "
            "devices need no lines"
        )
    return fleet


def train_on_fleet(run: RunSettings, fleet: Fleet, print_lines: bool) -> int:
    """Run `convoy train` on every device of a fleet. The hosts get the settings as options, not the run file."""
    settings = run.settings
    _refuse_devices(run.sources["devices"] != "default", fleet)
    names = ",".join(name for job in host_jobs(fleet) for name in job.names)
    planned = settings.plan == AUTO
    check(settings.model_copy(update={"devices": names, "fleet": settings.fleet if planned else None}))
    argv, files = ["train"], [] if settings.plan in (*PLANS, AUTO) else [Path(settings.plan)]
    for name, source in run.sources.items():
        value, key = getattr(settings, name), key_of(name)
        # The fleet file started the hosts; only the planner reads it again.
        if source == "default" or value is None or (name == "fleet" and not planned):
            continue
        if isinstance(value, bool):
            argv.append(f"--{key}" if value else f"--no-{key}")
        else:
            argv += [f"--{key}", ",".join(map(repr, value)) if isinstance(value, tuple) else str(value)]
    if planned and settings.fleet is not None:
        files.append(settings.fleet)
    options = JobOptions(port=settings.port, goes_on=settings.recovers, silence_s=settings.timeout_s)
    return _start(fleet, argv, options, files, print_lines)


def measure_on_fleet(
    fleet: Fleet, path: Path | None, argv: Sequence[str], devices_given: bool, print_lines: bool, *, port: int | None
) -> int:
    """Run `convoy measure` on every device of a fleet. `argv` is the command line, starting with the verb."""
    _refuse_devices(devices_given, fleet)
    argv = [word for word in argv if word != "--print"]
    return _start(fleet, argv, JobOptions(port=port), [] if path is None else [path], print_lines)


def script_on_fleet(
    fleet: Fleet,
    script: Sequence[str],
    options: JobOptions = DEFAULTS,
    *,
    print_for: str | None = None,
    image: str | None = None,
    files: Sequence[Path] = (),
    listen: str | None = None,
) -> int:
    """Run `convoy run` on every device of a fleet.

    Args:
        script: arguments of `python`: a script, or -m and a module, with options.
        print_for: one of PRINTED: print its file or lines, and start nothing.
        image: container image for Kubernetes.
        files: more files that must be the same on every host.
        listen: HOST:PORT on device 0's host for join requests.
    """
    if os.path.isabs(script[0]) and Path.cwd() in Path(script[0]).parents:
        script = [os.path.relpath(script[0]), *script[1:]]  # hosts may have another path to the folder
    if print_for not in (None, *PRINTED):
        raise unknown_name("--print", print_for, PRINTED)
    if (image is None) == (print_for == "kubernetes"):
        raise InputError(
            "--print kubernetes and --image go together: give the container image that has Convoy and the script, e.g. "
            "--image registry.lab/convoy:1"
        )
    argv = ["run", *([] if listen is None else ["--listen", listen]), *([] if script[0] == "-m" else ["--"]), *script]
    if print_for == "slurm":
        command = Command(argv, options.port, sys.executable, os.getcwd(), _further(fleet))
        print(sbatch_file(host_jobs(fleet), command), end="")
        return 0
    if image is not None:
        name = f"convoy-{secrets.token_hex(3)}"  # unique in the cluster
        command = Command(argv, options.port or PASTED_PORT, further=_further(fleet))
        print(jobset(host_jobs(fleet), command, name, image), end="")
        return 0
    files = [*([] if script[0] == "-m" else [Path(script[0])]), *(path for path in files if path != Path(script[0]))]
    return _start(fleet, argv, options, files, print_for == "shell")


def _refuse_devices(given: bool, fleet: Fleet) -> None:
    if given:
        raise InputError(
            f"--devices with a fleet of hosts: the file names its {len(fleet.devices)} devices; leave --devices out, or take "
            "the addresses out of the file to start devices of this machine only"
        )


def _start(fleet: Fleet, argv: Sequence[str], options: JobOptions, files: Sequence[Path], print_lines: bool) -> int:
    jobs = host_jobs(fleet)
    first = jobs[0].host
    if not print_lines:
        if not is_own(str(first.address)):
            print(f"Device 0 is on host {first.name}: the job writes its files there.", flush=True)
        return run_on_fleet(fleet, argv, options, files=files)
    address = _meeting_address(fleet)
    command = Command(argv, options.port or PASTED_PORT, sys.executable, os.getcwd(), _further(fleet))
    for job in jobs:
        line = line_to_paste(job, command, len(fleet.devices), address)
        print(f"# on host {job.host.name} ({job.host.address})\n{line}")
    return 0


def _further(fleet: Fleet) -> dict[str, str]:
    """Return variables for devices that another launcher starts. Print a note if they need a key file."""
    further = variables_to_paste(os.environ)
    if not further and len(fleet.hosts) > 1:
        print(
            "note: the devices need a key: make one with `convoy fleet key FILE`, copy it to every host, and add "
            "--job-key FILE here (or --trust-network)",
            file=sys.stderr,
        )
    return further


def _meeting_address(fleet: Fleet) -> str:
    """Return the address of device 0's host, as far as this machine knows it."""
    first, *others = (str(job.host.address) for job in host_jobs(fleet))
    if not others:
        return "127.0.0.1"
    if is_own(first):
        return route_to(others[0], 9)
    address = str(resolve(first, 9, socket.SOCK_STREAM)[0][1][0])
    if is_loopback(address):
        raise InputError(
            f"address = {first!r} is {address} here, which is this machine: give its address in the network"
        )
    return address
