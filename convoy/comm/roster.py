"""Which processes of this user's jobs run on this machine: a row for each, in a file, so that they can be told to leave.

The operating system proves who asks: the folder is its owner's alone, and only the same user may send signals to a process.
A row outlives a process that was killed; whoever reads the rows removes it.
"""

import atexit
import json
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from convoy.errors import InputError

SHARED = Path("/tmp")
"""Where every user may make a folder, and nobody may remove or rename another's."""

FRESH_S = 3600.0
"""A row is written anew so often: what cleans /tmp takes files that are old."""


@dataclass(frozen=True, slots=True)
class Row:
    """One process of a job.

    Attributes:
        job: where its devices first met, HOST:PORT; of one alone, its process.
        pid, began: the process, and when it began, as the system counts: numbers are used again.
        network: of the machine's networks the one that it is in: a rehearsed host is told from the next by it.
        device: its id in the job.
        kind: what it computes on.
        members: ids of all devices that train, once it hears what it is told after a step; else empty.
        run: where the run is logged; empty: nowhere, or not known yet.
    """

    job: str
    pid: int
    began: float
    network: int
    device: int
    kind: str
    members: tuple[int, ...] = ()
    run: str = ""

    def is_named(self, name: str) -> bool:
        """Whether a person who writes this means its job."""
        return name in (self.job, self.run, Path(self.run).name) or (
            bool(self.run) and Path(name).absolute() == Path(self.run).absolute()
        )


def enter(job: str, device: int, kind: str) -> None:
    """Note that this process is a device of a job until it ends. Where that cannot be noted, it trains without a row."""
    global _mine
    pid = os.getpid()
    with suppress(OSError, InputError, psutil.Error):
        if _mine is None or _mine.pid != pid:
            atexit.register(_leave, pid)
        _mine = Row(job, pid, _began(pid), _network(), device, kind)
        _write(_mine)
        rows()  # removes those that killed processes have left


def tell(**changes: Any) -> None:
    """Correct the row of this process, if it has one."""
    global _mine
    if _mine is not None and _mine.pid == os.getpid():
        _mine = replace(_mine, **changes)
        with suppress(OSError, InputError):
            _write(_mine)


def refresh() -> None:
    """After each step: keep the row from looking old."""
    if time.monotonic() > _written_s + FRESH_S:
        tell()


def job() -> str:
    """The job of this process; empty where it has no row."""
    return "" if _mine is None else _mine.job


def rows() -> list[Row]:
    """Of all processes of this user that run on this machine, by job and device.

    Raises:
        InputError: the folder of the rows is another user's.
    """
    found = []
    for path in _folder().glob("*.json"):
        row = _read(path)
        if row is None or not _runs(row):
            with suppress(OSError):
                path.unlink()
        elif row.network == _network():
            found.append(row)
    return sorted(found, key=lambda row: (row.job, row.device))


def of_processes(pids: Sequence[int]) -> list[Row | None]:
    """The rows of some processes that run."""
    with suppress(InputError):
        return [_read(_folder() / f"{pid}.json") for pid in pids]
    return [None for _ in pids]


def speaks(pid: int) -> bool:
    """Whether a process has noted that it is the first of the devices that train, which speaks for all: for one before it that
    is stopped, or cut off, is none of them any more."""
    (row,) = of_processes([pid])
    return row is not None and row.device in row.members[:1]


_mine: Row | None = None
_written_s = 0.0


def _leave(pid: int) -> None:
    if pid == os.getpid():
        with suppress(OSError, InputError):
            (_folder() / f"{pid}.json").unlink()


def _write(row: Row) -> None:
    global _written_s
    path = _folder() / f"{row.pid}.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps(asdict(row)))
    new.replace(path)
    _written_s = time.monotonic()


def _read(path: Path) -> Row | None:
    with suppress(OSError, ValueError, TypeError):
        row = json.loads(path.read_text())
        return Row(**{**row, "members": tuple(row["members"])})
    return None


def _runs(row: Row) -> bool:
    try:
        return psutil.Process(row.pid).status() != psutil.STATUS_ZOMBIE and _began(row.pid) == row.began
    except (psutil.Error, OSError):
        return False


def _began(pid: int) -> float:
    """When a process began; on Linux in ticks since the machine did, which setting the clock does not change."""
    stat_file = Path(f"/proc/{pid}/stat")
    if stat_file.exists():
        return float(stat_file.read_text().rpartition(")")[2].split()[19])
    return float(psutil.Process(pid).create_time())


def _folder() -> Path:
    """The folder of this user's rows, on this machine alone: homes may lie on several.

    Raises:
        InputError: another user made it.
    """
    path = SHARED / f"convoy-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    told = path.lstat()
    if not stat.S_ISDIR(told.st_mode) or told.st_uid != os.geteuid() or told.st_mode & 0o077:
        raise InputError(
            f"{path} has mode {stat.S_IMODE(told.st_mode):04o} and owner {told.st_uid}: devices of a user are noted in a "
            "folder that is this user's alone; have it removed"
        )
    return path


def _network() -> int:
    with suppress(OSError):
        return os.stat("/proc/self/ns/net").st_ino
    return 0
