"""Facts that each device collects about itself and its machine, and the result of an examination of all devices."""

import os
import pwd
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

import psutil  # type: ignore[import-untyped]
import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn.functional import conv2d

from convoy.comm.environment import ProcessEnv, own_address
from convoy.comm.rendezvous import ProcessInfo, check_infos, own_info
from convoy.errors import InputError, MismatchError
from convoy.fleet import Device, Fleet, Host
from convoy.launch.survey import Answer, ask_one
from convoy.machine.accelerator import finish, local_devices, memory_of, pick_device
from convoy.measure.device_info import DeviceInfo, describe_device, fit, fleet_of, quota_cores

Severity = Literal["error", "warning", "note"]

SOMEWHERE = "192.0.2.1"  # a documentation address (RFC 5737) with the default route; nothing is sent to it


@dataclass(frozen=True)
class Finding:
    """A problem or remark (`what`) with its remedy (`cure`), and the names of the hosts or devices concerned (`about`).

    "error": training will fail or be wrong. "warning": it will be slower, or may fail later. "note": nothing to do.
    """

    severity: Severity
    what: str
    cure: str
    about: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeviceFacts:
    """Facts about one process's device and machine, collected without contacting another machine.

    Attributes:
        device: its index in the job.
        info, own: the device's description when it joins a job, and for `convoy measure`.
        inventory: hardware of the machine as in `convoy fleet init`; None if the shell did not answer.
        problems: (what, cure) for the requested device, its address and its home folder.
        cuda: version of CUDA that torch was built for; empty for a CPU build.
        accelerators: number of GPUs that torch sees.
        cores: number that this process may use; a fraction under a processor quota.
        free_bytes, memory_bytes: free and total memory of the device: host memory for CPUs.
        shm_bytes: (free, total) of /dev/shm, if it exists.
        open_files: limit of open files and sockets of the process; None: no limit.
    """

    device: int
    info: ProcessInfo
    own: DeviceInfo
    inventory: Answer | None = None
    problems: tuple[tuple[str, str], ...] = ()
    cuda: str = ""
    accelerators: int = 0
    cores: float = 1.0
    free_bytes: int = 0
    memory_bytes: int = 0
    shm_bytes: tuple[int, int] | None = None
    open_files: int | None = None


@dataclass(frozen=True)
class Pace:
    """A device's speed for a fixed convolution, and the cores that other programs kept busy just before."""

    samples_per_s: float
    busy_cores: float = 0.0


class Reach(Enum):
    """The result of an attempt to connect."""

    OPEN = "open"
    REFUSED = "refused"
    SILENT = "no answer"
    NO_ROUTE = "no route"


@dataclass(frozen=True)
class Way:
    """An attempt to connect from one host to another. `source` and `target` are the first device of each host."""

    source: int
    target: int
    address: str
    port: int
    reach: Reach


@dataclass(frozen=True)
class Context:
    """Input of an examination: the fleet file, and findings about hosts that ssh does not reach."""

    fleet: Fleet | None = None
    reports: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Examination:
    """All facts of one examination.

    Attributes:
        devices: number of devices of the job.
        facts: of the devices that took part, in order.
        file: the fleet file, if it has as many devices as the job.
        paces: speed by device.
        ways: attempts to connect between hosts.
        measured: the fleet of the devices that took part, with measured links; None if they were not measured.
    """

    devices: int
    facts: tuple[DeviceFacts, ...]
    file: Fleet | None = None
    paces: Mapping[int, Pace] = field(default_factory=dict)
    ways: tuple[Way, ...] = ()
    measured: Fleet | None = None
    reports: tuple[Finding, ...] = ()

    @cached_property
    def fleet(self) -> Fleet:
        """The fleet of the devices that took part, from the fleet file, or from their own descriptions."""
        if self.file is not None:
            return self.file.with_only([each.device for each in self.facts])
        return fleet_of([each.own for each in self.facts])

    @cached_property
    def host(self) -> dict[int, str]:
        """The host of each device that took part."""
        return {each.device: self.row[each.device].host for each in self.facts}

    @cached_property
    def hosts(self) -> dict[str, DeviceFacts]:
        """The facts of each host's first device, by the host's name."""
        first: dict[str, DeviceFacts] = {}
        for each in self.facts:
            first.setdefault(self.host[each.device], each)
        return first

    @cached_property
    def row(self) -> dict[int, Device]:
        """Each device's description from the fleet file, or from itself; missing devices only have one in a file."""
        present = zip((each.device for each in self.facts), self.fleet.devices, strict=True)
        return dict(present) if self.file is None else dict(enumerate(self.file.devices))

    def name(self, device: int) -> str:
        """Return a device's name in messages: "device 2 (lab1-cpu)"."""
        row = self.row.get(device)
        return f"device {device}" if row is None else f"device {device} ({row.name})"


