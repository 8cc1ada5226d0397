"""What is known before an examination: the fleet as its file says, how it did in the past, what ssh has met."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from convoy.cost.measurement import Measurement, read_fleet_file
from convoy.doctor.facts import Finding
from convoy.fleet import Fleet


@dataclass(frozen=True)
class Case:
    """What an examination starts from.

    Attributes:
        fleet: as its file says, if there is one.
        past_samples_per_s: of each device when the fleet was measured, comparable with each other only; empty if it was not.
        reports: what was found before any device could be asked.
    """

    fleet: Fleet | None = None
    past_samples_per_s: tuple[float, ...] = ()
    reports: tuple[Finding, ...] = ()


CASE = TypeAdapter(Case)
"""For `to_text` and `from_text`: an examination over ssh takes its case along."""


def case_of(fleet_file: Path | None) -> Case:
    """The case of a fleet file; of the one that CONVOY_FLEET names (a rehearsal's) where none is given.

    Raises:
        InputError: the file cannot be read or used.
    """
    path = fleet_file or (Path(named) if (named := os.environ.get("CONVOY_FLEET")) else None)
    if path is None:
        return Case()
    fleet, measured = read_fleet_file(path)
    return Case(fleet, () if measured is None else past_samples_per_s(measured))


def past_samples_per_s(measured: Measurement) -> tuple[float, ...]:
    """How fast each device was at all that was measured on every one of them: comparable with each other only."""
    tables = [
        {
            replace(point, device="", forward_s=0.0, backward_s=0.0, spread=0.0): point.forward_s + point.backward_s
            for point in measured.layer
            if point.device == device.name
        }
        for device in measured.fleet.devices
    ]
    common = set(tables[0]).intersection(*tables[1:])
    return _speeds([sum(table[key] for key in common) for table in tables])


def _speeds(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(1 / each for each in seconds) if all(each > 0 for each in seconds) else ()
