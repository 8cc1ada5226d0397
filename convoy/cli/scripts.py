"""Defines the verb run, which starts the user's own script on every device."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.cli.options import PATH, app, in_job, with_settings
from convoy.comm.environment import JOIN
from convoy.comm.job_key import KEY_FILE, choose
from convoy.config.run_file import resolve_settings
from convoy.config.train_options import read_address
from convoy.errors import InputError
from convoy.machine.launch_env import hidden


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
@with_settings("devices", "fleet", "job_key", "trust_network", "port", "listen")
def run(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT.PY [ARGS]...", help="A Python script and its own arguments.")
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", "-m", help="Run a module instead of a script, as python -m does.")
    ] = None,
    print_for: Annotated[
        str | None,
        typer.Option(
            "--print",
            help="Start nothing; print a launcher for the fleet. shell: a line for each host; slurm: a file for sbatch; "
            "kubernetes: a JobSet for kubectl, with --image.",
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="For --print kubernetes: the container image that has Convoy and the script.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for the output of devices 1, 2, ...; otherwise it is dropped.", **PATH)
    ] = None,
    goes_on: Annotated[
        bool, typer.Option("--goes-on", help="Let the others continue if a device is lost; needs convoy.train.Members.")
    ] = False,
    join: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Join the running job of the same script, started with --listen."),
    ] = None,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="Examine the machines first; start only if there are no errors.")
    ] = False,
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
        raise InputError(
            "nothing to run: give a script and its arguments, e.g. convoy run --devices 4 train.py --lr 0.1"
        )
    if module is None and not os.path.isfile(argv[0]):
        raise InputError(
            f"the script {argv[0]} is not there: give the path of a Python file; options of convoy run go before it, those "
            "of the script after it"
        )
    settings = resolve_settings(None, given).settings
    one_of_job, listen, fleet = in_job(), settings.listen, settings.fleet
    choose(settings.job_key, settings.trust_network, os.environ)
    if listen is not None or join is not None:
        if (listen and join) or print_for is not None or (join is not None and (fleet is not None or one_of_job)):
            raise InputError(
                "--listen and --join: give one of them, --join with one device of this machine, and neither with --print"
            )
        for address in str(listen or join).split(","):
            read_address(address)
        option = "--join" if listen is None else "--listen"
        os.environ[JOIN if listen is None else "CONVOY_LISTEN"] = str(listen or join)
        if not one_of_job:  # in a job the launcher has done this
            if not os.environ.get(KEY_FILE):
                raise InputError(
                    f"{option} without --job-key: joining devices prove themselves by it; make one with `convoy fleet key "
                    "FILE`, and give it on both machines"
                )
            if listen is not None:
                line = f"convoy run --join {listen} --job-key FILE"
                print(f"Others may join: {line}, with the same script and arguments", flush=True)
    if one_of_job:
        _become(argv, hidden(os.environ))
    from convoy.launch.host_job import JobOptions, memory_environment

    options = JobOptions(port=settings.port, logs=logs, goes_on=goes_on or listen is not None)
    if fleet is not None or print_for is not None or image is not None:
        from convoy.launch.fleet_command import fleet_to_start, script_on_fleet
        from convoy.setup.setup import sent_modules

        started = fleet_to_start(fleet, print_for is not None or image is not None)
        if started is None:
            raise InputError(
                f"--fleet {fleet}: its hosts have no address, so there is nothing to start by ssh: give each its `address`, "
                "or start this machine's devices with --devices"
            )
        if settings.devices != "auto":
            raise InputError(
                f"--devices {settings.devices} with --fleet: the file names the devices; leave --devices out"
            )
        files = sent_modules(started, Path.cwd())
        _examine(doctor, fleet)
        raise typer.Exit(
            script_on_fleet(started, argv, options, print_for=print_for, image=image, files=files, listen=listen)
        )
    _examine(doctor, None)
    names = settings.device_names
    if join is not None and len(names) > 1:
        raise InputError(f"--devices {settings.devices} with --join: one device joins at a time; repeat the command")
    if len(names) == 1:
        device = {} if names == ("auto",) else {"CONVOY_DEVICE": names[0]}
        _become(argv, os.environ | memory_environment(os.environ) | device)
    from convoy.launch.local import launch_local

    host = "127.0.0.1" if settings.listens_at is None else settings.listens_at[0]
    raise typer.Exit(launch_local(argv, names, options=options, host=host, command=(sys.executable,), script=True))


def _examine(wanted: bool, fleet: Path | None) -> None:
    """Run the doctor if wanted, and exit if it finds errors."""
    if wanted:
        from convoy.doctor.doctor import run_doctor

        if status := run_doctor(fleet, None, 60.0):
            raise typer.Exit(status)


def _become(argv: list[str], environment: dict[str, str]) -> None:
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *argv], environment)