def assemble(devices: int, facts: Sequence[DeviceFacts], context: Context) -> Examination:
    """Create an examination from the facts, with a finding if a job would refuse these devices."""
    fleet, reports = context.fleet, context.reports
    came, absent = {each.device: each.info for each in facts}, replace(facts[0].info, accelerator="")
    try:
        if fleet is not None and len(fleet.devices) != devices:
            raise InputError(
                f"the fleet file has {len(fleet.devices)} devices, this job has {devices}: start one for each"
            )
        if fleet is not None:
            fit(fleet.with_only([each.device for each in facts]), [each.own for each in facts])
        check_infos([came.get(device, absent) for device in range(devices)])
    except (InputError, MismatchError) as error:
        cure = "A job refuses to start like this. The examination ignores the names and rates of the fleet file"
        fleet, reports = None, (*reports, Finding("error", str(error), cure))
    return Examination(devices, tuple(facts), fleet, reports=reports)


T = TypeVar("T")
FACTS, PACE = TypeAdapter(DeviceFacts), TypeAdapter(Pace)
WAYS, CONTEXT = TypeAdapter(list[Way]), TypeAdapter(Context)


def from_text(kind: TypeAdapter[T], text: str, sender: str) -> T:
    """Parse a value that another process sent, ignoring unknown keys. MismatchError if it is not such a value."""
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        reason = str(error).splitlines()[0]
        raise MismatchError(
            f"{sender} sent an answer that this convoy doctor cannot read ({reason}): run the same version everywhere"
        ) from None


def collect_facts(env: ProcessEnv | None, on: str | None = None) -> DeviceFacts:
    """Collect the facts of this process. `on`: the device; None: the one that training would use."""
    device, address, problems = torch.device("cpu"), "", []
    try:
        device = pick_device(on, env.local if env else 0)
    except InputError as error:
        problems.append((str(error), "Set CONVOY_DEVICE, or leave it unset"))
    try:
        address = own_address(env.host if env else SOMEWHERE, env.port if env else 9)
    except InputError as error:
        if env is None and not os.environ.get("GLOO_SOCKET_IFNAME"):
            address = "127.0.0.1"  # a machine without a network can train alone
        else:
            problems.append((f"it has no address: {error}", "Without one, no other host can reach it"))
    if reason := home_problem(os.environ):
        cure = "Set HOME or XDG_CACHE_HOME to a writable folder"
        problems.append((f"there is no folder for keys, data sets and downloaded weights: {reason}", cure))
    inventory = ask_one(Host("here", "127.0.0.1"))
    usable = float(len(os.sched_getaffinity(0)))
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").exists() else None
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return DeviceFacts(
        env.device if env else 0,
        own_info(device, env.devices if env else 1, address),
        describe_device(device, slowdown=1.0),
        inventory if isinstance(inventory, Answer) else None,
        tuple(problems),
        torch.version.cuda or "",
        len(local_devices()) - 1,
        min(usable, quota_cores() or usable),
        *memory_of(device),
        shm_bytes=None if shm is None else (shm.free, shm.total),
        open_files=None if open_files == resource.RLIM_INFINITY else open_files,
    )


def home_problem(environment: Mapping[str, str]) -> str:
    """Return why there is no writable folder for keys and data sets; empty if there is one."""
    root = Path(environment.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        try:
            root = Path(environment.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir, ".cache")
        except KeyError:
            return f"HOME is not set, and user {os.getuid()} has no home directory in /etc/passwd"
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    return "" if os.access(nearest, os.W_OK) else f"user {os.getuid()} cannot write to {nearest}, where {root} would be"


def measure_pace(device: torch.device, slowdown: float = 1.0, seconds: float = 0.3) -> Pace:
    """Measure the busy cores, then the samples/s of a 3x3 convolution (64 to 64 channels, 32x32), forward and backward.

    The rate includes the pauses of a processor quota, and is divided by an emulated slowdown.
    """
    busy = float(psutil.cpu_percent(interval=0.2)) / 100 * (psutil.cpu_count() or 1)
    batch = 2 if device.type == "cpu" else 256  # few enough for a tenth of a core; enough to fill a GPU
    x_NCHW = torch.randn(batch, 64, 32, 32, device=device, requires_grad=True)
    w_KCRS = torch.randn(64, 64, 3, 3, device=device, requires_grad=True)

    def once() -> None:
        y_NKHW = conv2d(x_NCHW, w_KCRS, padding=1)
        torch.autograd.grad(y_NKHW, (x_NCHW, w_KCRS), torch.ones_like(y_NKHW))
        finish(device)

    once()  # warm-up: torch chooses kernels
    start_s, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - start_s < seconds:
        once()
        calls += 1
    return Pace(batch * calls / (time.perf_counter() - start_s) / slowdown, busy)
