"""Limits devices' cores with CPU quotas of control groups (version 1 or 2), and runs system tools such as ip and tc."""

import errno
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from convoy.errors import InputError

_CALL_LIMIT_S = 10.0

_PACKAGES = {
    "ip": "iproute2 (apt install iproute2; dnf install iproute)",
    "tc": "iproute2 (apt install iproute2; dnf install iproute-tc)",
    "sh": "a POSIX shell",
}

# A short period spreads the pauses evenly over a training step. The kernel takes quotas of 1 ms or more only.
_PERIOD_US = 10_000
_LEAST_QUOTA_US = 1_000
_LONGEST_PERIOD_US = 1_000_000
_END_LIMIT_S = 5.0
_POLL_S = 0.01

_NAME = re.compile(r"convoy-(\d+)-(\d+)(?:-.+)?")


def find(program: str) -> str:
    """Return the full path of a program.

    Raises:
        InputError: the program is missing; the message names its package.
    """
    # Root's PATH lacks the sbin folders under some su and cron set-ups.
    path = shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if path is None:
        raise InputError(
            f"program {program!r} is not on this machine, and an emulated fleet needs it: install {_PACKAGES[program]}"
        )
    return path


def call(program: str, *arguments: str) -> str:
    """Run a program and return its output.

    Raises:
        InputError: it failed (the message contains its error output), or took longer than ten seconds.
    """
    line = " ".join((program, *arguments))
    try:
        # A separate session: Ctrl-C reaches only this process, which then cleans up after the program.
        done = subprocess.run(
            [find(program), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CALL_LIMIT_S,
            start_new_session=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise InputError(f"`{line}` took more than {_CALL_LIMIT_S:g} s: try again on a calmer machine") from error
    if done.returncode != 0:
        reason = done.stderr.strip().rstrip(".")
        raise InputError(
            f"`{line}` ended with status {done.returncode}: {reason or 'no message'}. An emulated fleet needs a "
            "kernel with network namespaces, veth, bridge, tbf and control groups, and the right to change them; "
            "in a container, start it privileged"
        )
    return done.stdout


@dataclass(frozen=True)
class RunName:
    """The name of one run, `convoy-<pid>-<started>`. Names of its resources begin with it, so that leftovers can be found.

    Attributes:
        pid: id of the emulating process.
        started: when that process started, in clock ticks after boot. Process ids are reused; this pair is not.
    """

    pid: int
    started: int

    @classmethod
    def mine(cls) -> "RunName":
        """Return the name of this process's run."""
        started = _started(os.getpid())
        assert started is not None, "this process is alive"
        return cls(os.getpid(), started)

    @classmethod
    def parse(cls, name: str) -> "RunName | None":
        """Return the run that a namespace or control group belongs to, by its name; None if it belongs to no run."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2])) if found else None

    def __str__(self) -> str:
        return f"convoy-{self.pid}-{self.started}"

    def of(self, part: str) -> str:
        """Return the name of one of the run's resources."""
        return f"{self}-{part}"

    def alive(self) -> bool:
        """Return whether the process of this run is alive."""
        return _started(self.pid) == self.started


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses and may hold blanks; state is field 3, start time field 22.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


# --- control groups ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuController:
    """The mount point of the kernel's cpu controller, and its version."""

    version: Literal[1, 2]
    root: Path


def cpu_controller(mounts: str | None = None) -> CpuController:
    """Return the mounted cpu controller.

    Args:
        mounts: text in the format of /proc/mounts; None: read /proc/mounts.

    Raises:
        InputError: no controller is mounted.
    """
    for line in (Path("/proc/mounts").read_text() if mounts is None else mounts).splitlines():
        _, mount_point, kind, options, *_ = line.split()
        root = Path(mount_point.replace("\\040", " "))
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuController(1, root)
        with suppress(OSError):
            if kind == "cgroup2" and "cpu" in (root / "cgroup.controllers").read_text().split():
                return CpuController(2, root)
    raise InputError(
        "no cpu controller for control groups is mounted, and an emulated fleet limits cores with it: mount one "
        "(mount -t cgroup2 none /sys/fs/cgroup); the kernel needs CONFIG_CGROUP_SCHED and CONFIG_CFS_BANDWIDTH"
    )


def quota_us(cores: float) -> tuple[int, int]:
    """Return the quota that makes a group run like `cores` cores: microseconds of processor time, and of the period.

    Raises:
        InputError: `cores` is below 0.001.
    """
    period_us = max(_PERIOD_US, math.ceil(_LEAST_QUOTA_US / cores))
    if period_us > _LONGEST_PERIOD_US:
        raise InputError(f"cores = {cores}: the smallest quota is 0.001 cores; give the device more")
    return max(_LEAST_QUOTA_US, round(cores * period_us)), period_us


@contextmanager
def groups(controller: CpuController, run: RunName, cores: Sequence[float | None]) -> Iterator[list[Path]]:
    """Make a control group for each device, in order, limited to these cores (None: no limit).

    On exit, kill every process in the groups and remove them.
    """
    quotas = [None if each is None else quota_us(each) for each in cores]
    parent = controller.root / str(run)
    try:
        parent.mkdir()
    except FileExistsError as error:
        raise InputError(
            f"{parent} exists: a process emulates one fleet at a time; wait for the other to end"
        ) from error
    except OSError as error:
        raise InputError(
            f"{parent} cannot be made ({error.strerror}): an emulated fleet needs control groups that it may write; "
            "run it outside the container, or start the container privileged"
        ) from error
    try:
        paths = [parent / str(index) for index in range(len(quotas))]
        if controller.version == 2:
            for group in (controller.root, parent):
                switch = group / "cgroup.subtree_control"
                if "cpu" not in switch.read_text().split():
                    _write(switch, "+cpu")
        for path, limit in zip(paths, quotas, strict=True):
            path.mkdir()
            if limit is not None and controller.version == 2:
                _write(path / "cpu.max", f"{limit[0]} {limit[1]}")
            elif limit is not None:
                _write(path / "cpu.cfs_period_us", str(limit[1]))
                _write(path / "cpu.cfs_quota_us", str(limit[0]))
        yield paths
    finally:
        remove(parent)


def _write(file: Path, text: str) -> None:
    try:
        # "r+" does not create a file: if the kernel lacks it, that is an error.
        with file.open("r+") as opened:
            opened.write(text)
    except OSError as error:
        raise InputError(
            f"{text!r} cannot be written to {file} ({error.strerror}): an emulated fleet needs a kernel with CPU quotas "
            "(CONFIG_CFS_BANDWIDTH) and control groups that it may change; in a container, start it privileged and with "
            "the host's control groups (docker run --privileged --cgroupns=host)"
        ) from error


def entrance(group: Path) -> Path:
    """Return the file to which a process writes its id to join a group."""
    return group / "cgroup.procs"


def members(group: Path) -> list[int]:
    """Return the ids of the processes in a group; none if the group is gone."""
    try:
        # Id 0 means a process of another pid namespace; kill(0) would kill this process's own group.
        return [pid for pid in map(int, entrance(group).read_text().split()) if pid > 0]
    except OSError:
        return []


def remove(parent: Path) -> None:
    """Kill every process in the groups under `parent`, and remove them and `parent`.

    Raises:
        InputError: a group is still in use after 5 s.
    """
    limit_s = time.monotonic() + _END_LIMIT_S
    try:
        children = [path for path in parent.iterdir() if path.is_dir()]
    except FileNotFoundError:  # another run that starts now removes the same orphans
        return
    for group in (*children, parent):
        while not _removed(group):
            if time.monotonic() > limit_s:
                raise InputError(
                    f"{group} is still in use after {_END_LIMIT_S:g} s by processes {members(group)}: "
                    "end them, then run convoy emulate again, which removes it"
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
