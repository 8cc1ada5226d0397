"""convoy train, join, leave, stop, demo."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.cli.options import PATH, SECONDS, JobKeyFile, PlanName, Print, app, in_job, loading, path_of, with_settings
from convoy.comm.job_key import KEY_FILE, choose
from convoy.errors import InputError


@app.command()
@with_settings
def train(
    run: Annotated[
        Path | None,
        typer.Argument(
            parser=path_of,
            metavar="RUN.TOML",
            help="Settings in a file: the options below, without the dashes in front.",
        ),
    ] = None,
    print_lines: Print = False,
    **given: Any,
) -> None:
    """Train a network on images: over this machine's devices, over the hosts of a fleet file by ssh, or as one process of a
    job that torchrun, srun or mpirun started.

    The numbers are those of one device: same batches, same loss curve, whatever the plan.

    Settings come from a run file (lines such as batch = 64) and from options; an option overrides the file.

    Example: convoy train --data cifar10 --data-dir D --net two-conv:150:800 --plan master --devices 4 --batch 64 --epochs 2
    """
    from convoy.config.run_file import resolve_settings

    one_of_job = in_job()
    resolved = resolve_settings(run, {name: value for name, value in given.items() if value is not None})
    choose(resolved.settings.job_key, resolved.settings.trust_network, os.environ)
    if not one_of_job and (resolved.settings.fleet is not None or print_lines):
        from convoy.launch.command import fleet_to_start, train_on_fleet

        if (fleet := fleet_to_start(resolved.settings.fleet, print_lines)) is not None:
            raise typer.Exit(train_on_fleet(resolved, fleet, print_lines))
    devices = resolved.settings.device_names
    if resolved.settings.listen is not None and not one_of_job and not os.environ.get(KEY_FILE):
        raise InputError(
            "--listen without --job-key: who joins proves himself by it; make one with `convoy key FILE`, and give it"
        )
    if not one_of_job:
        with loading():
            from convoy.config.checks import check_at_once, must_fetch

        check_at_once(resolved.settings)
        print(f"Starting {len(devices)} device{'s' * (len(devices) > 1)} ...", flush=True)
    if one_of_job or len(devices) == 1:
        with loading():
            from convoy.cli.train import run_device

        run_device(resolved)
        return
    if must_fetch(resolved.settings):
        from convoy.cli.inputs import load_images

        load_images(resolved.settings)
    from convoy.launch.host_job import JobOptions
    from convoy.launch.local import launch_local

    settings = resolved.settings
    host = "127.0.0.1" if settings.listens_at is None else settings.listens_at[0]
    options = JobOptions(port=settings.port, goes_on=settings.goes_on, silence_s=settings.timeout_s)
    raise typer.Exit(launch_local(sys.argv[1:], devices, options=options, host=host))


@app.command()
def join(
    job: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT,...",
            help="Where the job answers, as it prints it: one address of its devices, or several.",
        ),
    ],
    job_key: JobKeyFile = None,
    device: Annotated[
        str | None, typer.Option(help="What to compute on, such as cuda:0 or cpu; default: the first GPU, or the CPU.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the files of the data set, where it is another one here.", **PATH)
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints, should this device have to write them.", **PATH)
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="A PACKAGE.MODULE:CALLABLE outside of this folder that the job may name as net or data."),
    ] = None,
) -> None:
    """Come into a training that runs: one that was started with `convoy train --listen`, which prints the line.

    The settings are those of the job. The device loads the data, measures itself while the others train, and comes in between
    two steps if that is predicted to make steps faster; else it waits as a spare. The numbers stay those of one device. SIGTERM
    lets it leave after a step.

    It asks at the addresses in turn, and learns those of the other devices, so each of them may be lost while it waits.

    Example: convoy join 192.168.1.5:7000,192.168.1.6:7000 --job-key lab.key
    """
    choose(job_key, False, os.environ)
    own = {"data_dir": data_dir, "checkpoint": checkpoint}
    from convoy.cli.train import run_newcomer
    from convoy.config.option_types import read_address

    doors = [read_address(text) for text in job.split(",")]
    run_newcomer(doors, device, {name: value for name, value in own.items() if value is not None}, accept or ())


JobName = Annotated[
    str | None,
    typer.Argument(
        metavar="[JOB]",
        help="Its folder (runs/...), or the HOST:PORT where its devices met; needed where several jobs run here.",
    ),
]
Wait = Annotated[float, typer.Option(help="How long the devices may take.", **SECONDS)]


@app.command()
def leave(
    job: JobName = None,
    device: Annotated[list[int] | None, typer.Option(help="Only this device; may be given again.")] = None,
    wait: Wait = 60.0,
) -> None:
    """Let the devices of this machine leave the training that they are in, after the step: the others go on without them.

    Nothing is repeated. It finds the devices of this user here, and comes back when they have ended, so that the machine can be
    switched off. On another machine: ssh HOST convoy leave.

    Example: convoy leave && sudo poweroff
    """
    from convoy.cli.ending import leave as let_leave

    let_leave(job, device or (), wait)


@app.command()
def stop(job: JobName = None, wait: Wait = 60.0) -> None:
    """End a training on all its machines, after the step; given on any of them.

    With --checkpoint it is saved there, and `--resume` goes on from that step.

    Example: convoy stop
    """
    from convoy.cli.ending import stop as end

    end(job, wait)


DEMO_SLOWDOWN = "3,4,6,8"
"""Each of the four processes plays a machine that is so many times slower than a core of this one. Together they compute for
0.9 of every second, on two cores; their speeds add up to 2.6 times that of the fastest."""

DEMO_NET, DEMO_BATCH = "two-conv:50:500", 480
"""A step takes the fastest about 0.7 s. In smaller parts of a batch, what a step costs whatever its samples would show."""

DEMO_EPOCHS, DEMO_LR = 16, 0.05
"""About 20 s by the four and 40 s by one, a minute and a half in all. Of the test images, 93 % are right in the end."""


@app.command()
def demo(
    plan: PlanName = "data-by-speed",
    epochs: Annotated[int, typer.Option(help="Passes over the training images.")] = DEMO_EPOCHS,
) -> None:
    """Four local processes of unequal speed train one CNN on real images; then the fastest of them does alone."""
    fleet = f"--plan {plan} --devices 4 --slowdown {DEMO_SLOWDOWN}"
    training = f"--batch {DEMO_BATCH} --epochs {epochs} --lr {DEMO_LR:g} --rebalance"
    options = f"--data digits --net {DEMO_NET} {fleet} {training} --compare --page".split()
    print(f"$ convoy train {' '.join(options)}\n", flush=True)
    sys.argv[1:] = ["train", *options]
    raise typer.Exit(app(args=sys.argv[1:], standalone_mode=False) or 0)
