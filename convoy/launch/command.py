"""`--fleet` of convoy run, train and measure, where it names hosts to start: from options to what every host is told."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from convoy.app.checks import check
from convoy.comm.environment import is_loopback, is_own, resolve, route_to
from convoy.comm.job_key import variables_to_paste
from convoy.config.run_file import RunSettings
from convoy.config.settings import key_of
from convoy.errors import InputError, unknown_name
from convoy.fleet import Fleet
from convoy.launch.detach import Detach, new_detach, this_host
from convoy.launch.fleet import run_on_fleet, startable
from convoy.launch.host_job import host_jobs, line_to_paste
from convoy.launch.kubernetes import jobset
from convoy.launch.slurm import sbatch_file
from convoy.plan.presets import AUTO, PLANS

PASTED_PORT = 29_500
"""Where pasted lines meet unless --port says otherwise: nobody can look for a free one beforehand."""


def fleet_to_start(path: Path | None, print_lines: bool) -> Fleet | None:
    """The fleet of `--fleet` if its hosts have addresses; None: this machine's devices are to be started.

    Raises:
        InputError: as :func:`startable`; or lines to paste were asked for and there is no such fleet.
    """
    fleet = startable(path)
    if fleet is None and print_lines:
        raise InputError(
            "--print without hosts: give --fleet FILE whose [[host]] sections have an address each; this machine's own "
            "devices need no lines"
        )
    return fleet


def train_on_fleet(run: RunSettings, fleet: Fleet, print_lines: bool, detach: bool = False) -> int:
    """`convoy train` on every device of a fleet; its exit status.

    The hosts get the settings as options, so that none of them needs the run file.

    Args:
        detach: come back once all train, and leave them alone.

    Raises:
        InputError, MismatchError, DeviceLostError: as the settings and :func:`run_on_fleet` say.
    """
    settings = run.settings
    _refuse_devices(run.sources["devices"] != "default", fleet)
    names = ",".join(name for job in host_jobs(fleet) for name in job.names)
    planned = settings.plan == AUTO
    check(settings.model_copy(update={"devices": names, "fleet": settings.fleet if planned else None}))
    # The file has started the fleet; only the planner has more questions to it.
    options = [option for name in run.sources for option in _option(run, name) if name != "fleet" or planned]
    files = [] if settings.plan in (*PLANS, AUTO) else [Path(settings.plan)]
    if planned and settings.fleet is not None:
        files.append(settings.fleet)
    return _start(
        fleet, ["train", *options], files, settings.port, print_lines, goes_on=settings.goes_on, silence_s=settings.timeout_s,
        detach=new_detach(settings.timeout_s) if detach else None,
        tries_again=settings.goes_on and settings.try_again is not False,
    )  # fmt: skip


def train_here_detached(run: RunSettings, host: str) -> int:
    """`convoy train` on devices of this machine, which go on without this command; its exit status.

    Args:
        host: the address where they meet.

    Raises:
        InputError, DeviceLostError: as :func:`run_on_fleet` says.
    """
    settings = run.settings
    options = [option for name in run.sources if name not in ("devices", "port") for option in _option(run, name)]
    names = settings.device_names
    return run_on_fleet(
        [this_host(names)], ["train", "--devices", ",".join(names), *options], port=settings.port, goes_on=settings.goes_on,
        detach=new_detach(settings.timeout_s), tries_again=bool(settings.try_again), alone=host,
    )  # fmt: skip


SCRIPT_SILENCE_S = 60.0
"""A script's device that is stopped for so long is killed, where nobody else watches it: the time limit of `convoy.join`."""


def script_here_detached(
    words: Sequence[str],
    names: Sequence[str],
    *,
    host: str,
    port: int | None,
    logs: Path | None,
    goes_on: bool,
    tries_again: bool,
) -> int:
    """`convoy run` on devices of this machine, which go on without this command; its exit status.

    Args:
        words: as for :func:`script_on_fleet`.
        names: what the devices compute on.
        host: the address where they meet.
        logs: a folder for what they print; None: a new one.

    Raises:
        InputError, DeviceLostError: as :func:`run_on_fleet` says.
    """
    return run_on_fleet(
        [this_host(names)], _run_words(words), port=port, goes_on=goes_on, detach=new_detach(SCRIPT_SILENCE_S, logs),
        tries_again=tries_again, alone=host,
    )  # fmt: skip


def measure_on_fleet(
    fleet: Fleet, path: Path | None, argv: Sequence[str], devices_given: bool, print_lines: bool, *, port: int | None
) -> int:
    """`convoy measure` on every device of a fleet; its exit status.

    Args:
        path: the fleet's file.
        argv: the command line, from the verb on.

    Raises:
        InputError, MismatchError, DeviceLostError: as :func:`run_on_fleet` says.
    """
    _refuse_devices(devices_given, fleet)
    argv = [word for word in argv if word != "--print"]
    return _start(fleet, argv, [] if path is None else [path], port, print_lines)


PRINTED = ("shell", "slurm", "kubernetes")
"""What `convoy run --print` can write."""


