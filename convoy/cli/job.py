"""One training as it was started on one device, and what all its devices must agree on before the first step."""

import os
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from convoy.api import Plans, make_plans
from convoy.cli.inputs import check_images, load_images
from convoy.cli.newcomer import Invitation
from convoy.comm.collectives import difference, from_first, gather
from convoy.comm.group import Group
from convoy.config.run_file import RunSettings
from convoy.config.settings import Settings, key_of
from convoy.data import Splits
from convoy.errors import MismatchError
from convoy.plan.plan import Plan
from convoy.plan.presets import AUTO, PLANS
from convoy.report.measured import remarks
from convoy.report.screen import Screen
from convoy.runlog.directory import RunDirectory, make_directory


@dataclass(frozen=True)
class Job:
    """A training on one device.

    Attributes:
        invitation: what the running job sent, if this device joins one.
    """

    run: RunSettings
    group: Group
    screen: Screen
    stack: ExitStack
    invitation: Invitation | None = None

    @property
    def settings(self) -> Settings:
        return self.run.settings

    def check_same_settings(self) -> None:
        """Compare the settings that decide what is computed.

        Raises:
            MismatchError: names the devices and the first setting that differs.
        """
        rows = gather(self.group, "settings", self.settings.decisive)
        for name in rows[0]:
            if found := difference([row[name] for row in rows]):
                raise MismatchError(
                    f"the devices were started with different options: --{key_of(name)} is {found}; start every device "
                    "with the same options"
                )

    def images(self) -> Splits:
        """Load the images.

        Raises:
            MismatchError: names the devices that have other images.
        """
        splits = load_images(self.settings)
        check_images(self.settings, splits)
        if found := difference(self.group.agree("data", splits.fingerprint)):
            raise MismatchError(
                f"the devices were given different data: {found}; copy the same files to every machine, and use one "
                "version of torchvision and Pillow"
            )
        if splits.notes:
            self.screen.lines([f"  {note}" for note in splits.notes])
        return splits

    def plans(self, model: nn.Module, example: Tensor, slowdown: float) -> Plans:
        """Return the plan and its alternatives. The devices are measured if the settings ask for it."""
        settings, group = self.settings, self.group
        if settings.plan != AUTO:
            title = "every device times the model's layers"
        elif settings.fleet is None:
            title = "the devices are measured and planned for"
        else:
            title = "the planner reads the fleet"
        about_s = settings.budget_s if settings.plan == AUTO and settings.fleet is None else None
        quick = settings.speeds is not None or group.devices == 1
        with nullcontext(lambda *_: None) if quick else self.screen.working(title, about_s) as progress:
            plans = make_plans(
                model, example, settings.pass_batch, group,
                plan=settings.plan if settings.plan in (*PLANS, AUTO) else Plan.load(Path(settings.plan)),
                speeds=settings.speeds, reduce=settings.reduce, wire=settings.wire, slowdown=slowdown,
                budget_s=settings.budget_s, fleet=settings.fleet, precision=settings.precision,
                optimizer=settings.optimizer_state, net=settings.net, micro_batches=settings.passes, progress=progress,
            )  # fmt: skip
        for remark in [] if plans.request.fleet.measured is None else remarks(plans.request.fleet.measured):
            self.screen.line(remark)
        return plans

    def devices(self) -> list[tuple[str, str, float]]:
        """Gather kind, host and slowdown of every device."""
        rows = gather(self.group, "fleet", [str(self.group.torch_device), os.uname().nodename, torch.get_num_threads()])
        return [
            (f"{device} ({threads} thread{'s' * (threads > 1)})", host, slowdown)
            for (device, host, threads), slowdown in zip(rows, self.settings.slowdowns, strict=True)
        ]

    def directory(self) -> RunDirectory | None:
        """Return where device 0 logs the run. Every device knows it, because any of them may have to continue the log."""

        if self.invitation is None:
            row = from_first(self.group, "directory of the run", lambda: paths_of(make_directory(self.settings)))
        else:
            row = self.invitation.offer["directory"]
        return None if row is None else RunDirectory(Path(row[0]), None if row[1] is None else Path(row[1]))


def paths_of(directory: RunDirectory | None) -> list[str | None] | None:
    """Return a run's log and folder as JSON holds them."""
    if directory is None:
        return None
    return [str(directory.log), None if directory.folder is None else str(directory.folder)]
