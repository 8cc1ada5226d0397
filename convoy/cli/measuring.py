"""Defines the verb measure."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from convoy.cli.options import app, in_job, option, with_settings
from convoy.comm.job_key import choose
from convoy.config.train_options import Settings
from convoy.errors import InputError
from convoy.fleet import Fleet


@app.command()
@with_settings(
    "data", "data_dir", "image_size", "net", "devices", "batch", "slowdown", "precision", "budget_s", "timeout_s", "job_key",
    "trust_network", "port", budget_s=60.0,
)  # fmt: skip
def measure(
    output: Annotated[Path, option("PATH", "Fleet file to write: devices, links, times of layers.", "--output", "-o")],
    fleet: Annotated[Path | None, option("PATH", "Fleet file to start from; see convoy train --fleet.")] = None,
    **given: Any,
) -> None:
    """Measure this fleet: layers on each device, links between hosts.

    Run it on all devices at once: here on local processes, over ssh on the hosts of a fleet file, under torchrun, srun or
    mpirun, or under convoy emulate.
    """
    from convoy.config.run_file import resolve_settings
    from convoy.launch.host_job import JobOptions

    one_of_job = in_job()
    settings = resolve_settings(None, given).settings
    options = JobOptions(port=settings.port)
    choose(settings.job_key, settings.trust_network, os.environ)
    if not one_of_job:
        from convoy.launch.fleet import start_on_fleet, startable

        if fleet is not None and (hosts := startable(fleet)) is not None:
            raise typer.Exit(start_on_fleet(hosts, sys.argv[1:], options, [fleet], given["devices"] is not None))
    if one_of_job or len(settings.device_names) == 1:
        measure_device(output, settings, fleet)
        return
    from convoy.launch.local import launch_local

    check_measure(output, settings, fleet)
    raise typer.Exit(launch_local(sys.argv[1:], settings.device_names, options=options))


def check_measure(output: Path, settings: Settings, fleet: Path | None) -> None:
    """Refuse bad input in the launcher, before it starts devices. Raises InputError, DataError."""
    from convoy.cli.train_parts import build_model, load_images
    from convoy.config.checks import check, check_output, check_places

    check(settings)
    check_places(settings)
    check_output("--output", output)
    described, count = _described(fleet), len(settings.device_names)
    if described is not None and len(described.devices) != count:
        raise InputError(f"--devices {count}, but the fleet file has {len(described.devices)}: give the same number")
    build_model(settings, load_images(settings))


def _described(path: Path | None) -> Fleet | None:
    """Return the fleet of --fleet or of `convoy emulate`, without earlier measurements."""
    from convoy.simulate.table import read_fleet_file

    path = path or (Path(named) if (named := os.environ.get("CONVOY_FLEET")) else None)
    return None if path is None else read_fleet_file(path)[0]


def measure_device(output: Path, settings: Settings, fleet: Path | None) -> None:
    """Measure as one device of a job. Device 0 prints, and replaces the output at the end."""
    from rich.console import Console

    from convoy.cli.joining import device_named
    from convoy.cli.train_parts import build_model, example_of, load_images
    from convoy.comm.environment import imposed_slowdown
    from convoy.comm.processes import join
    from convoy.config.checks import check, check_output
    from convoy.files import write_whole
    from convoy.measure.measure_job import MeasureOptions, measure_job
    from convoy.model.tracing import trace
    from convoy.report.measured import show
    from convoy.report.screen import Wait

    check(settings)
    with join(device_named(settings.device_names), timeout_s=settings.timeout_s) as group:
        if group.device == 0:
            check_output("--output", output)
        splits = load_images(settings)
        model = build_model(settings, splits)
        console = Console(quiet=group.device != 0, highlight=False)
        options = MeasureOptions(
            settings.net, _described(fleet), settings.budget_s,
            slowdown=settings.slowdowns[group.device] * imposed_slowdown(), precision=settings.precision
        )  # fmt: skip
        with Wait(console, "measuring", settings.budget_s) as progress:
            measured = measure_job(group, trace(model, example_of(splits)), model, settings.batch, options, progress)
        if group.device == 0:
            write_whole(output, measured.to_toml())
            show(measured, console)
            console.print(f"Written to {output}", soft_wrap=True)
