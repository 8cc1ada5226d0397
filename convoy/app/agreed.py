"""What all devices of `convoy train` must know alike: settings, data, who they are, the directory of the run, their uses."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from convoy.app.handover import Handover
from convoy.app.joining import Coming
from convoy.comm.agreement import difference, from_first, gather
from convoy.comm.group import Group
from convoy.config.settings import Settings, key_of
from convoy.data import Splits
from convoy.elastic.members import Members
from convoy.errors import MismatchError
from convoy.runlog.directory import RunDirectory, make_directory
from convoy.runlog.schema import DeviceLine
from convoy.runtime.module import Distributed


def ids_of(members: Members | None, group: Group) -> tuple[int, ...]:
    """Which of the devices that began train now."""
    generation = None if members is None else members.generation
    return tuple(range(group.devices)) if generation is None else generation.members


def directory_of(settings: Settings, group: Group, coming: Coming | None) -> RunDirectory | None:
    """Where device 0 logs the run. The others know it, too: one of them may have to go on with it."""
    if coming is not None:
        places = coming.offer["directory"]
        return None if places is None else RunDirectory(Path(places[0]), None if places[1] is None else Path(places[1]))

    def make() -> list[str | None] | None:
        made = make_directory(settings)
        return None if made is None else [str(made.log), None if made.folder is None else str(made.folder)]

    if (row := from_first(group, "directory of the run", make)) is None:
        return None
    return RunDirectory(Path(row[0]), None if row[1] is None else Path(row[1]))


def agree_on_settings(settings: Settings, group: Group) -> None:
    """Every device must have been started with the same settings, where they decide what is computed.

    Raises:
        MismatchError: names the devices and the first setting that differs.
    """
    rows = gather(group, "settings", settings.decisive)
    for name in rows[0]:
        if found := difference([row[name] for row in rows]):
            raise MismatchError(
                f"the devices were started with different options: --{key_of(name)} is {found}; start every device with the "
                "same options"
            )


def agree_on_data(splits: Splits, group: Group) -> None:
    """Every device must have loaded the same images.

    Raises:
        MismatchError: names the devices that were given other images, and what they have.
    """
    if found := difference(group.agree("data", splits.fingerprint)):
        raise MismatchError(
            f"the devices were given different data: {found}; copy the same files to every machine, and use one version of "
            "torchvision and Pillow"
        )


def devices_of(settings: Settings, group: Group) -> list[tuple[str, str, float]]:
    """Device, host and slow-down of every device."""
    rows = gather(group, "fleet", [str(group.torch_device), os.uname().nodename, torch.get_num_threads()])
    return [
        (f"{device} ({threads} thread{'s' * (threads > 1)})", host, slowdown)
        for (device, host, threads), slowdown in zip(rows, settings.slowdowns, strict=True)
    ]


def uses_of(
    here: Handover, group: Group, part: Distributed, shares: tuple[float, ...], wall_s: float, ids: Sequence[int]
) -> list[DeviceLine]:
    rows = gather(group, "use", [part.clock.compute_s, part.clock.exchange_s, sum(group.sent_bytes), wall_s])
    speeds = [here.header.speeds.devices[d] for d in ids]
    return [
        DeviceLine(
            device=ids[device], slowdown=here.header.devices[ids[device]][2], speed_share=speeds[device] / sum(speeds),
            work_share=shares[device], compute_s=compute_s, exchange_s=exchange_s, sent_bytes=sent_bytes, wall_s=device_s,
        )
        for device, (compute_s, exchange_s, sent_bytes, device_s) in enumerate(rows)
    ]  # fmt: skip
