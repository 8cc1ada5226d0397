"""convoy measure, convoy plan, convoy rehearse, convoy doctor."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from convoy.cli.options import (
    PATH,
    SECONDS,
    Batch,
    Classes,
    Data,
    DataDir,
    Devices,
    Image,
    ImageSize,
    JobKeyFile,
    Net,
    Optimizer,
    Outputs,
    Port,
    Precision,
    Print,
    Slowdown,
    Timeout,
    TrustNetwork,
    app,
    image_of,
    in_job,
    loading,
)
from convoy.comm.job_key import choose
from convoy.config.settings import FIELDS
from convoy.errors import InputError


@app.command()
def measure(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Fleet file to write: devices, links, times of layers.", **PATH)
    ],
    fleet: Annotated[
        Path | None,
        typer.Option(
            help="Fleet file with what is known; default: what the devices say. If its hosts have addresses, they are "
            "started over ssh.",
            **PATH,
        ),
    ] = None,
    data: Data = "digits",
    data_dir: DataDir = None,
    image_size: ImageSize = None,
    net: Net = "two-conv:50:500",
    devices: Devices = FIELDS["devices"].default,
    batch: Batch = 64,
    slowdown: Slowdown = None,
    precision: Precision = FIELDS["precision"].default,
    budget: Annotated[float, typer.Option(help="About the seconds that measuring may take.", **SECONDS)] = 60.0,
    timeout: Timeout = 60.0,
    job_key: JobKeyFile = None,
    trust_network: TrustNetwork = False,
    port: Port = None,
    print_lines: Print = False,
) -> None:
    """Measure this fleet: a model's layers on each device, latency and bandwidth between hosts, what traffic costs.

    Run it on all devices at once: here over local processes, over the hosts of a fleet file by ssh, under torchrun, srun or
    mpirun, or under convoy rehearse.
    """
    with loading():
        from convoy.cli.measure import MeasureJob, run_measure
    from convoy.config.run_file import resolve_settings

    one_of_job = in_job()
    choose(job_key, trust_network, os.environ)
    if not one_of_job and (fleet is not None or print_lines):
        from convoy.launch.command import fleet_to_start, measure_on_fleet

        if (hosts := fleet_to_start(fleet, print_lines)) is not None:
            named = devices != FIELDS["devices"].default
            raise typer.Exit(measure_on_fleet(hosts, fleet, sys.argv[1:], named, print_lines, port=port))
    given = {
        "data": data, "data_dir": data_dir, "image_size": image_size, "net": net, "devices": devices, "batch": batch,
        "slowdown": slowdown, "precision": precision, "budget_s": budget, "timeout_s": timeout,
    }  # fmt: skip
    settings = resolve_settings(None, {name: value for name, value in given.items() if value is not None}).settings
    job, known = MeasureJob(output, settings, fleet), settings.device_names
    if one_of_job or len(known) == 1:
        run_measure(job)
        return
    from convoy.launch.host_job import JobOptions
    from convoy.launch.local import launch_local

    job.check_inputs()
    raise typer.Exit(launch_local(sys.argv[1:], known, options=JobOptions(port=port)))


@app.command()
def plan(
    net: Annotated[str, typer.Argument(help="two-conv:K1:K2, alexnet:F, resnet:DEPTH:WIDTH.")],
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
            help="Choose the least joules per image among the plans whose step takes at most so many seconds.",
            **SECONDS,
        ),
    ] = None,
    wire: Annotated[
        str,
        typer.Option(help="In which numbers activations and gradients travel: exact, or inexact-bf16 (short: bf16)."),
    ] = "exact",
    outputs: Outputs = "everywhere",
    accumulate: Annotated[
        str,
        typer.Option(
            help="Passes that make one step, each with an equal part of the batch; auto: one, or as many as memory asks for."
        ),
    ] = "1",
) -> None:
    """Predict every plan on a fleet, measured or described, and choose: step time, share of the limit, traffic, memory, joules,
    what bounds it. Plans that do not fit a device's memory are marked, and never chosen.

    Example: convoy plan two-conv:150:800 --batch 256 --fleet fleet.toml -o plan.json
    """
    with loading():
        from convoy.cli.plan import run_plan

    run_plan(
        net,
        image_of(image),
        classes,
        batch,
        fleet,
        output,
        optimizer=optimizer,
        least_energy_s=least_energy,
        wire=wire,
        outputs=outputs,
        accumulate=accumulate,
    )


@app.command(context_settings={"allow_interspersed_args": False})
def rehearse(
    fleet: Annotated[
        Path, typer.Argument(**PATH, help="Fleet file (TOML): hosts, their cards, devices with their cores.")
    ],
    command: Annotated[
        list[str], typer.Argument(help="Program and arguments, run once per device; write -- before it.")
    ],
    limit_s: Annotated[
        float, typer.Option("--limit", help="Seconds after which the command is ended.", **SECONDS)
    ] = 3600.0,
    goes_on: Annotated[
        bool, typer.Option("--goes-on", help="Let the others go on when a device is lost, as convoy train can.")
    ] = False,
) -> None:
    """Run a command on every device of a fleet that is emulated on this machine (Linux, root).

    Each host gets a network namespace with its card's rates (tc tbf), each device its cores as a processor quota (cgroup) and
    torchrun's environment. Everything is removed afterwards, also after an interrupt.

    Example: convoy rehearse benchmarks/fleets/mixed4.toml -- convoy train --plan hybrid
    """
    from convoy.emulate import rehearse as run
    from convoy.fleet import read_fleet

    program = command[1:] if command[0] == "--" else command
    if not program:
        raise InputError("nothing to run: write a command after --, e.g. convoy rehearse fleet.toml -- convoy train")
    raise typer.Exit(run(read_fleet(fleet), program, timeout_s=limit_s, fleet_path=fleet, goes_on=goes_on))


@app.command()
def doctor(
    fleet: Annotated[
        Path | None,
        typer.Option(
            help="Fleet file: the hosts by name, and what their links and devices should do. Hosts with an address are "
            "visited by ssh.",
            **PATH,
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all facts and findings to this file (JSON).", **PATH)
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for hosts that have not come.", **SECONDS)] = 30.0,
    case: Annotated[
        str | None, typer.Option(hidden=True, help="The context of an examination that was started over ssh (JSON).")
    ] = None,
) -> None:
    """Examine this machine, or all machines of a job, before any training; print each finding with its cure.

    Alone it examines this machine. Started on every host (convoy rehearse, torchrun, srun, mpirun), or with a fleet file whose
    hosts have addresses (by ssh), it also tries every pair of hosts: closed ports, slow links, other versions.
    Exit status: 0 ready to train, 1 there are errors.

    Example: convoy rehearse fleet.toml -- convoy doctor
    """
    from convoy.doctor.command import run_doctor

    in_job()
    raise typer.Exit(run_doctor(fleet, json_file, wait, case))
