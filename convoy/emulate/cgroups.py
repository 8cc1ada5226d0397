"""A device's cores as the CPU quota of a control group, version 1 or 2, whichever this machine has."""

import errno
import math
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from convoy.emulate.machine import RunName, call
from convoy.errors import InputError

_MEMBERS = "cgroup.procs"
# A short period spreads the pauses evenly over a training step. The kernel takes quotas of 1 ms or more only.
_PERIOD_US = 10_000
_LEAST_QUOTA_US = 1_000
_LONGEST_PERIOD_US = 1_000_000
_END_LIMIT_S = 5.0
_POLL_S = 0.01


@dataclass(frozen=True)
class CpuController:
    """Where the kernel's cpu controller is mounted, and which of its two interfaces it speaks."""

    version: Literal[1, 2]
    root: Path


@dataclass(frozen=True)
class Quota:
    """`quota_us` of processor time in each period of `period_us`."""

    quota_us: int
    period_us: int


def quota(cores: float) -> Quota:
    """The quota that makes a group run like `cores` cores. InputError below a thousandth of a core."""
    period_us = max(_PERIOD_US, math.ceil(_LEAST_QUOTA_US / cores))
    if period_us > _LONGEST_PERIOD_US:
        raise InputError(f"cores = {cores}: the smallest quota is 0.001 cores; give the device more")
    return Quota(max(_LEAST_QUOTA_US, round(cores * period_us)), period_us)


def mounted_controller(mounts: str) -> CpuController | None:
    """The cpu controller among the mounts of a text like /proc/mounts; None if none of them has it."""
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split()
        root = Path(place.replace("\\040", " "))
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuController(1, root)
        if kind == "cgroup2" and _offers_cpu(root):
            return CpuController(2, root)
    return None


@contextmanager
def cpu_controller(run: RunName, mounts: str | None = None) -> Iterator[CpuController]:
    """The mounted cpu controller, or one mounted in a private folder for as long as the context lasts.

    Raises:
        InputError: this kernel has no cpu controller, or it cannot be mounted.
    """
    found = mounted_controller(Path("/proc/mounts").read_text() if mounts is None else mounts)
    if found is not None:
        yield found
        return
    folder = Path(tempfile.gettempdir(), run.of("cgroup"))
    folder.mkdir()
    try:
        controller = _mount(folder, Path("/proc/cgroups").read_text())
        try:
            yield controller
        finally:
            call("umount", str(folder))
    finally:
        folder.rmdir()


@contextmanager
def groups(controller: CpuController, run: RunName, cores: Sequence[float | None]) -> Iterator[list[Path]]:
    """One group for each device, with its quota (None: no limit), in order.

    When the context ends, every process in them is killed and the groups are removed.
    """
    quotas = [None if each is None else quota(each) for each in cores]
    parent = controller.root / str(run)
    try:
        parent.mkdir()
    except FileExistsError as error:
        raise InputError(
            f"{parent} exists: a process runs one rehearsal at a time; wait for the other to end"
        ) from error
    except OSError as error:
        raise InputError(
            f"{parent} cannot be made ({error.strerror}): a rehearsal needs control groups it may write; "
            "run it outside the container, or start the container privileged"
        ) from error
    try:
        paths = [parent / str(index) for index in range(len(quotas))]
        if controller.version == 2:
            _delegate_cpu(controller.root, parent)
        for path, limit in zip(paths, quotas, strict=True):
            path.mkdir()
            if limit is not None:
                _limit(controller, path, limit)
        yield paths
    finally:
        remove(parent)


