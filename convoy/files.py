"""Reads user files within bounds, and writes files whole or not at all.

A path may name an endless pipe, a device, a folder, gigabytes, or brackets nested a hundred thousand deep. Everything that
Convoy reads as text is read here, and each of these is an error that says so.
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

MOST_TEXT_BYTES = 64 << 20
"""A larger file is no plan, fleet, measurement or run file."""

MOST_DEPTH = 100
"""Tables within tables; the deepest file of ours has six."""

LEFT_BEHIND_S = 60.0
"""An unfinished file of this age belongs to a process that was killed."""

_TOO_DEEP = f"it is nested deeper than {MOST_DEPTH} levels"

_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a pipe, not a regular file"),
    (stat.S_ISSOCK, "it is a socket, not a regular file"),
    (lambda mode: not stat.S_ISREG(mode), "it is a device, not a regular file"),
)


def open_regular(path: Path) -> BufferedReader:
    """Open a file to be read as bytes. Neither this nor reading it can wait for somebody else to write.

    Raises:
        OSError: it cannot be opened, or is no regular file; `strerror` says why.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # each Python words this differently
        raise OSError(errno.EINVAL, "embedded null byte", str(path)) from None
    try:
        if why := not_regular(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, why, str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def not_regular(mode: int) -> str:
    """Return why a file is no regular one; empty if it is."""
    return next((words for applies, words in _KINDS if applies(mode)), "")


def unwritable(folder: Path) -> str:
    """Return why no file can be made in a folder, which may not exist yet; empty if one can."""
    for near in (folder.absolute(), *folder.absolute().parents):
        try:
            is_folder = stat.S_ISDIR(near.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            return getattr(error, "strerror", None) or str(error)
        if not is_folder:
            return f"{near} is no folder"
        return "" if os.access(near, os.W_OK) else f"{near} cannot be written"
    return f"{folder} has no parent"


def read_text(
    path: Path, what: str, remedy: str, *, most_bytes: int = MOST_TEXT_BYTES, kind: type[InputError] = InputError
) -> str:
    """Return the text of a file in UTF-8.

    Args:
        what: names the file in errors, with its article: "the plan".
        kind: of the error.

    Raises:
        InputError: of that kind: it cannot be opened, is no regular file, too large, or no text.
    """
    try:
        with open_regular(path) as file:
            content = file.read(most_bytes + 1)
        if len(content) <= most_bytes:
            return content.decode("utf-8-sig")
        why = f"it has more than {most_bytes:,} bytes"
    except UnicodeDecodeError as error:
        why = f"it is no text in UTF-8 ({error.reason} at byte {error.start})"
    except OSError as error:
        why = error.strerror or str(error)
    raise kind(f"cannot read {what} {shown(path)}: {why}; {remedy}")


def parse_toml(text: str, source: str, remedy: str = "correct that line") -> dict[str, Any]:
    """Return the table of a TOML text.

    Raises:
        InputError: it is no TOML, or nested deeper than `MOST_DEPTH`; begins with `source`.
    """
    try:
        table = tomllib.loads(text)
        _check_depth(text, table)
    except RecursionError:
        raise InputError(f"{source}: not TOML: {_TOO_DEEP}; {remedy}") from None
    except ValueError as error:  # TOMLDecodeError is one; so is a number of 5,000 digits
        raise InputError(f"{source}: not TOML: {error}; {remedy}") from None
    return table


def parse_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text.

    Args:
        pairs: makes an object of its names and values; default: a dict.

    Raises:
        ValueError: it is no JSON, or nested deeper than `MOST_DEPTH`.
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(text, value)
    return value


def _check_depth(text: str, value: Any) -> None:
    if text.count("[") + text.count("{") + text.count(".") <= MOST_DEPTH:
        return
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(_TOO_DEEP)
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for values in inner for each in values if isinstance(each, dict | list)]


def write_whole(path: Path, text: str) -> None:
    """Write a whole file, or nothing. Replace an older one; follow a symbolic link.

    Raises:
        InputError: it cannot be written, or is a device, a pipe or a folder.
    """
    fresh: Path | None = None
    try:
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        if os.path.exists(target) and (why := not_regular(target.stat().st_mode)):
            raise OSError(errno.EINVAL, why)
        prefix = f".{target.name}."
        with suppress(OSError):
            for name in os.listdir(target.parent):
                old = target.with_name(name)
                is_ours = name.startswith(prefix) and name[len(prefix) :].isdecimal()
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
