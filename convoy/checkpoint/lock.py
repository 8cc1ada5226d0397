"""One run at a time writes into a folder: a lock on a file in it, which the system releases when the process ends, however
it ends. The file tells a second run who holds it.
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
    """The open lock file of a folder, and how often this process has taken the folder."""

    handle: int
    times: int = 1


_held: dict[Path, _Lock] = {}


def hold(folder: Path, run: str | None = None, *, from_lost: bool = False) -> None:
    """Take a folder for this process, until as many calls of `release`, or its end.

    Args:
        run: a text that no other run has.
        from_lost: a process of this run that holds it does not count: the others of the run go on without it. It may be
            stopped, and still hold the lock.

    Raises:
        InputError: another process holds it; says which one.
        OSError: the lock file cannot be made.
    """
    own = Path(os.path.realpath(folder))
    if own in _held:
        _held[own].times += 1
        return
    while True:
        handle = os.open(own / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            if not (from_lost and run is not None and _words(handle).get("run") == run and _is_locked(handle)):
                _lock(handle, folder)
            elif _is_at(handle, own / LOCK):
                os.unlink(own / LOCK)
            # Who held it before removes the file at its end: then this is a lock on nothing.
            if _is_at(handle, own / LOCK):
                break
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    words = {"process": os.getpid(), "host": os.uname().nodename, "since": now, "run": run}
    with suppress(OSError):  # on a full disk it is a lock all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(words).encode(), 0)
    _held[own] = _Lock(handle)


def release(folder: Path) -> None:
    """Let a folder go that `hold` has taken."""
    own = Path(os.path.realpath(folder))
    if (lock := _held.get(own)) is None:  # in a process that was forked since
        return
    lock.times -= 1
    if not lock.times:
        with suppress(OSError):
            if _is_at(lock.handle, own / LOCK):  # else the others of the run have taken the folder
                os.unlink(own / LOCK)
        os.close(_held.pop(own).handle)


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Hold a folder meanwhile. Raises as `hold`."""
    hold(folder)
    try:
        yield
    finally:
        release(folder)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise InputError(
                f"another run writes into {folder}: {_holder(handle)}; wait until it ends, or name another folder"
            ) from None
        warnings.warn(
            f"{folder} cannot be locked ({error.strerror}): see to it that one run at a time writes into it",
            stacklevel=2,
        )


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False


def _holder(handle: int) -> str:
    words = _words(handle)
    try:
        return shortened(f"process {words['process']} on {words['host']}, since {words['since']}")
    except LookupError:
        return "a process that did not say which"


def _words(handle: int) -> dict[str, Any]:
    try:
        words = json.loads(os.pread(handle, 4096, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return words if isinstance(words, dict) else {}


def _forget() -> None:
    """A forked process, such as one that prepares batches, must not keep its parent's lock."""
    for lock in _held.values():
        os.close(lock.handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
