"""Fetch and check files: downloads bounded in time and whole or not there at all, and checksum files beside data."""

import contextlib
import glob
import hashlib
import http.client
import os
import re
import shutil
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from convoy._version import __version__
from convoy.errors import DataError
from convoy.files import open_regular

_CHUNK_BYTES = 1 << 20
_STALE_S = 3600.0


def cache_folder(name: str) -> Path:
    """Where the files of one dataset go when no folder is named: `$XDG_CACHE_HOME/convoy/<name>`.

    Without that variable, or when it is a relative path (which the XDG specification tells to ignore), `~/.cache`.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (root if root.is_absolute() else Path.home() / ".cache") / "convoy" / name


def digest(path: Path, algorithm: str) -> str:
    """Checksum of a file in lower-case hexadecimal digits; `algorithm` as `hashlib.new` names it."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


def sweep_stale(folder: Path, pattern: str) -> None:
    """Remove what a killed process left behind: matching files and folders untouched for an hour."""
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def download(
    urls: Sequence[str],
    destination: Path,
    md5: str,
    *,
    timeout_s: float = 30.0,
    limit_s: float = 3600.0,
    limit_bytes: int = 1 << 30,
) -> None:
    """Fetch a file from the first of several addresses that gives the right one.

    It is written under a name of its own and renamed once its checksum is right: `destination` is whole or not
    there, also when several processes fetch it at the same time.

    Args:
        urls: addresses, tried in this order.
        destination: the file; its folder is made.
        md5: checksum in hexadecimal digits.
        timeout_s: longest silence of a server.
        limit_s: longest time for one address.
        limit_bytes: a longer file is given up.

    Raises:
        DataError: no address gave the file, or the folder cannot be written; says what each one did.
    """
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        sweep_stale(destination.parent, glob.escape(f".{destination.name}.") + "*.part")
        failures = []
        for url in urls:
            with _part_of(destination) as (part, file):
                failure = _try(url, file, md5, timeout_s, limit_s, limit_bytes)
                if failure is None:
                    os.replace(part, destination)
                    return
                failures.append(f"{url}: {failure}")
    except OSError as error:
        raise DataError(
            f"cannot write {destination} ({_reason(error)}): make room or set XDG_CACHE_HOME to a folder that can be "
            "written, or name a folder that holds the files with --data-dir"
        ) from error
    raise DataError(
        f"could not download {destination.name}:\n  "
        + "\n  ".join(failures)
        + f"\nIf this machine has no network, download {urls[0]} by hand and put it into {destination.parent}, "
        "or name the folder that holds it with --data-dir."
    )


@contextlib.contextmanager
def _part_of(destination: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file beside the destination, gone at the end unless it was renamed."""
    part = destination.with_name(f".{destination.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            yield part, file
    finally:
        part.unlink(missing_ok=True)


def _try(url: str, file: BinaryIO, md5: str, timeout_s: float, limit_s: float, limit_bytes: int) -> str | None:
    """Fetch one address into the file: None when it is the right content, else what went wrong."""
    try:
        request = urllib.request.Request(url, headers={"User-Agent": f"convoy/{__version__}"})
        response = cast(http.client.HTTPResponse, urllib.request.urlopen(request, timeout=timeout_s))
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server answered {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        return _reason(error)
    with response:
        return _receive(url, response, file, md5, limit_s, limit_bytes)


def _receive(
    url: str, response: http.client.HTTPResponse, file: BinaryIO, md5: str, limit_s: float, limit_bytes: int
) -> str | None:
    announced_bytes = response.length
    deadline = time.monotonic() + limit_s
    checksum = hashlib.md5(usedforsecurity=False)
    received_bytes = 0
    with _progress(url, announced_bytes) as advance:
        while True:
            try:
                chunk = response.read1(_CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                return f"{_reason(error)} after {received_bytes} bytes"
            if not chunk:
                break
            file.write(chunk)
            # Each time, so that the file's age tells a download that goes on from one that died, and that all of it
            # is in the file when it gets its name.
            file.flush()
            checksum.update(chunk)
            received_bytes += len(chunk)
            advance(len(chunk))
            if time.monotonic() > deadline:
                return f"not finished after {limit_s:g} s ({received_bytes} bytes)"
            if received_bytes > limit_bytes:
                return f"longer than {limit_bytes} bytes"
    if announced_bytes is not None and received_bytes != announced_bytes:
        return f"the connection ended after {received_bytes} of {announced_bytes} bytes"
    if checksum.hexdigest() != md5:
        return f"its md5 is {checksum.hexdigest()}, not {md5} ({received_bytes} bytes)"
    return None


@contextlib.contextmanager
def _progress(url: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, one plain line elsewhere; on standard error, so that output can be piped."""
    console = Console(stderr=True)
    console.print(f"downloading {url}", markup=False, highlight=False, soft_wrap=True)
    columns = (TextColumn("  "), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)


def _reason(error: Exception) -> str:
    # urllib wraps the socket's error, whose own text is the one that helps.
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return str(cause) or type(cause).__name__


# ------------------------------------------------------------------------------------------------ checksum files


_SUMS = {"SHA256SUMS": "sha256", "MD5SUMS": "md5"}


def check_sums(folder: Path, names: Sequence[str]) -> None:
    """Compare files of a folder with each checksum file that stands beside them; none is no error.

    Raises:
        DataError: a checksum differs or is not listed, or a line cannot be read.
    """
    for sums_name, algorithm in _SUMS.items():
        sums_path = folder / sums_name
        if not sums_path.is_file():
            continue
        listed = _listed_sums(sums_path)
        unlisted = [name for name in names if name not in listed]
        if unlisted:
            raise DataError(
                f"{sums_path} has no checksum of {', '.join(unlisted)}: write it anew in that folder "
                f"({algorithm}sum *.bin > {sums_name}), or remove it"
            )
        for name in names:
            met = digest(folder / name, algorithm)
            if met != listed[name]:
                raise DataError(
                    f"{folder / name} has the {algorithm} {met}, and {sums_name} says {listed[name]}: fetch the file "
                    f"again, or correct {sums_name} if the file is meant to be another one"
                )


def _listed_sums(path: Path) -> dict[str, str]:
    """Checksums by file name, as `sha256sum` and `md5sum` write them."""
    listed = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        match = re.fullmatch(r"([0-9a-fA-F]+) [ *](?:\./)?(.+)", line)
        if match is None:
            raise DataError(f"{path}, line {number}: {line!r} is not '<checksum>  <file name>'; write the file anew")
        listed[match[2]] = match[1].lower()
    return listed
