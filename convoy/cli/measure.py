"""`convoy measure`: its options as a value, and the measuring on each device of the job."""

import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from convoy.cli.inputs import build_model, device_named, example_of, load_images
from convoy.comm.environment import imposed_slowdown
from convoy.comm.processes import join
from convoy.config.checks import check, check_devices, check_output
from convoy.config.settings import Settings
from convoy.errors import InputError
from convoy.files import write_whole
from convoy.fleet import Fleet
from convoy.measure.measure_job import MeasureOptions, measure_job
from convoy.model.tracing import trace
from convoy.report.measured import show
from convoy.report.screen import Wait
from convoy.simulate.table import read_fleet_file


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """What to measure and where to write it.

    Attributes:
        settings: as of a training; data, net, devices, batch, slowdown, precision, time limit and budget count.
        fleet: a fleet file; None: CONVOY_FLEET, which `convoy emulate` sets, or else the devices describe themselves.
    """

    output: Path
    settings: Settings
    fleet: Path | None = None

    def read_fleet(self) -> Fleet | None:
        """Return the described fleet, if there is one, without earlier measurements."""
        path = self.fleet or (Path(named) if (named := os.environ.get("CONVOY_FLEET")) else None)
        return None if path is None else read_fleet_file(path)[0]

    def check_inputs(self) -> None:
        """Refuse bad input in the launching process, once, before anything starts. InputError, DataError."""
        check(self.settings)
        check_devices(self.settings)
        check_output("--output", self.output)
        fleet, count = self.read_fleet(), len(self.settings.device_names)
        if fleet is not None and len(fleet.devices) != count:
            raise InputError(
                f"--devices {count}, but the fleet file has {len(fleet.devices)}: give --devices {len(fleet.devices)}, or "
                "another fleet"
            )
        build_model(self.settings, load_images(self.settings))


def run_measure(job: MeasureJob) -> None:
    """Measure as one device of a job. Device 0 prints, and replaces the output at the end.

    Raises:
        InputError, DataError, MismatchError, DeviceLostError: the output is then as it was before.
    """
    settings = job.settings
    check(settings)
    with join(device_named(settings.device_names), timeout_s=settings.timeout_s) as group:
        first = group.device == 0
        if first:
            check_output("--output", job.output)
        splits = load_images(settings)
        model = build_model(settings, splits)
        traced = trace(model, example_of(splits))
        console = Console(quiet=not first, highlight=False)
        slowdown = settings.slowdowns[group.device] * imposed_slowdown()
        with Wait(console, "measuring", settings.budget_s) as progress:
            options = MeasureOptions(
                settings.net, job.read_fleet(), settings.budget_s, slowdown=slowdown, precision=settings.precision
            )
            measured = measure_job(group, traced, model, settings.batch, options, progress)
        if first:
            write_whole(job.output, measured.to_toml())
            show(measured, console)
            console.print(f"Written to {job.output}", soft_wrap=True)
