"""The folder of a run: one folder for each checkpoint, numbered as they are written; whole, or not there.

::

    run/000001-step-100/  model.safetensors  optimizer.safetensors  checkpoint.json
    run/000002-step-200/  ...
    run/best -> 000001-step-100

A checkpoint is written under another name, and gets its own when all of it is on the disk. Nothing that has its name is ever
written again: a run that goes back to an older checkpoint, or comes by the same step twice, only adds higher numbers. One run
at a time writes into a folder.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from convoy.checkpoint.disk import sync_folder
from convoy.checkpoint.manifest import MANIFEST, read_manifest
from convoy.errors import InputError

BEST = "best"
_DRAFT, _GONE, _LINK = ".draft", ".gone", ".best"
_NAME = re.compile(r"(\d{6,})-step-\d+")


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; none where there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_number)


def latest(folder: Path | str) -> Path | None:
    """The newest checkpoint of a run; None where there is none. It is complete, but only loading checks what is in it."""
    return next(reversed(checkpoints(Path(folder))), None)


def best(folder: Path) -> Path | None:
    """The checkpoint with the highest score, the first of equals; None where none has a score."""
    scored = [(score, path) for path in checkpoints(folder) if (score := _score(path)) is not None]
    return max(scored, key=lambda row: row[0])[1] if scored else None


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, by its name or by what is in it."""
    return _NAME.fullmatch(path.name) is not None or (path / MANIFEST).exists()


@contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """An empty folder to write a checkpoint into. At the end of the block it is gone, unless it was published.

    Raises:
        OSError: the folder cannot be made, or what a killed process left behind cannot be removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_behind in (folder / _DRAFT, folder / _GONE):
        if left_behind.exists():
            shutil.rmtree(left_behind)
    path = folder / _DRAFT
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(path: Path, step: int) -> Path:
    """Give a draft whose files are on the disk its name: from here on it is the latest checkpoint."""
    folder = path.parent
    sync_folder(path)
    number = 1 + max((_number(each) for each in checkpoints(folder)), default=0)
    target = path.rename(folder / f"{number:06d}-step-{step}")
    sync_folder(folder)
    return target


def tidy(folder: Path, keep: int) -> None:
    """Let `best` point to the best checkpoint, and remove all but that and the last few."""
    favourite = best(folder)
    if favourite is not None:
        link = folder / _LINK
        link.unlink(missing_ok=True)
        link.symlink_to(favourite.name)
        link.replace(folder / BEST)
    for path in checkpoints(folder)[:-keep]:
        if path != favourite:
            # Renamed first: what is half removed must not look like a checkpoint.
            shutil.rmtree(path.rename(folder / _GONE))
    sync_folder(folder)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _score(path: Path) -> float | None:
    try:
        return read_manifest(path).score
    except InputError:
        return None  # a damaged one is nobody's best
