"""How findings name devices and hosts, and who sits where."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.doctor.facts import Checkup, Examination
from convoy.fleet import Fleet

ABOUT = "{about}"
"""Stands in a finding for the names of those it is about, so that several can share it."""


@dataclass(frozen=True)
class Names:
    """Devices and hosts by the names that a person knows them by.

    Attributes:
        host: of each device that came, and of those that did not if the fleet file says it.
        on: what each device computes on, such as "cuda:0".
        first: the device that tries the links of each host: the first of those that came.
        fleet: the fleet, if it is the one of this job.
    """

    host: Mapping[int, str]
    on: Mapping[int, str]
    first: Mapping[str, int]
    fleet: Fleet | None

    def device(self, index: int) -> str:
        """A device as messages name it."""
        if self.fleet is not None:
            return f"device {index} ({self.fleet.devices[index].name})"
        if index in self.on:
            return f"device {index} ({self.on[index]} of {self.host[index]})"
        return f"device {index}"

    def on_host(self, host: str) -> tuple[int, ...]:
        return tuple(index for index, name in self.host.items() if name == host)


def names_of(examination: Examination) -> Names:
    """Names by the fleet file where it fits the job, else as the machines call themselves."""
    fleet = examination.fleet
    if fleet is not None and len(fleet.devices) == examination.devices:
        host = {index: device.host for index, device in enumerate(fleet.devices)}
    else:
        fleet, host = None, _own_names(examination.checkups)
    first: dict[str, int] = {}
    for checkup in examination.checkups:
        first.setdefault(host[checkup.device], checkup.device)
    return Names(host, {checkup.device: checkup.on for checkup in examination.checkups}, first, fleet)


def leaders(checkups: Sequence[Checkup]) -> tuple[int, ...]:
    """The first device of each machine."""
    first: dict[str, int] = {}
    for checkup in checkups:
        first.setdefault(checkup.machine, checkup.device)
    return tuple(first.values())


def _own_names(checkups: Sequence[Checkup]) -> dict[int, str]:
    names: dict[str, str] = {}  # by machine
    for checkup in checkups:
        short = checkup.host.split(".")[0]
        taken = sum(other == short or other.startswith(f"{short}#") for other in names.values())
        names.setdefault(checkup.machine, f"{short}#{taken + 1}" if taken else short)
    return {checkup.device: names[checkup.machine] for checkup in checkups}


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
