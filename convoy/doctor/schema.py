"""Facts about devices, links and speeds, and findings: frozen values, to and from JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from convoy.errors import MismatchError
from convoy.fleet import Device, Fleet

Severity = Literal["error", "warning", "note"]

TEXT_BYTES = 65_536
"""Longest accepted text from another process."""


@dataclass(frozen=True)
class Finding:
    """One problem or remark, with its remedy.

    Attributes:
        severity: "error": training will not run, or not right; "warning": slower, or sooner or later trouble; "note".
        what: the fact, with its values.
        cure: what to do about it.
        about: the hosts or devices it concerns, by name.
    """

    severity: Severity
    what: str
    cure: str
    about: tuple[str, ...] = ()


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and leads out of the machine.

    Attributes:
        bytes_per_s: as its driver says, if it does.
        wireless: whether it is a radio.
    """

    name: str
    addresses: tuple[str, ...]
    bytes_per_s: float | None = None
    wireless: bool = False


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Checkup:
    """What one process reports of its device and its machine. Fields that an older version does not send keep defaults.

    Attributes:
        device: its index in the job.
        devices: how many devices it believes the job has.
        host: the machine's own name.
        machine: tells two machines of one name apart.
        on: what it computes on, such as "cuda:0".
        hardware: the processor's or GPU's name.
        on_problem: why that device cannot be used, if it cannot.
        meets_at: (address or name, what it resolves to here) of the meeting point; empty alone.
        address: where the other hosts reach it; empty if there is no such address, and `address_problem` says why.
        resolves_to: the addresses behind the machine's own name; none if it is unknown.
        loopback_works: whether the machine reaches itself over TCP.
        cuda: version of CUDA that torch was built for; empty for a CPU build.
        nvidia_driver: the kernel has NVIDIA's driver, whatever torch sees.
        cores: processor cores this process may run on; `quota_cores`: processor seconds per second a control group
            grants it, if it limits them.
        threads: that torch computes with on a CPU.
        free_bytes, memory_bytes: memory of the host, free and in total. `shared_bytes`: of /dev/shm in total, if there is one.
        open_files: how many files and sockets the process may have open.
        environment: the variables that matter to training, as set.
        modes: how torch computes there, by the name of each setting.
    """

    device: int = 0
    devices: int = 1
    host: str = "?"
    machine: str = "?"
    on: str = "cpu"
    hardware: str = "?"
    on_problem: str = ""
    meets_at: tuple[str, str] = ("", "")
    address: str = ""
    address_problem: str = ""
    interfaces: tuple[Interface, ...] = ()
    resolves_to: tuple[str, ...] = ()
    loopback_works: bool = True
    python: str = "?"
    torch: str = "?"
    convoy: str = "?"
    cuda: str = ""
    nvidia_driver: bool = False
    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    quota_cores: float | None = None
    threads: int = 1
    free_bytes: int = 0
    memory_bytes: int = 0
    shared_bytes: int | None = None
    open_files: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    modes: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable_cores(self) -> float:
        return self.cores if self.quota_cores is None else min(float(self.cores), self.quota_cores)

    @property
    def example(self) -> str:
        """An address of this machine in the network, to end a sentence with; empty if it has none."""
        return f", such as {self.interfaces[0].name} with {self.interfaces[0].addresses[0]}" if self.interfaces else ""


@dataclass(frozen=True)
class Pace:
    """How fast a device computes.

    Attributes:
        samples_per_s: of a fixed convolution, forward and backward; 0 if it could not compute.
        busy_cores: how many cores of its machine other programs kept busy just before.
    """

    samples_per_s: float
    busy_cores: float = 0.0


class Reach(Enum):
    """How an attempt to connect ended."""

    OPEN = "open"
    REFUSED = "refused"
    SILENT = "silent"
    NO_ROUTE = "no route"
    STRANGER = "stranger"
    """Somebody answers there, but not the process that should."""


