"""convoy run."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from convoy.cli.options import PATH, JobKeyFile, Port, TrustNetwork, app, in_job
from convoy.comm.environment import JOIN
from convoy.comm.job_key import KEY_FILE, choose
from convoy.comm.launch_env import hidden
from convoy.errors import InputError

if TYPE_CHECKING:
    from convoy.launch.host_job import JobOptions


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="SCRIPT.PY [ARGS]...", help="A Python script and its own arguments.")
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", "-m", help="A module in the place of a script, as with python -m.")
    ] = None,
    devices: Annotated[
        str,
        typer.Option(
            help="This machine's devices: [b]auto[/], every GPU, or the CPU where there is none; [b]all[/], the CPU beside "
            "the GPUs too; a number of CPU processes; or names such as cuda:0,cpu."
        ),
    ] = "auto",
    fleet: Annotated[
        Path | None, typer.Option(help="Fleet file whose hosts have addresses: all of them are started by ssh.", **PATH)
    ] = None,
    print_for: Annotated[
        str | None,
        typer.Option(
            "--print",
            help="Start nothing; print what starts the same fleet: [b]shell[/], a line for each host; [b]slurm[/], a file for "
            "sbatch; [b]kubernetes[/], a JobSet for kubectl, with --image.",
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="For --print kubernetes: the container image that has Convoy and the script.")
    ] = None,
    job_key: JobKeyFile = None,
    trust_network: TrustNetwork = False,
    port: Port = None,
    logs: Annotated[
        Path | None,
        typer.Option(
            help="Folder for what the devices but 0 print, a file each, on their hosts; else it is dropped.", **PATH
        ),
    ] = None,
    goes_on: Annotated[
        bool,
        typer.Option(
            "--goes-on", help="Let the others go on when a device is lost: for a script with convoy.train.Members."
        ),
    ] = False,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Let further devices come in while the script trains, with convoy.train.Members and the key of --job-key: the "
            "address at which they ask, of this machine, or with --fleet of that of device 0.",
        ),
    ] = None,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Come into a training that runs, of the same script, started with --listen and this --job-key.",
        ),
    ] = None,
    doctor: Annotated[
        bool, typer.Option("--doctor", help="Examine the machines first; begin only without errors.")
    ] = False,
) -> None:
    """Run a script of your own on every device: one process each, as one job. Its options stand after its name.

    The script calls convoy.prepare, or join, make_plan, distribute and loader. Device 0 has the terminal; of the others it is
    shown what explains a failure. Ctrl-C ends all of them, everywhere. As one process of a job that torchrun, srun or mpirun
    started, it runs the script here. The script sees one device: RANK and its like are taken out of its environment, so that
    one that could share out the work by itself does not.

    Example: convoy run --devices 4 examples/one_line.py
    """
    argv = _python_words(words or [], module)
    choose(job_key, trust_network, os.environ)
    if listen is not None or join is not None:
        others = print_for is not None or (join is not None and (fleet is not None or in_job()))
        _note_door(listen, join, others=others, told=in_job())
    if in_job():
        _become(argv, hidden(os.environ))
    if fleet is not None or print_for is not None or image is not None:
        from convoy.launch.host_job import JobOptions

        options = JobOptions(port=port, logs=logs, goes_on=goes_on or listen is not None)
        raise typer.Exit(_on_fleet(argv, options, devices, fleet, print_for, image, doctor, listen))
    _examine(doctor, None)
    from convoy.config.option_types import device_names, read_address
    from convoy.launch.host_job import JobOptions, memory_environment
    from convoy.launch.local import launch_local

    names = device_names(devices)
    if join is not None and len(names) > 1:
        raise InputError(f"--devices {devices} with --join: one device comes at a time; give the command once for each")
    if len(names) == 1:
        device = {} if names == ("auto",) else {"CONVOY_DEVICE": names[0]}
        _become(argv, os.environ | memory_environment(os.environ) | device)
    host = read_address(listen)[0] if listen is not None else "127.0.0.1"
    options = JobOptions(port=port, logs=logs, goes_on=goes_on or listen is not None)
    raise typer.Exit(launch_local(argv, names, options=options, host=host, command=(sys.executable,), script=True))


def _note_door(listen: str | None, join: str | None, *, others: bool, told: bool) -> None:
    """Tell the script where newcomers ask, or where to ask.

    Args:
        told: this is one process of a job, whose launcher has told a person, and hands the key on.

    Raises:
        InputError: no such address, no key, or a job that Convoy does not start.
    """
    from convoy.config.option_types import read_address

    option, text = ("--listen", listen) if listen is not None else ("--join", str(join))
    if (listen is not None and join is not None) or others:
        raise InputError(
            f"{option}: give either --listen or --join, that with one device of this machine, and without --print"
        )
    if not told and not os.environ.get(KEY_FILE):
        raise InputError(
            f"{option} without --job-key: who joins proves himself by it; make one with `convoy key FILE`, and give it on both "
            "machines"
        )
    for door in str(text).split(","):
        read_address(door)
    os.environ["CONVOY_LISTEN" if listen is not None else JOIN] = str(text)
    if listen is not None and not told:
        print(
            f"Others may join: convoy run --join {listen} --job-key FILE, with the same script and arguments",
            flush=True,
        )


def _on_fleet(
    argv: list[str], options: "JobOptions", devices: str, fleet: Path | None, print_for: str | None, image: str | None,
    doctor: bool, listen: str | None,
) -> int:  # fmt: skip
    """On every device of the hosts of a fleet file, or what starts it there; the exit status."""
    from convoy.launch.command import fleet_to_start, script_on_fleet
    from convoy.setup.command import sent_modules

    started = fleet_to_start(fleet, print_for is not None or image is not None)
    if started is None:
        raise InputError(
            f"--fleet {fleet}: its hosts have no address, so there is nothing to start by ssh: give each its `address`, or "
            "start this machine's devices with --devices"
        )
    if devices != "auto":
        raise InputError(f"--devices {devices} with --fleet: the file names the devices; leave --devices out")
    files = sent_modules(started, Path.cwd())
    _examine(doctor, fleet)
    return script_on_fleet(started, argv, options, print_for=print_for, image=image, files=files, listen=listen)


def _examine(wanted: bool, fleet: Path | None) -> None:
    """The doctor before the job, which does not begin where that finds errors."""
    if wanted:
        from convoy.doctor.command import run_doctor

        if status := run_doctor(fleet, None, 60.0):
            raise typer.Exit(status)


def _python_words(words: list[str], module: str | None) -> list[str]:
    """What follows `python`.

    Raises:
        InputError: no script, or none that is there.
    """
    if module is not None:
        return ["-m", module, *words]
    if not words:
        raise InputError(
            "nothing to run: give a script and its arguments, e.g. convoy run --devices 4 train.py --lr 0.1"
        )
    if not os.path.isfile(words[0]):
        raise InputError(
            f"the script {words[0]} is not there: give the path of a Python file; options of convoy run stand before it, those "
            "of the script after it"
        )
    return words


def _become(argv: list[str], environment: dict[str, str]) -> None:
    """Go on as that Python program, in this process."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *argv], environment)
