"""What an examination finds out, and what it may tell: frozen values, to and from JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from convoy.errors import MismatchError
from convoy.fleet import Fleet

Severity = Literal["error", "warning", "note"]

TEXT_BYTES = 65_536
"""No text from another process is longer."""


@dataclass(frozen=True)
class Finding:
    """One thing worth telling.

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
        wireless: it is a radio.
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
    """What one process says about its device and the machine under it. Older versions leave out what they do not know.

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

    @property
    def usable_cores(self) -> float:
        return self.cores if self.quota_cores is None else min(float(self.cores), self.quota_cores)


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
class Examination:
    """All facts of one examination.

    Attributes:
        devices: how many the job should have.
        checkups: of those that came, in order.
        paces: by device.
        waited_s: how long those that did not come were waited for.
        fleet: as its file says, if there is one.
        past_samples_per_s: of each device of the fleet when it was measured, in whatever unit; empty if it was not.
        reports: what was found before any device could be asked, such as hosts that ssh does not reach.
    """

    devices: int
    checkups: tuple[Checkup, ...]
    paces: Mapping[int, Pace] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    waited_s: float = 0.0
    fleet: Fleet | None = None
    past_samples_per_s: tuple[float, ...] = ()
    reports: tuple[Finding, ...] = ()


T = TypeVar("T")

CHECKUP, PACE, LINKS = TypeAdapter(Checkup), TypeAdapter(Pace), TypeAdapter(list[Link])
"""What travels between devices, for `to_text` and `from_text`."""


def to_text(kind: TypeAdapter[T], value: T) -> str:
    """A value as one line of JSON."""
    return kind.dump_json(value).decode()


def from_text(kind: TypeAdapter[T], text: str, sender: str) -> T:
    """The value that another process sent; keys that this version does not know are left out.

    Raises:
        MismatchError: too long, or not such a value: another program, or a very different version.
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
