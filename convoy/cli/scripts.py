"""Defines the verb run, which starts the user's own script on every device."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.cli.options import app, argument, flag, in_job, option, with_settings
from convoy.comm.environment import JOIN
from convoy.comm.job_key import need_key_file
from convoy.config.run_file import resolve_settings
from convoy.config.train_options import Settings, read_address
from convoy.errors import InputError
from convoy.launch.pairing import choose_key
from convoy.machine.launch_env import hidden


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@with_settings("devices", "fleet", "job_key", "trust_network", "port", "listen")
def run(
    arguments: Annotated[list[str] | None, argument("SCRIPT.PY [ARGS]...", "A script and its own arguments.")] = None,
    module: Annotated[str | None, option("NAME", "Run a module, as python -m does.", "--module", "-m")] = None,
    logs: Annotated[Path | None, option("PATH", "Folder for the output of devices 1, 2, ...")] = None,
    check: Annotated[bool, flag("Only list what prepare refuses or leaves on one device.", "--check")] = False,
    goes_on: Annotated[bool, flag("Continue if a device is lost; needs convoy.train.Members.", "--goes-on")] = False,
    join: Annotated[str | None, option("HOST:PORT", "Join the job of the same script, started with --listen.")] = None,
    pair: Annotated[str | None, option("HOST:PORT", "First get the key from convoy fleet key --to there.")] = None,
    on: Annotated[str | None, option("ENGINE", "Run on the nodes of a cluster: ray. They get this folder.")] = None,
    **given: Any,
) -> None:
    """Run your own script on every device, one process each, as one job.

    The script calls convoy.prepare, or join, make_plan, distribute and loader. Everything else in it runs in every process.
    Write its options after its name. Device 0 has the terminal; the output of the others is shown if it explains a failure.
    Ctrl-C ends all of them. RANK and similar variables are removed from the script's environment, so that it does not
    distribute the work itself. Under torchrun, srun or mpirun the script runs in this process.

    Example: convoy run --devices 4 examples/one_line.py
    """
    argv = ["-m", module, *(arguments or [])] if module is not None else arguments or []
    if not argv:
        raise InputError("nothing to run: give a script and its arguments, e.g. convoy run --devices 4 train.py")
    if module is None and not os.path.isfile(argv[0]):
        remedy = "give the path of a Python file; options of convoy run go before it, those of the script after it"
        raise InputError(f"the script {argv[0]} is not there: {remedy}")
    settings = resolve_settings(None, given).settings
    one_of_job, listen = in_job(), settings.listen
    choose_key(settings.job_key, pair, settings.trust_network)
    if on is not None:
        if on != "ray" or join or logs or check or any(given[name] for name in ("devices", "fleet", "listen", "port")):
            others = "--devices, --fleet, --listen, --join, --logs, --check and --port"
            raise InputError(f"--on {on}: the only engine is ray; leave out {others}")
        from convoy.ray.script import run_on_cluster

        raise typer.Exit(run_on_cluster(argv, goes_on))
    if join and (listen or settings.fleet or one_of_job):
        raise InputError("--listen and --join: give one of them, and --join with one device of this machine")
    if listen or join:
        _open_to_joining(listen, join, one_of_job)
    if one_of_job or check:
        _become(argv, hidden(os.environ) | ({"CONVOY_CHECK": "1"} if check else {}))
    from convoy.launch.host_job import JobOptions

    options = JobOptions(port=settings.port, logs=logs, goes_on=goes_on or listen is not None)
    if settings.fleet is not None:
        from convoy.launch.fleet import script_on_fleet, startable
        from convoy.setup.setup import sent_modules

        if (fleet := startable(settings.fleet)) is None:
            raise InputError("--fleet needs a file with an `address` in each [[host]] section")
        if given["devices"] is not None:
            raise InputError(f"--devices {settings.devices} with --fleet: the file names the devices; leave it out")
        files = sent_modules(fleet, Path.cwd())
        raise typer.Exit(script_on_fleet(fleet, argv, options, files=files, listen=listen))
    raise typer.Exit(_run_here(argv, settings, options, joins=join is not None))


def _open_to_joining(listen: str | None, join: str | None, one_of_job: bool) -> None:
    """Set the variables of a job that devices may join, or of a device that joins. Refuse them without a key."""
    for address in str(listen or join).split(","):
        read_address(address)
    os.environ[JOIN if listen is None else "CONVOY_LISTEN"] = str(listen or join)
    if one_of_job:  # the launcher has checked and printed the rest
        return
    need_key_file("--listen" if listen else "--join", os.environ)
    if listen is not None:
        line = f"convoy run --join {listen} --job-key FILE"
        print(f"Others may join: {line}, with the same script and arguments", flush=True)


def _run_here(argv: Sequence[str], settings: Settings, options: Any, *, joins: bool) -> int:
    from convoy.launch.host_job import memory_environment
    from convoy.launch.local import launch_local

    names = settings.device_names
    if joins and len(names) > 1:
        raise InputError(f"--devices {settings.devices} with --join: one device joins at a time; repeat the command")
    if len(names) == 1:
        device = {} if names == ("auto",) else {"CONVOY_DEVICE": names[0]}
        _become(argv, os.environ | memory_environment(os.environ) | device)
    host = "127.0.0.1" if settings.listens_at is None else settings.listens_at[0]
    return launch_local(argv, names, options=options, host=host, command=(sys.executable,), script=True)


def _become(argv: Sequence[str], environment: dict[str, str]) -> None:
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *argv], environment)
