"""The folder of a run, with one folder per checkpoint, complete or absent.

::

    run/000001-step-100/  model.safetensors  optimizer.safetensors  checkpoint.json
    run/000002-step-200/  ...
    run/best -> 000001-step-100

A checkpoint is written under another name and renamed when all of it is on the disk. Nothing under a final name is ever written
again: a run that returns to an older checkpoint only adds higher numbers. One run at a time writes into a folder.
"""

import errno
import fcntl
import os
import re
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from convoy.checkpoint.manifest import MANIFEST, read_manifest
from convoy.errors import InputError, shown

KEEP = 3
"""Last checkpoints that stay, besides the best and the last one with finite weights."""

BEST, LOCK = "best", ".lock"
_DRAFT, _LINK = ".draft", ".best"
_TRACES = {LOCK, _DRAFT, "log.jsonl", "run.toml"}
"""Files of a run that ended before its first checkpoint."""

_NAME = re.compile(r"(\d{6,})-step-\d+")


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    if not os.path.isdir(folder):
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_number)


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[0])


def latest(folder: Path | str) -> Path | None:
    """Return the newest checkpoint of a run, if any. It is complete; only loading verifies its content."""
    return next(reversed(checkpoints(Path(folder))), None)


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, by its name or its content."""
    return _NAME.fullmatch(path.name) is not None or os.path.exists(path / MANIFEST)


def run_folder(path: Path) -> Path:
    """Return the folder of a run, given that or one of its checkpoints. InputError if a checkpoint was copied elsewhere."""
    if not is_checkpoint(path):
        return path
    real = Path(os.path.realpath(path)) if path.is_symlink() else path
    if _NAME.fullmatch(real.name) is None:
        place = shlex.quote(f"{path}-run/000001-step-{read_manifest(path).progress.step}")
        raise InputError(f"{path} is a checkpoint under another name: copy it into the folder of a new run, as {place}")
    return real.parent


def starting_point(folder: Path, resume: bool) -> Path | None:
    """Return the checkpoint that a run starts from; None for a start from the beginning. Change nothing.

    InputError if there is nothing to resume; or if there is, and `resume` is False.
    """
    found = folder if is_checkpoint(folder) else latest(folder)
    if not resume:
        if found == folder:
            raise InputError(
                f"{folder} is a checkpoint of a run: go on from it (--resume), or name another folder for a new run"
            )
        if found is not None:
            raise InputError(
                f"{folder} holds the checkpoints of another run, the latest is {found.name}: resume it (--resume), or name "
                "another folder"
            )
        return None
    if not os.path.isdir(folder):
        raise InputError(
            f"there is nothing to resume: the folder {folder} does not exist; give that of an earlier run, or start without "
            "resuming"
        )
    run_folder(folder)  # refuses a checkpoint of an unknown run
    names = {path.name for path in folder.iterdir()}
    if found is None and names and not names & _TRACES:
        raise InputError(
            f"there is nothing to resume: {folder} is a folder of something else ({shown(min(names))}, ...); give that of an "
            "earlier run, or start without resuming"
        )
    return found


def publish(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Let `write` fill an empty folder, and give it the name of the latest checkpoint. If it fails, nothing is left."""
    path = folder / _DRAFT
    shutil.rmtree(path, ignore_errors=True)  # of a run that was killed
    path.mkdir()
    try:
        write(path)
        _sync(path)
        number = 1 + max(map(_number, checkpoints(folder)), default=0)
        target = path.rename(folder / f"{number:06d}-step-{step}")
    finally:
        shutil.rmtree(path, ignore_errors=True)
    _sync(folder)
    return target


def tidy(folder: Path) -> None:
    """Point `best` to the best checkpoint. Remove all but that, the last `KEEP`, and the last one with finite weights."""
    kept, scores, finite = checkpoints(folder), dict[Path, float](), None
    for path in kept:
        with suppress(InputError):
            manifest = read_manifest(path)
            finite = path if manifest.finite else finite
            if manifest.score is not None:
                scores[path] = manifest.score
    best = max(scores, key=lambda path: scores[path]) if scores else None  # the first of equals
    if best is not None:
        link = folder / _LINK
        link.unlink(missing_ok=True)
        link.symlink_to(best.name)
        link.replace(folder / BEST)
    for path in kept[:-KEEP]:
        if path not in (best, finite):
            # Renamed first: a half removed folder must not look like a checkpoint.
            shutil.rmtree(path.rename(folder / _DRAFT))
    _sync(folder)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- lock ------------------------------------------------------------------------------------------------------------

_locked: dict[Path, int] = {}  # file descriptors of lock files


def hold(folder: Path) -> bool:
    """Lock a folder for this process until `release` or its end. Return False if it has the lock already.

    OSError if another process has it, which `strerror` names, or if the lock file cannot be made.
    """
    folder = Path(os.path.realpath(folder))
    if folder in _locked:
        return False
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, a forked process does not keep it
    except (BlockingIOError, PermissionError):
        holder = os.pread(handle, 200, 0).decode(errors="replace")
        os.close(handle)
        raise OSError(errno.EWOULDBLOCK, f"another run writes there, {holder}", str(folder / LOCK)) from None
    except OSError as error:
        why = f"{folder} cannot be locked ({error.strerror})"
        warnings.warn(f"{why}: make sure that one run at a time writes into it", stacklevel=2)
    _locked[folder] = handle
    with suppress(OSError):  # a full disk does not prevent the lock
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
    return True


def release(folder: Path) -> None:
    handle = _locked.pop(Path(os.path.realpath(folder)), None)
    if handle is not None:
        os.close(handle)


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Lock a folder during the block. Raises as `hold`."""
    is_new = hold(folder)
    try:
        yield
    finally:
        if is_new:
            release(folder)
