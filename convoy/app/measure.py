"""`convoy measure`: its options as a value, and what each device of the job does with them."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import nn

from convoy.app.inputs import check_output, device_named, imposed_slowdown
from convoy.comm.processes import join
from convoy.config.files import write_whole
from convoy.cost.table import read_fleet_file
from convoy.data import Splits, load
from convoy.data import check as check_data
from convoy.errors import ConvoyError, InputError
from convoy.fleet import Fleet
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.profile.job import BUDGET_S, measure_job, unfinished
from convoy.report.measured import Watch, show
from convoy.runtime.precision import check_kinds


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """What to measure and where to write it. Field by field the options of `convoy measure`.

    Attributes:
        fleet: a fleet file; None: CONVOY_FLEET (a rehearsal names its file there), else the devices describe themselves.
        devices, slowdown: one per device, as for `convoy train`.
    """

    output: Path
    fleet: Path | None
    data: str
    data_dir: Path | None
    net: str
    devices: tuple[str, ...]
    batch: int
    slowdown: tuple[float, ...]
    budget_s: float = BUDGET_S
    timeout_s: float = 60.0
    image_size: int | None = None
    precision: str = "float32"

    @property
    def partial(self) -> Path:
        return self.output.with_name(f"{self.output.name}.partial")

    def check(self) -> None:
        """Refuse what can be refused before anything starts.

        Raises:
            InputError: with the value, the rule and the remedy.
        """
        check_data(self.data, self.data_dir, self.image_size)
        check_kinds(self.precision, self.devices)
        if self.batch < 1:
            raise InputError(f"--batch {self.batch}: give 1 or more")
        for name, value in (("budget", self.budget_s), ("timeout", self.timeout_s)):
            if not 0 < value < math.inf:
                raise InputError(f"--{name} {value:g}: give a number of seconds above 0")
        if len(self.slowdown) != len(self.devices) or any(not 1 <= f < math.inf for f in self.slowdown):
            raise InputError(
                f"--slowdown {','.join(f'{f:g}' for f in self.slowdown)}: give one factor of 1 or more for each of the "
                f"{len(self.devices)} devices"
            )

    def read_fleet(self) -> Fleet | None:
        """The described fleet, if there is one; what was measured of it before is left behind."""
        path = self.fleet or (Path(named) if (named := os.environ.get("CONVOY_FLEET")) else None)
        return None if path is None else read_fleet_file(path)[0]

    def images(self) -> Splits:
        return load(self.data, self.data_dir, image_size=self.image_size)

    def model(self, splits: Splits) -> nn.Module:
        return build_net(self.net, splits.train.image_shape, splits.train.classes)

    def check_inputs(self) -> None:
        """Try all inputs once, in the launching process: bad input is told once, before anything starts.

        Raises:
            InputError, DataError: as the parts say.
        """
        self.check()
        check_output("--output", self.output)
        fleet = self.read_fleet()
        if fleet is not None and len(fleet.devices) != len(self.devices):
            raise InputError(
                f"--devices {len(self.devices)}, but the fleet file has {len(fleet.devices)}: give --devices "
                f"{len(fleet.devices)}, or another fleet"
            )
        self.model(self.images())


def run_measure(job: MeasureJob) -> None:
    """What each device of a measuring job does, from joining to leaving. Device 0 prints, and replaces the output at the end.

    Raises:
        InputError, DataError, MismatchError, DeviceLostError: as the parts say; the output is then as it was before.
    """
    job.check()
    with join(device_named(job.devices), timeout_s=job.timeout_s) as group:
        first = group.device == 0
        if first:
            check_output("--output", job.output)
        splits = job.images()
        model = job.model(splits)
        traced = trace(model, splits.train[0][0][None])
        console = Console(quiet=not first, highlight=False)
        slowdown = job.slowdown[group.device] * imposed_slowdown()
        try:
            with Watch(console) as watch:
                measured = measure_job(
                    group, traced, model, job.batch, net=job.net, fleet=job.read_fleet(), budget_s=job.budget_s,
                    slowdown=slowdown, partial=job.partial, precision=job.precision, progress=watch,
                )  # fmt: skip
        except (KeyboardInterrupt, ConvoyError):
            if remark := unfinished(job.partial):
                console.print(remark, markup=False, soft_wrap=True)
            raise
        if first:
            write_whole(job.output, measured.to_toml())
            show(measured, console)
            console.print(f"Written to {job.output}", soft_wrap=True)
