"""The folder of a run, with one folder per checkpoint, complete or absent, and the manifest that describes a checkpoint.

::

    run/000001-step-100/  model.safetensors  optimizer.safetensors  checkpoint.json
    run/000002-step-200/  ...
    run/best -> 000001-step-100

A checkpoint is written under another name and renamed when all of it is on the disk. Nothing under a final name is ever written
again: a run that goes back to an older checkpoint only adds higher numbers. One run at a time writes into a folder (`lock.py`).
"""

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from convoy._version import __version__
from convoy.checkpoint.values import dtype_named
from convoy.errors import InputError, shown
from convoy.files import MOST_TEXT_BYTES, open_regular

FORMAT = 1
MANIFEST = "checkpoint.json"
MODEL = "model.safetensors"
AVERAGE = "average.safetensors"
"""The averages under the keys of the weights, for users. Loading takes the averages from the optimizer's file."""
OPTIMIZER = "optimizer.safetensors"

BEST = "best"
_DRAFT, _GONE, _LINK = ".draft", ".gone", ".best"
_NAME = re.compile(r"(\d{6,})-step-\d+")

SYNC_BYTES = 64 << 20
"""Bytes between two calls of fsync, so that no single call takes longer for a larger model."""


# --- manifest --------------------------------------------------------------------------------------------------------

_Count = Annotated[int, Field(ge=0, le=2**53)]


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is, and where in the data it goes on.

    Attributes:
        step: optimizer steps done since the beginning.
        epoch: the epoch of the next batch, counted from 0.
        batch: batches of that epoch done.
    """

    step: _Count = 0
    epoch: _Count = 0
    batch: _Count = 0


@dataclass(frozen=True, slots=True)
class Written:
    """Size and checksum of a file as it was written."""

    size_bytes: int
    sha256: str


def _checked_row(row: dict[str, Any]) -> dict[str, Any]:
    wanted = {"tensor": {"kind", "dtype"}, "number": {"kind", "dtype", "value", "near"}, "plain": {"kind", "value"}}
    kind = row.get("kind")
    if not isinstance(kind, str) or set(row) != wanted.get(kind):
        raise ValueError(f"{shown(row)} describes no state of an optimizer")
    if "dtype" in row:
        dtype_named(row["dtype"])
    return row


class SavedGroup(_Saved):
    """One parameter group: parameter names in its order, and its settings as `values.encode` writes them."""

    parameters: list[str]
    settings: dict[str, Any]


class SavedOptimizer(_Saved):
    """An optimizer without its tensors.

    Attributes:
        name: of its class.
        state: by parameter and state name, rows as `runtime.optimizer.described` makes them.
    """

    name: str
    groups: list[SavedGroup]
    state: dict[str, dict[str, Annotated[dict[str, Any], AfterValidator(_checked_row)]]]

    def tensors(self) -> list[tuple[str, str, torch.dtype]]:
        """Return (parameter, state name, type) of each tensor in the optimizer's file."""
        rows = [(key, name, row) for key, state in self.state.items() for name, row in state.items()]
        return [(key, name, dtype_named(row["dtype"])) for key, name, row in rows if row["kind"] == "tensor"]


class SavedState(_Saved):
    """A schedule or a scaler: the name of its class, and its state as `values.encode` writes it."""

    name: str
    state: dict[str, Any]


class Manifest(_Saved):
    """The content of checkpoint.json: everything but the tensors, and size and checksum of the other files.

    Attributes:
        settings: what must be the same when the run is resumed, e.g. seed and batch.
        score: of the evaluation at this point; the greater the better.
        others: state of the "schedule" and the "scaler".
        files: the other files in the folder.
        finite: whether no weight is NaN or infinite.
        own_sha256: checksum of this text without these digits; None where an earlier Convoy wrote none.
    """

    format: int = FORMAT
    convoy: str = __version__
    torch: str = str(torch.__version__)
    progress: Progress
    score: Annotated[float, Field(allow_inf_nan=False)] | None
    settings: dict[str, Any]
    optimizer: SavedOptimizer | None
    others: dict[str, SavedState]
    files: dict[str, Written]
    finite: bool = True
    own_sha256: str | None = None

    def to_json(self) -> str:
        """Return the text of the file, with its own checksum."""
        text = self.model_copy(update={"own_sha256": ""}).model_dump_json(indent=1) + "\n"
        return text.replace(_UNSIGNED, _UNSIGNED[:-1] + _sha256(text) + '"')


_UNSIGNED = '"own_sha256": ""'


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Stamp(BaseModel):
    """The fields that every format has."""

    format: int
    convoy: str


def read_manifest(checkpoint: Path) -> Manifest:
    """Read checkpoint.json.

    Raises:
        InputError: it is missing, damaged, foreign, or of a newer format.
    """
    path = checkpoint / MANIFEST
    try:
        with open_regular(path) as file:
            text = file.read(MOST_TEXT_BYTES).decode()
        stamp = _Stamp.model_validate_json(text)
        if stamp.format > FORMAT:
            raise InputError(
                f"{path} has format {stamp.format}, written by Convoy {stamp.convoy}; this is Convoy {__version__}, which "
                f"reads formats up to {FORMAT}: update Convoy"
            )
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{path} describes no checkpoint, or was truncated: {where}: {first['msg']}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} describes no checkpoint, or was damaged: it is not text") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    own, wanted = manifest.own_sha256, {MODEL, *([OPTIMIZER] if manifest.optimizer is not None else [])}
    if own is not None and _sha256(text.replace(f'"own_sha256": "{own}"', _UNSIGNED)) != own:
        raise InputError(f"{path} is not the file that was written: its own checksum does not fit")
    if set(manifest.files) - {AVERAGE} != wanted:
        raise InputError(
            f"{path} names the files {shown(sorted(manifest.files))}: a checkpoint has {', '.join(sorted(wanted))} beside it"
        )
    return manifest


