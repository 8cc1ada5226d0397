"""convoy train, join, leave, stop, demo."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.cli.options import (
    PATH,
    SECONDS,
    HelpAll,
    JobKeyFile,
    Print,
    SettingsCommand,
    app,
    help_of,
    in_job,
    loading,
    path_of,
    with_settings,
)
from convoy.comm.job_key import KEY_FILE, choose
from convoy.errors import InputError


@app.command(cls=SettingsCommand)
@with_settings()
def train(
    run: Annotated[
        Path | None,
        typer.Argument(parser=path_of, metavar="RUN.TOML", help="Settings in a file: options without the dashes."),
    ] = None,
    print_lines: Print = False,
    _help_all: HelpAll = False,
    **given: Any,
) -> None:
    """Train a network on images, with the numbers of one device.

    It uses this machine's devices, the hosts of a fleet file, or runs as one process of a job that torchrun, srun or mpirun
    started. Options override the run file.

    Example: convoy train --data cifar10 --net two-conv:150:800 --plan master --devices 4 --epochs 2
    """
    from convoy.config.run_file import resolve_settings

    one_of_job = in_job()
    resolved = resolve_settings(run, {name: value for name, value in given.items() if value is not None})
    settings = resolved.settings
    choose(settings.job_key, settings.trust_network, os.environ)
    if not one_of_job and (settings.fleet is not None or print_lines):
        from convoy.launch.fleet_command import fleet_to_start, train_on_fleet

        if (fleet := fleet_to_start(settings.fleet, print_lines)) is not None:
            raise typer.Exit(train_on_fleet(resolved, fleet, print_lines))
    devices = settings.device_names
    if settings.listen is not None and not one_of_job and not os.environ.get(KEY_FILE):
        raise InputError(
            "--listen without --job-key: joining devices prove themselves by it; make one with `convoy fleet key FILE`, and "
            "give it here"
        )
    if not one_of_job:
        with loading():
            from convoy.config.checks import check_at_once

        check_at_once(settings)
        print(f"Starting {len(devices)} device{'s' * (len(devices) > 1)} ...", flush=True)
    if one_of_job or len(devices) == 1:
        with loading():
            from convoy.cli.train import run_device

        run_device(resolved)
        return
    from convoy.config.checks import must_fetch
    from convoy.launch.host_job import JobOptions
    from convoy.launch.local import launch_local

    if must_fetch(settings):
        from convoy.cli.inputs import load_images

        load_images(settings)
    host = "127.0.0.1" if settings.listens_at is None else settings.listens_at[0]
    options = JobOptions(port=settings.port, goes_on=settings.goes_on, silence_s=settings.timeout_s)
    raise typer.Exit(launch_local(sys.argv[1:], devices, options=options, host=host))


@app.command()
def join(
    job: Annotated[
        str, typer.Argument(metavar="HOST:PORT,...", help="Addresses of the job's devices, as the job prints them.")
    ],
    job_key: JobKeyFile = None,
    device: Annotated[
        str | None, typer.Option(help="Device to compute on: cuda:0 or cpu; default: the first GPU, or the CPU.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data set, if it is another one here.", **PATH)
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints, if this device has to write them.", **PATH)
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="A PACKAGE.MODULE:CALLABLE outside of this folder that the job may name as net or data."),
    ] = None,
) -> None:
    """Join a running training.

    The training was started with `convoy train --listen`, which prints the line to use, and its settings count. This device
    loads the data and measures itself while the others train. It is admitted between two steps if steps are predicted to become
    faster; otherwise it waits as a spare. The numbers stay those of one device. SIGTERM lets it leave after a step.

    Example: convoy join 192.168.1.5:7000,192.168.1.6:7000 --job-key lab.key
    """
    choose(job_key, False, os.environ)
    from convoy.cli.train import run_newcomer
    from convoy.config.option_types import read_address

    own = {"data_dir": data_dir, "checkpoint": checkpoint}
    addresses = [read_address(text) for text in job.split(",")]
    run_newcomer(addresses, device, {name: value for name, value in own.items() if value is not None}, accept or ())


JobName = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="Its folder (runs/...) or HOST:PORT; needed if several jobs run here."),
]
Wait = Annotated[float, typer.Option(help="How long the devices may take.", **SECONDS)]


@app.command()
def leave(
    job: JobName = None,
    device: Annotated[list[int] | None, typer.Option(help="Only this device; may be repeated.")] = None,
    wait: Wait = 60.0,
) -> None:
    """Remove this machine's devices from a running job after the current step. The others continue.

    It finds this user's devices here, and returns when they have ended: then the machine can be switched off. On another
    machine: ssh HOST convoy leave.

    Example: convoy leave && sudo poweroff
    """
    from convoy.cli.ending import leave as leave_job

    leave_job(job, device or (), wait)


@app.command()
def stop(job: JobName = None, wait: Wait = 60.0) -> None:
    """End a training on all its machines after the current step.

    Run it on any of them. With --checkpoint the training is saved, and `--resume` continues from that step.

    Example: convoy stop
    """
    from convoy.cli.ending import stop as stop_job

    stop_job(job, wait)


# Each process plays a machine that is this many times slower than a core of this one. Together the four compute for 0.9 of
# every second on two cores. Their speeds add up to 2.6 times that of the fastest; a step takes that one about 0.7 s.
DEMO_SLOWDOWN = "3,4,6,8"
DEMO_EPOCHS = 16  # about 20 s by the four and 40 s by one; 93 % of the test images are right in the end


@app.command()
def demo(
    plan: Annotated[str, typer.Option(help=help_of("plan"))] = "data-by-speed",
    epochs: Annotated[int, typer.Option(help=help_of("epochs"))] = DEMO_EPOCHS,
) -> None:
    """Train one CNN on four local processes of unequal speed, then on the fastest of them alone."""
    fleet = f"--plan {plan} --devices 4 --slowdown {DEMO_SLOWDOWN}"
    training = f"--batch 480 --epochs {epochs} --lr 0.05 --rebalance --compare --page"
    options = f"--data digits --net two-conv:50:500 {fleet} {training}".split()
    print(f"$ convoy train {' '.join(options)}\n", flush=True)
    sys.argv[1:] = ["train", *options]
    raise typer.Exit(app(args=sys.argv[1:], standalone_mode=False) or 0)
