"""convoy measure, convoy plan, convoy emulate, convoy doctor."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.cli.options import (
    PATH,
    SECONDS,
    Batch,
    Classes,
    HelpAll,
    Image,
    Optimizer,
    Outputs,
    Print,
    SettingsCommand,
    app,
    help_of,
    image_of,
    in_job,
    loading,
    with_settings,
)
from convoy.comm.job_key import choose
from convoy.errors import InputError


@app.command(cls=SettingsCommand)
@with_settings(
    "data", "data_dir", "image_size", "net", "devices", "batch", "slowdown", "precision", "budget_s", "timeout_s", "job_key",
    "trust_network", "port", budget_s=60.0,
)  # fmt: skip
def measure(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Fleet file to write: devices, links, times of layers.", **PATH)
    ],
    fleet: Annotated[
        Path | None,
        typer.Option(help="Fleet file with what is known; hosts with addresses are started over ssh.", **PATH),
    ] = None,
    print_lines: Print = False,
    _help_all: HelpAll = False,
    **given: Any,
) -> None:
    """Measure this fleet: layers on each device, links between hosts.

    Run it on all devices at once: here on local processes, over ssh on the hosts of a fleet file, under torchrun, srun or
    mpirun, or under convoy emulate.
    """
    from convoy.config.run_file import resolve_settings

    one_of_job = in_job()
    settings = resolve_settings(None, {name: value for name, value in given.items() if value is not None}).settings
    choose(settings.job_key, settings.trust_network, os.environ)
    if not one_of_job and (fleet is not None or print_lines):
        from convoy.launch.fleet_command import fleet_to_start, measure_on_fleet

        if (hosts := fleet_to_start(fleet, print_lines)) is not None:
            named = given["devices"] is not None
            raise typer.Exit(measure_on_fleet(hosts, fleet, sys.argv[1:], named, print_lines, port=settings.port))
    with loading():
        from convoy.cli.measure import MeasureJob, run_measure

    job, known = MeasureJob(output, settings, fleet), settings.device_names
    if one_of_job or len(known) == 1:
        run_measure(job)
        return
    from convoy.launch.host_job import JobOptions
    from convoy.launch.local import launch_local

    job.check_inputs()
    raise typer.Exit(launch_local(sys.argv[1:], known, options=JobOptions(port=settings.port)))


@app.command()
def plan(
    net: Annotated[str, typer.Argument(help="Net, as of convoy train: two-conv:K1:K2, torchvision:NAME, ...")],
    fleet: Annotated[
        Path, typer.Option(help="Fleet file that `convoy measure` wrote for this net, or described.", **PATH)
    ],
    batch: Batch = 64,
    image: Image = "3,32,32",
    classes: Classes = 10,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the chosen plan to this file (JSON).", **PATH)
    ] = None,
    optimizer: Optimizer = "sgd-momentum",
    least_energy: Annotated[
        float | None,
        typer.Option(
            help="Choose the least joules per image among plans whose step takes at most this time.", **SECONDS
        ),
    ] = None,
    wire: Annotated[str, typer.Option(help=help_of("wire"))] = "exact",
    outputs: Outputs = "everywhere",
    accumulate: Annotated[
        int, typer.Option(min=1, help="Micro-batches per step, each with an equal part of the batch.")
    ] = 1,
) -> None:
    """Predict every plan on a fleet, measured or described, and choose one.

    It prints step time, efficiency, traffic, memory and joules of each plan, and what bounds it. Plans that do not fit
    a device's memory are marked, and never chosen.

    Example: convoy plan two-conv:150:800 --batch 256 --fleet fleet.toml -o plan.json
    """
    from convoy.config.checks import check_net

    check_net(net)
    with loading():
        from convoy.cli.plan import run_plan
        from convoy.cli.question import PlanQuestion

    question = PlanQuestion(net, image_of(image), classes, batch, optimizer, wire, outputs, accumulate)
    run_plan(question, fleet, output, least_energy_s=least_energy)


@app.command(context_settings={"allow_interspersed_args": False})
@app.command("rehearse", hidden=True, context_settings={"allow_interspersed_args": False})  # its name until 0.1
def emulate(
    fleet: Annotated[
        Path, typer.Argument(**PATH, help="Fleet file (TOML): hosts, their NICs, devices with their cores.")
    ],
    command: Annotated[
        list[str], typer.Argument(help="Program and arguments, run once per device; write -- before it.")
    ],
    limit_s: Annotated[
        float, typer.Option("--limit", help="Time after which the command is ended.", **SECONDS)
    ] = 3600.0,
    goes_on: Annotated[
        bool, typer.Option("--goes-on", help="Let the others continue if a device is lost, as convoy train can.")
    ] = False,
) -> None:
    """Run a command on every device of an emulated fleet (Linux, root).

    Each host becomes a network namespace with its NIC's rates (tc tbf). Each device gets its cores as a
    processor quota (cgroup) and torchrun's environment. Everything is removed afterwards, also after an interrupt.

    Example: convoy emulate benchmarks/fleets/mixed4.toml -- convoy train --plan hybrid
    """
    from convoy.emulate.run import emulate as run
    from convoy.fleet import read_fleet

    program = command[1:] if command[0] == "--" else command
    if not program:
        raise InputError("nothing to run: write a command after --, e.g. convoy emulate fleet.toml -- convoy train")
    raise typer.Exit(run(read_fleet(fleet), program, timeout_s=limit_s, fleet_path=fleet, goes_on=goes_on))


@app.command()
def doctor(
    fleet: Annotated[
        Path | None,
        typer.Option(help="Fleet file: hosts by name, and what their links and devices should do.", **PATH),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all facts and findings to this file (JSON).", **PATH)
    ] = None,
    wait: Annotated[float, typer.Option(help="Time to wait for hosts that have not come.", **SECONDS)] = 30.0,
    case: Annotated[str | None, typer.Option(hidden=True)] = None,  # of an examination that was started over ssh (JSON)
) -> None:
    """Examine this machine, or all machines of a job, before any training.

    It prints each finding with its cure. Started on every host (convoy emulate, torchrun, srun, mpirun), or over ssh with
    a fleet file whose hosts have addresses, it also tries every pair of hosts: closed ports, slow links, other versions.
    Exit status: 0 ready to train, 1 there are errors.

    Example: convoy emulate fleet.toml -- convoy doctor
    """
    from convoy.doctor.doctor import run_doctor

    in_job()
    raise typer.Exit(run_doctor(fleet, json_file, wait, case))