def run_like(cores: float, proc: Path = Path("/proc/self")) -> None:
    """In a rehearsal: the device that this process plays has so many cores from now on.

    Raises:
        InputError: this process is in no group with a quota of its own.
    """
    # A process that has entered a network namespace no longer sees where the controllers were mounted.
    with cpu_controller(RunName.mine()) as controller:
        rows = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        found = (
            path for _, names, path in rows if (names == "" if controller.version == 2 else "cpu" in names.split(","))
        )
        path = next(found, "").strip("/")
        if not path:
            raise InputError("this process plays no device with cores of its own: start it under `convoy emulate`")
        _limit(controller, controller.root / path, quota(cores))
    os.environ["CONVOY_CPU_QUOTA"] = repr(cores)


def entrance(group: Path) -> Path:
    """The file that a process writes its id to, to join a group."""
    return group / _MEMBERS


def members(group: Path) -> list[int]:
    """Process ids in a group; none if the group is gone."""
    try:
        # Id 0 stands for a process of another pid namespace; as a target of kill it would mean ourselves.
        return [pid for pid in map(int, entrance(group).read_text().split()) if pid > 0]
    except OSError:
        return []


def remove(parent: Path) -> None:
    """Kill every process in the groups under `parent`, remove them and `parent`. InputError if that takes 5 s."""
    limit_s = time.monotonic() + _END_LIMIT_S
    try:
        children = [path for path in parent.iterdir() if path.is_dir()]
    except FileNotFoundError:  # another rehearsal that starts just now removes the same orphans
        return
    for group in (*children, parent):
        while not _removed(group):
            if time.monotonic() > limit_s:
                raise InputError(
                    f"{group} is still in use after {_END_LIMIT_S:g} s by processes {members(group)}: "
                    "end them, then rehearse again, which removes it"
                )
            for pid in members(group):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def _offers_cpu(root: Path) -> bool:
    try:
        return "cpu" in (root / "cgroup.controllers").read_text().split()
    except OSError:
        return False


def _mount(folder: Path, controllers: str) -> CpuController:
    """Mount the hierarchy that a text like /proc/cgroups assigns the cpu controller to."""
    rows = [line.split() for line in controllers.splitlines() if not line.startswith("#")]
    hierarchies = {name: hierarchy for name, hierarchy, *_ in rows}
    mine = hierarchies.get("cpu", "0")
    if mine != "0":
        # Controllers that share a version 1 hierarchy can only be mounted together.
        together = [name for name, hierarchy in hierarchies.items() if hierarchy == mine]
        call("mount", "-t", "cgroup", "-o", ",".join(together), "cgroup", str(folder))
        return CpuController(1, folder)
    call("mount", "-t", "cgroup2", "cgroup2", str(folder))
    if not _offers_cpu(folder):
        call("umount", str(folder))
        raise InputError(
            "this kernel has no cpu controller for control groups, which a rehearsal limits cores with: "
            "use a kernel built with CONFIG_CGROUP_SCHED and CONFIG_CFS_BANDWIDTH"
        )
    return CpuController(2, folder)


def _delegate_cpu(root: Path, parent: Path) -> None:
    """Version 2: let the groups under `parent` have the cpu controller."""
    for group in (root, parent):
        switch = group / "cgroup.subtree_control"
        if "cpu" not in switch.read_text().split():
            _write(switch, "+cpu")


def _limit(controller: CpuController, group: Path, limit: Quota) -> None:
    if controller.version == 2:
        _write(group / "cpu.max", f"{limit.quota_us} {limit.period_us}")
    else:
        _write(group / "cpu.cfs_period_us", str(limit.period_us))
        _write(group / "cpu.cfs_quota_us", str(limit.quota_us))


def _write(file: Path, text: str) -> None:
    try:
        # Opened without creating: a file the kernel does not offer is an error, not a new file.
        with file.open("r+") as opened:
            opened.write(text)
    except OSError as error:
        raise InputError(
            f"{text!r} cannot be written to {file} ({error.strerror}): a rehearsal needs a kernel with CPU quotas "
            "(CONFIG_CFS_BANDWIDTH) and control groups it may change; in a container, start it "
            "privileged and with the host's control groups (docker run --privileged --cgroupns=host)"
        ) from error
