"""The lock of a run's folder: one run at a time writes there.

The lock is a `flock` on a file, which the system releases when the process ends, however it ends. The file names its holder.
"""

import datetime
import errno
import fcntl
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convoy.errors import InputError, shortened

LOCK = ".lock"


@dataclass
class _Lock:
    """The open lock file of a folder, and how often this process has taken it."""

    handle: int
    times: int = 1


_held: dict[Path, _Lock] = {}


def hold(folder: Path, run: str | None = None, *, from_lost: bool = False) -> None:
    """Lock a folder for this process until as many calls of `release`, or until its end.

    Args:
        run: the run's random identifier.
        from_lost: take the lock from another process of this run. The run goes on without that process, which may be
            stopped and still hold the lock.

    Raises:
        InputError: another process holds the lock; names it.
        OSError: the lock file cannot be made.
    """
    own = Path(os.path.realpath(folder))
    if own in _held:
        _held[own].times += 1
        return
    while True:
        handle = os.open(own / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            error = _try_lock(handle)
            if error is not None and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = _holder(handle)
                if not (from_lost and run is not None and holder.get("run") == run):
                    raise _taken(folder, holder)
                if _is_at(handle, own / LOCK):
                    os.unlink(own / LOCK)
            elif error is not None:
                warnings.warn(
                    f"{folder} cannot be locked ({error.strerror}): make sure that one run at a time writes into it",
                    stacklevel=2,
                )
            # The previous holder removes the file at its end: the lock must be on the file that is there now.
            if _is_at(handle, own / LOCK):
                break
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    holder = {"process": os.getpid(), "host": os.uname().nodename, "since": now, "run": run}
    with suppress(OSError):  # on a full disk the lock holds all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(holder).encode(), 0)
    _held[own] = _Lock(handle)


def release(folder: Path) -> None:
    """Undo one `hold`."""
    own = Path(os.path.realpath(folder))
    if (lock := _held.get(own)) is None:  # in a process that was forked since
        return
    lock.times -= 1
    if not lock.times:
        with suppress(OSError):
            if _is_at(lock.handle, own / LOCK):  # else the other devices of the run have taken the folder
                os.unlink(own / LOCK)
        os.close(_held.pop(own).handle)


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Hold a folder during the block. Raises as `hold`."""
    hold(folder)
    try:
        yield
    finally:
        release(folder)


def _try_lock(handle: int) -> OSError | None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


def _taken(folder: Path, holder: dict[str, Any]) -> InputError:
    try:
        who = shortened(f"process {holder['process']} on {holder['host']}, since {holder['since']}")
    except LookupError:
        who = "an unknown process"
    return InputError(f"another run writes into {folder}: {who}; wait until it ends, or name another folder")


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(handle: int) -> dict[str, Any]:
    try:
        holder = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _forget() -> None:
    for lock in _held.values():
        os.close(lock.handle)
    _held.clear()


# A forked process, such as a data-loading worker, must not keep its parent's lock.
os.register_at_fork(after_in_child=_forget)
