"""The files of the project and of named data, with their digests."""

import hashlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from convoy.errors import InputError, shown
from convoy.setup.actions import amount
from convoy.setup.state import Piece

MOST_BYTES = 2_000_000_000
"""A project of more has data in it that nobody meant to send."""

_LEFT_OUT = {"__pycache__", "node_modules", "runs"}
_GIT_S = 60.0


def project_files(folder: Path) -> list[str]:
    """Paths of the project's files: all that git tracks, and of the others those that it does not ignore, but for hidden
    ones, environments, and the logs of runs.

    Raises:
        InputError: more than MOST_BYTES.
    """
    tracked = _git_files(folder, "--cached")
    if tracked is None:
        paths = _walk(folder, "", links=False)
    else:
        others = _git_files(folder, "--others", "--exclude-standard") or ()
        paths = [*tracked, *(path for path in others if not _is_left_out(folder, path))]
    files = sorted(path for path in paths if (folder / path).is_file())
    sizes = {path: (folder / path).stat().st_size for path in files}
    if sum(sizes.values()) > MOST_BYTES:
        largest = max(sizes, key=lambda path: sizes[path])
        raise InputError(
            f"the project in {folder} has {amount(sum(sizes.values()))}, the largest file is {largest}: at most "
            f"{amount(MOST_BYTES)} are sent unnamed; let git ignore the data, and name what the hosts need with --data"
        )
    return files


def data_files(folder: Path, named: Iterable[Path]) -> list[str]:
    """Paths of the files of named data. Links are followed, so that data elsewhere can be linked into the project.

    Raises:
        InputError: data that is not there, or does not lie in the project.
    """
    found: list[str] = []
    for path in named:
        inside = os.path.relpath(os.path.abspath(folder / path), folder)
        is_file, is_folder = os.path.isfile(folder / inside), os.path.isdir(folder / inside)
        if not is_file and not is_folder:
            why = "neither a file nor a folder" if os.path.lexists(folder / inside) else "not there"
            raise InputError(f"--data {shown(path)}: {why}; give a file or folder of the project {folder}")
        if inside.startswith(".."):
            raise InputError(
                f"--data {path} lies outside of the project {folder}, and a script looks for it at one path on all hosts: link "
                f"it in (ln -s {path} {path.name}) and give --data {path.name}"
            )
        found += [inside] if is_file else _walk(folder, inside, links=True)
    return found


def pieces(folder: Path, paths: Iterable[str]) -> tuple[Piece, ...]:
    """Files with their digests.

    Raises:
        InputError: one cannot be read.
    """
    with ThreadPoolExecutor(4) as threads:
        return tuple(threads.map(lambda path: piece(folder, path), sorted(set(paths))))


def piece(folder: Path, path: str) -> Piece:
    """A file with its digest."""
    try:
        with (folder / path).open("rb") as file:
            found = hashlib.file_digest(file, "sha256")
            status = os.fstat(file.fileno())
    except OSError as error:
        raise InputError(f"cannot read {folder / path}: {error.strerror}; it was to be sent to the hosts") from None
    return Piece(Path(path).as_posix(), status.st_size, found.hexdigest(), bool(status.st_mode & 0o100))


def _git_files(folder: Path, *options: str) -> Sequence[str] | None:
    """What git lists; None where it is no repository."""
    words = ["git", "-C", str(folder), "ls-files", "-z", *options]
    try:
        done = subprocess.run(words, capture_output=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [os.fsdecode(path) for path in done.stdout.split(b"\0") if path] if done.returncode == 0 else None


def _is_left_out(folder: Path, path: str) -> bool:
    """Whether a part of the path is hidden, a cache, an environment, or the logs of runs."""
    parts = Path(path).parts
    return any(part.startswith(".") or part in _LEFT_OUT for part in parts) or any(
        folder.joinpath(*parts[:count], "pyvenv.cfg").exists() for count in range(1, len(parts))
    )


def _walk(folder: Path, below: str, *, links: bool) -> list[str]:
    return [os.path.relpath(path, folder) for path in _files(folder / below, links, ())]


def _files(folder: Path, links: bool, above: tuple[str, ...]) -> Iterator[str]:
    real = os.path.realpath(folder)
    if real in above:
        return  # a link that leads back
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"cannot look into {folder}: {error.strerror}; what is to be sent must be readable") from None
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _LEFT_OUT:
            continue
        if os.path.isdir(entry.path) and (links or not entry.is_symlink()):
            if not os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                yield from _files(Path(entry.path), links, (*above, real))
        elif os.path.isfile(entry.path):
            yield entry.path
