"""List the processes of this user's jobs on this machine, one file per process, for `convoy leave` and `stop`.

The operating system protects the list: only the user can read its folder, and only the same user may send signals to a
process. The row of a killed process is removed at the next read.
"""

import atexit
import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from convoy.errors import InputError

SHARED = Path("/tmp")  # folder in which no user can remove or rename another user's folder


@dataclass(frozen=True, slots=True)
class JobProcess:
    """One process of a job."""

    job: str  # HOST:PORT of the first rendezvous; for a job of one device, its process
    pid: int
    began: float  # the process's start time, because the system reuses pids
    network: int  # the network namespace, which distinguishes emulated hosts
    device: int  # its id in the job
    kind: str  # the torch device
    members: tuple[int, ...] = ()  # ids of all training devices; empty until it accepts requests between steps
    run: str = ""  # the run's folder; empty if the run is not logged, or its folder not known yet
    step_s: float = 0.0  # its longest step, if longer than some seconds

    def is_named(self, name: str) -> bool:
        return name in (self.job, self.run, Path(self.run).name) or (
            bool(self.run) and Path(name).absolute() == Path(self.run).absolute()
        )


def enter(job: str, device: int, kind: str) -> None:
    """Write this process's row, and remove it when the process ends."""
    global _mine
    pid = os.getpid()
    with suppress(OSError, InputError, psutil.Error):
        if _mine is None or _mine.pid != pid:
            atexit.register(_remove, pid)
        _mine = JobProcess(job, pid, _began(pid), _network(), device, kind)
        _write(_mine)
        rows()  # removes the rows of killed processes


def update(**changes: Any) -> None:
    """Change this process's row, if it has one."""
    global _mine
    if _mine is not None and _mine.pid == os.getpid():
        _mine = replace(_mine, **changes)
        with suppress(OSError, InputError):
            _write(_mine)


def job() -> str:
    """Return the job of this process; empty without a row."""
    return "" if _mine is None else _mine.job


def rows() -> list[JobProcess]:
    """Return the rows of this user's running processes on this machine, sorted by job and device."""
    found = []
    for path in _folder().glob("*.json"):
        row, runs = _read(path), False
        with suppress(psutil.Error, OSError):
            runs = row is not None and _began(row.pid) == row.began
            runs = runs and row is not None and psutil.Process(row.pid).status() != psutil.STATUS_ZOMBIE
        if row is None or not runs:
            with suppress(OSError):
                path.unlink()
        elif row.network == _network():
            found.append(row)
    return sorted(found, key=lambda row: (row.job, row.device))


def of_processes(pids: Sequence[int]) -> list[JobProcess | None]:
    with suppress(InputError):
        return [_read(_folder() / f"{pid}.json") for pid in pids]
    return [None for _ in pids]


_mine: JobProcess | None = None


def _remove(pid: int) -> None:
    if pid == os.getpid():  # not in a forked process
        with suppress(OSError, InputError):
            (_folder() / f"{pid}.json").unlink()


def _write(row: JobProcess) -> None:
    path = _folder() / f"{row.pid}.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(row)))
    new.replace(path)


def _read(path: Path) -> JobProcess | None:
    with suppress(OSError, ValueError, TypeError):
        row = json.loads(path.read_text())
        return JobProcess(**{**row, "members": tuple(row["members"])})
    return None


def _began(pid: int) -> float:
    """Return a process's start time; on Linux in ticks since boot, because changes of the clock do not affect them."""
    stat_file = Path(f"/proc/{pid}/stat")
    if stat_file.exists():
        return float(stat_file.read_text().rpartition(")")[2].split()[19])
    return float(psutil.Process(pid).create_time())


def _folder() -> Path:
    """Return this user's folder; create it if needed. It is in /tmp, because machines may share a home directory."""
    path = SHARED / f"convoy-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InputError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}: the list of a user's devices "
            "must be in a folder that only this user can access; have this one removed"
        )
    return path


def _network() -> int:
    with suppress(OSError):
        return os.stat("/proc/self/ns/net").st_ino
    return 0
