"""Read user files with limits on type, size and nesting, and write files atomically.

A path may name an endless pipe, a device, a folder or a huge file; a text may be nested a hundred thousand levels deep. Each
of these raises a clear error.
"""

import errno
import json
import os
import stat
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from convoy.errors import InputError, shown

MOST_TEXT_BYTES = 64 << 20  # no plan, fleet, measurement or run file is larger
LEFT_BEHIND_S = 60.0  # age after which an unfinished file counts as left behind by a killed process

_TOO_DEEP = "it is nested too deeply"


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read bytes. OSError: it cannot be opened, or it is not a regular file; `strerror` says why."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # the text differs between Python versions
        raise OSError(errno.EINVAL, "embedded null byte", str(path)) from None
    try:
        _check_regular(os.fstat(handle).st_mode)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _check_regular(mode: int) -> None:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a regular file")


def cache_folder() -> Path:
    """Return this user's folder for Convoy's cached files; it may not exist yet. InputError: no home directory."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if root.is_absolute():  # the XDG specification says to ignore relative paths
        return root / "convoy"
    try:
        return Path.home() / ".cache" / "convoy"
    except RuntimeError:
        raise InputError(
            f"user {os.getuid()} has no home directory, and HOME is not set: set HOME or XDG_CACHE_HOME to a folder "
            "that you may write"
        ) from None


def unwritable(folder: Path) -> str:
    """Return why no file can be created in a folder, which may not exist yet; an empty text if one can."""
    near = folder.absolute()
    try:
        while not near.exists():
            near = near.parent
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    if not near.is_dir():
        return f"{near} is no folder"
    return "" if os.access(near, os.W_OK) else f"{near} cannot be written"


def read_text(
    path: Path, what: str, remedy: str, *, most_bytes: int = MOST_TEXT_BYTES, kind: type[InputError] = InputError
) -> str:
    """Read a UTF-8 text file. If that fails, raise an error of `kind` about `what`, such as "the plan"."""
    try:
        with open_regular(path) as file:
            content = file.read(most_bytes + 1)
        if len(content) <= most_bytes:
            return content.decode("utf-8-sig")
        why = f"it has more than {most_bytes:,} bytes"
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text ({error.reason} at byte {error.start})"
    except OSError as error:
        why = error.strerror or str(error)
    raise kind(f"cannot read {what} {shown(path)}: {why}; {remedy}")


def parse_toml(text: str, source: str, remedy: str = "correct that line") -> dict[str, Any]:
    """Parse TOML. InputError, which begins with `source`: not TOML, or nested too deeply."""
    try:
        return tomllib.loads(text)
    except (RecursionError, ValueError) as error:  # TOMLDecodeError is a ValueError
        why = _TOO_DEEP if isinstance(error, RecursionError) else error
        raise InputError(f"{source}: not TOML: {why}; {remedy}") from None


def parse_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON. ValueError: not JSON, or nested too deeply. `pairs` builds objects; default: dicts."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically. Replace an existing file; follow a symbolic link. InputError: it cannot be written."""
    fresh: Path | None = None
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        if os.path.exists(target):
            _check_regular(target.stat().st_mode)
        prefix = f".{target.name}."
        with suppress(OSError):
            for old in target.parent.iterdir():
                is_ours = old.name.startswith(prefix) and old.name[len(prefix) :].isdecimal()
                if is_ours and old.lstat().st_mtime < time.time() - LEFT_BEHIND_S:
                    old.unlink()
        fresh = target.with_name(f"{prefix}{os.getpid()}")
        fresh.write_text(text, encoding="utf-8", errors="backslashreplace")
        fresh.replace(target)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot write {path}: {why}; name a file in a folder that you may write") from None
    finally:
        if fresh is not None:
            with suppress(OSError):
                fresh.unlink()