def script_on_fleet(
    fleet: Fleet,
    words: Sequence[str],
    *,
    port: int | None,
    print_for: str | None,
    image: str | None = None,
    logs: Path | None = None,
    files: Sequence[Path] = (),
    goes_on: bool = False,
    detach: bool = False,
    tries_again: bool = False,
    listen: str | None = None,
) -> int:
    """`convoy run` on every device of a fleet; its exit status.

    Args:
        words: what follows `python`: a script, or -m and a module, and its own arguments.
        print_for: start nothing, and print what starts the fleet: one of PRINTED.
        image: of the containers in Kubernetes.
        logs: a folder on each host for what its devices print, but for device 0.
        files: that must be the same on every host, beside the script.
        goes_on, tries_again: as for :func:`run_on_fleet`.
        detach: come back once all devices compute, and leave them alone.
        listen: HOST:PORT, of the host of device 0, where newcomers ask.

    Raises:
        InputError, MismatchError, DeviceLostError: as :func:`run_on_fleet` says; an unknown `print_for`, no image.
    """
    if os.path.isabs(words[0]) and Path.cwd() in Path(words[0]).parents:
        words = [os.path.relpath(words[0]), *words[1:]]  # hosts may have the folder elsewhere
    if print_for not in (None, *PRINTED):
        raise unknown_name("--print", print_for, PRINTED)
    if (image is None) == (print_for == "kubernetes"):
        raise InputError(
            "--print kubernetes and --image go together: give the container image that has Convoy and the script, e.g. "
            "--image registry.lab/convoy:1"
        )
    further = _further(fleet) if print_for else {}
    if print_for == "slurm":
        print(
            sbatch_file(host_jobs(fleet), words, port=port, python=sys.executable, folder=os.getcwd(), further=further),
            end="",
        )
        return 0
    argv = _run_words(words, listen)
    if image is not None:
        print(jobset(host_jobs(fleet), argv, image=image, port=port or PASTED_PORT, further=further), end="")
        return 0
    files = [*([] if words[0] == "-m" else [Path(words[0])]), *(path for path in files if path != Path(words[0]))]
    return _start(
        fleet, argv, files, port, print_for == "shell", logs, goes_on=goes_on, tries_again=tries_again,
        detach=new_detach(SCRIPT_SILENCE_S, logs) if detach else None,
    )  # fmt: skip


def _run_words(words: Sequence[str], listen: str | None = None) -> list[str]:
    """What a device is told that is to run this."""
    door = [] if listen is None else ["--listen", listen]
    return ["run", *door, *words] if words[0] == "-m" else ["run", *door, "--", *words]


def _refuse_devices(given: bool, fleet: Fleet) -> None:
    if given:
        raise InputError(
            f"--devices with a fleet of hosts: the file names its {len(fleet.devices)} devices; leave --devices out, or take "
            "the addresses out of the file to start devices of this machine only"
        )


def _option(run: RunSettings, name: str) -> list[str]:
    """A setting as the command line would have given it; nothing for a default."""
    value, key = getattr(run.settings, name), key_of(name)
    if run.sources[name] == "default" or value is None:
        return []
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    text = ",".join(map(repr, value)) if isinstance(value, tuple) else str(value)
    return [f"--{key}", text]


def _start(
    fleet: Fleet,
    argv: Sequence[str],
    files: Sequence[Path],
    port: int | None,
    print_lines: bool,
    logs: Path | None = None,
    *,
    goes_on: bool = False,
    silence_s: float = 60.0,
    detach: Detach | None = None,
    tries_again: bool = False,
) -> int:
    first = host_jobs(fleet)[0].host
    if not print_lines:
        if not is_own(str(first.address)):
            print(f"Device 0 is on host {first.name}: files that the job writes lie there.", flush=True)
        return run_on_fleet(
            fleet,
            argv,
            port=port,
            files=files,
            logs=logs,
            goes_on=goes_on,
            silence_s=silence_s,
            detach=detach,
            tries_again=tries_again,
        )
    address, meeting_port, further = _meeting_address(fleet), port or PASTED_PORT, _further(fleet)
    for job in host_jobs(fleet):
        line = line_to_paste(
            job, argv, total=len(fleet.devices), address=address, port=meeting_port, python=sys.executable,
            folder=os.getcwd(), further=further,
        )  # fmt: skip
        print(f"# on host {job.host.name} ({job.host.address})\n{line}")
    return 0


def _further(fleet: Fleet) -> dict[str, str]:
    """Variables of the devices that somebody else starts. Nobody hands them a key, so it is said here that they need one."""
    further = variables_to_paste(os.environ)
    if not further and len(fleet.hosts) > 1:
        print(
            "note: what starts there needs a key: make one with `convoy key FILE`, bring it to every host, and add --job-key "
            "FILE here (or --trust-network)",
            file=sys.stderr,
        )
    return further


def _meeting_address(fleet: Fleet) -> str:
    """The address of device 0's host, as far as it can be told from here without asking anybody."""
    first, *others = (str(job.host.address) for job in host_jobs(fleet))
    if not others:
        return "127.0.0.1"
    if is_own(first):
        return route_to(others[0], 9)
    address = str(resolve(first, 9, socket.SOCK_STREAM)[0][1][0])
    if is_loopback(address):
        raise InputError(
            f"address = {first!r} is {address} here, which leads to this machine: give its address in the network"
        )
    return address