def read_checked(checkpoint: Path) -> Manifest:
    """Read checkpoint.json, and verify size and checksum of all other files.

    Raises:
        InputError: as `read_manifest`; or names the file, what it is and what it should be.
    """
    manifest = read_manifest(checkpoint)
    for name, expected in manifest.files.items():
        path = checkpoint / name
        try:
            with open_regular(path) as file:
                sha256, size_bytes = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        if size_bytes != expected.size_bytes:
            raise InputError(f"{path} has {size_bytes} bytes, and was written with {expected.size_bytes}")
        if sha256 != expected.sha256:
            raise InputError(f"{path} is not the file that was written: its sha256 is {sha256}, not {expected.sha256}")
    return manifest


# --- folders of a run ------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    if not os.path.isdir(folder):
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_number)


def latest(folder: Path | str) -> Path | None:
    """Return the newest checkpoint of a run, if any. It is complete; only loading verifies its content."""
    return next(reversed(checkpoints(Path(folder))), None)


def best(folder: Path) -> Path | None:
    """Return the checkpoint with the highest score, the first of equals; None if none has a score."""
    read = [(_readable(path), path) for path in checkpoints(folder)]
    scored = [(each.score, path) for each, path in read if each is not None and each.score is not None]
    return max(scored, key=lambda row: row[0])[1] if scored else None


def is_checkpoint(path: Path) -> bool:
    """Return whether a folder is a checkpoint, by its name or its content."""
    return _NAME.fullmatch(path.name) is not None or os.path.exists(path / MANIFEST)


def run_folder(path: Path) -> Path:
    """Return the folder of a run, given that or one of its checkpoints (`best` too).

    Raises:
        InputError: a checkpoint that was copied under another name: its run is unknown.
    """
    if not is_checkpoint(path):
        return path
    real = Path(os.path.realpath(path)) if path.is_symlink() else path
    if _NAME.fullmatch(real.name) is None:
        fresh = shlex.quote(f"{path}-run")
        place = shlex.quote(f"{path}-run/000001-step-{read_manifest(path).progress.step}")
        raise InputError(
            f"{path} is a checkpoint under a name of its own: put it into the folder of a new run, mkdir {fresh} && cp -r "
            f"{shlex.quote(str(path))} {place}, and give {place}"
        )
    return real.parent


@contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """Make an empty folder for a new checkpoint. The end of the block removes it, unless it was published.

    Raises:
        OSError: the folder cannot be made, or what a killed process left behind cannot be removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_behind in (folder / _DRAFT, folder / _GONE):
        if left_behind.is_symlink():  # never remove what it points to
            left_behind.unlink()
        elif left_behind.exists():
            shutil.rmtree(left_behind)
    path = folder / _DRAFT
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def publish(path: Path, step: int) -> Path:
    """Give a draft whose files are on the disk its final name, which makes it the latest checkpoint."""
    folder = path.parent
    _sync_folder(path)
    number = 1 + max((_number(each) for each in checkpoints(folder)), default=0)
    target = path.rename(folder / f"{number:06d}-step-{step}")
    _sync_folder(folder)
    return target


def tidy(folder: Path, keep: int) -> None:
    """Point `best` to the best checkpoint. Remove all but that, the last `keep`, and the last one with finite weights.

    Raises:
        OSError: with the file's name.
    """
    favourite, kept = best(folder), checkpoints(folder)
    finite = next((path for path in reversed(kept) if (read := _readable(path)) is not None and read.finite), None)
    if favourite is not None:
        link = folder / _LINK
        link.unlink(missing_ok=True)
        link.symlink_to(favourite.name)
        link.replace(folder / BEST)
    for path in kept[:-keep]:
        if path not in (favourite, finite):
            # Renamed first: a half removed folder must not look like a checkpoint.
            shutil.rmtree(path.rename(folder / _GONE))
    _sync_folder(folder)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _readable(path: Path) -> Manifest | None:
    with suppress(InputError):
        return read_manifest(path)
    return None


# --- disk ------------------------------------------------------------------------------------------------------------


@dataclass
class Sink:
    """A file that is being written, with its size and checksum so far."""

    file: BinaryIO
    size_bytes: int = 0
    unsynced_bytes: int = 0
    digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.size_bytes += len(data)
        self.unsynced_bytes += len(data)
        if self.unsynced_bytes > SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.unsynced_bytes = 0

    def written(self) -> Written:
        return Written(self.size_bytes, self.digest.hexdigest())


@contextmanager
def new_file(path: Path) -> Iterator[Sink]:
    """Create a file; it is on the disk when the block ends. OSError with the file's name."""
    with _named(path), path.open("xb") as file:
        sink = Sink(file)
        yield sink
        sink.sync()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _named(folder):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError, which lacks it for an open file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