@dataclass(frozen=True)
class Link:
    """What one host found out about the way to another.

    Attributes:
        source, target: device indices of the two processes that tried, each the first of its host.
        at: the address and port that was tried.
        round_trip_s: median of small messages, there and back.
        ahead_s: seconds by which the target's clock is ahead of the source's.
        bytes_per_s: data from source to target, alone on the wire; 0 if none came, None where it was not tried.
    """

    source: int
    target: int
    at: str
    reach: Reach
    round_trip_s: float | None = None
    ahead_s: float | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Context:
    """What is known before any device is asked.

    Attributes:
        fleet: as its file says, if there is one.
        past_samples_per_s: of each device of the fleet when it was measured, in any one unit; empty if it was not.
        reports: what was found before any device could be asked, such as hosts that ssh does not reach.
    """

    fleet: Fleet | None = None
    past_samples_per_s: tuple[float, ...] = ()
    reports: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Examination:
    """All facts of one examination.

    Attributes:
        devices: how many the job should have.
        checkups: of those that came, in order.
        paces: by device.
        waited_s: how long absent devices were waited for.
        fleet, past_samples_per_s, reports: as in `Context`.
    """

    devices: int
    checkups: tuple[Checkup, ...]
    paces: Mapping[int, Pace] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    waited_s: float = 0.0
    fleet: Fleet | None = None
    past_samples_per_s: tuple[float, ...] = ()
    reports: tuple[Finding, ...] = ()

    @cached_property
    def job_fleet(self) -> Fleet | None:
        """The fleet of the file, if it has as many devices as the job."""
        return self.fleet if self.fleet is not None and len(self.fleet.devices) == self.devices else None

    @cached_property
    def host(self) -> dict[int, str]:
        """The host of each device: by the fleet file, else by the machine's own name, numbered where two are equal."""
        if self.job_fleet is not None:
            return {index: device.host for index, device in enumerate(self.job_fleet.devices)}
        names: dict[str, str] = {}  # by machine
        for own in self.checkups:
            short = own.host.split(".")[0]
            taken = sum(name == short or name.startswith(f"{short}#") for name in names.values())
            names.setdefault(own.machine, f"{short}#{taken + 1}" if taken else short)
        return {own.device: names[own.machine] for own in self.checkups}

    @cached_property
    def hosts(self) -> dict[str, Checkup]:
        """The first of the devices that came of each host, by the host's name; it tests the host's links."""
        first: dict[str, Checkup] = {}
        for own in self.checkups:
            first.setdefault(self.host[own.device], own)
        return first

    @cached_property
    def by_name(self) -> dict[str, Checkup]:
        """The devices that came, by name; by that of the host where there is one device only."""
        return {self.name(own.device) if self.devices > 1 else self.host[own.device]: own for own in self.checkups}

    def name(self, device: int) -> str:
        """A device as messages name it."""
        if self.job_fleet is not None:
            return f"device {device} ({self.job_fleet.devices[device].name})"
        on = next((own.on for own in self.checkups if own.device == device), None)
        return f"device {device}" if on is None else f"device {device} ({on} of {self.host[device]})"

    def described(self, own: Checkup) -> Device | None:
        """A device as the fleet file has it, if there is a file of this job."""
        return self.job_fleet.devices[own.device] if self.job_fleet else None

    @cached_property
    def ways(self) -> dict[tuple[str, str], Link]:
        """The links by the names of (source, target)."""
        return {(self.host[link.source], self.host[link.target]): link for link in self.links}

    @cached_property
    def speeds(self) -> dict[str, float]:
        """Samples/s of the devices that could compute, by name."""
        return {self.name(d): pace.samples_per_s for d, pace in self.paces.items() if pace.samples_per_s > 0}


T = TypeVar("T")

CHECKUP, PACE, LINKS, CONTEXT = (
    TypeAdapter(Checkup), TypeAdapter(Pace), TypeAdapter(list[Link]), TypeAdapter(Context),
)  # fmt: skip
"""Schemas of what travels between processes, for `to_text` and `from_text`."""


def to_text(kind: TypeAdapter[T], value: T) -> str:
    """A value as one line of JSON."""
    return kind.dump_json(value).decode()


def from_text(kind: TypeAdapter[T], text: str, sender: str) -> T:
    """Parse a value that another process sent, ignoring unknown keys.

    Raises:
        MismatchError: longer than `TEXT_BYTES`, or not such a value: another program, or a very different version.
    """
    try:
        if len(text) > TEXT_BYTES:
            raise ValueError(f"{len(text)} characters")
        return kind.validate_json(text)
    except (ValidationError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise MismatchError(
            f"{sender} answered what this convoy doctor cannot read ({reason}): run the same version everywhere"
        ) from None
