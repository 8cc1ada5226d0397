"""The folder of a run, with one folder per checkpoint (`000001-step-100`); `best` links to one.

A checkpoint is written under a temporary name and renamed when it is complete on the disk. A renamed checkpoint is never
changed: a run that returns to an older one only adds higher numbers. One run at a time writes into a folder. Each checkpoint
has a manifest: its progress, files with checksums, and settings of optimizers and schedules as JSON.
"""

import errno
import fcntl
import hashlib
import math
import os
import re
import shlex
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from convoy._version import __version__
from convoy.errors import InputError, shown
from convoy.files import MOST_TEXT_BYTES, open_regular

FORMAT = 1

MANIFEST = "checkpoint.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
AVERAGE = "average.safetensors"  # for users; loading takes the averages from the optimizer's file

MOST_NUMBERS = 10_000  # entries of a tensor in settings: larger ones would make the JSON file unreadable

_Count = Annotated[int, Field(ge=0, le=2**53)]


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Progress:
    """The position of a run: optimizer steps done, the epoch of the next batch (from 0), and batches of that epoch done."""

    step: _Count = 0
    epoch: _Count = 0
    batch: _Count = 0


@dataclass(frozen=True, slots=True)
class Written:
    size_bytes: int
    sha256: str


class SavedGroup(_Saved):
    parameters: list[str]
    settings: dict[str, Any]


class SavedOptimizer(_Saved):
    """An optimizer without its tensors: the name of its class, parameter groups, and the rows of `ModelShards.state_rows`."""

    name: str
    groups: list[SavedGroup]
    state: dict[str, dict[str, dict[str, Any]]]

    def tensors(self) -> list[tuple[str, str, torch.dtype]]:
        """Return (parameter, state name, type) of each tensor in the optimizer's file."""
        rows = [(key, name, row) for key, state in self.state.items() for name, row in state.items()]
        return [(key, name, torch_dtype(row["dtype"])) for key, name, row in rows if row["kind"] == "tensor"]


class SavedState(_Saved):
    name: str
    state: dict[str, Any]


class Manifest(_Saved):
    """The content of checkpoint.json.

    Attributes:
        settings: values that must be the same when the run is resumed, e.g. seed and batch.
        own_sha256: checksum of this file without this field's digits; None in files of old versions.
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
        text = self.model_copy(update={"own_sha256": ""}).model_dump_json(indent=1) + "\n"
        return text.replace(_UNSIGNED, _UNSIGNED[:-1] + _sha256(text) + '"')


_UNSIGNED = '"own_sha256": ""'


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(checkpoint: Path) -> Manifest:
    """Read checkpoint.json. InputError if it is missing, damaged, not Convoy's, or of a newer format."""
    path = checkpoint / MANIFEST
    try:
        with open_regular(path) as file:
            text = file.read(MOST_TEXT_BYTES).decode()
        newer = re.search(r'"format": *(\d{1,9}),\s*"convoy": *"([^"]{1,99})"', text)
        if newer is not None and int(newer[1]) > FORMAT:
            raise InputError(
                f"{path} has format {newer[1]}, written by Convoy {newer[2]}; this is Convoy {__version__}, which reads "
                f"formats up to {FORMAT}: update Convoy"
            )
        manifest = Manifest.model_validate_json(text)
    except (ValidationError, UnicodeDecodeError) as error:
        why = "it is not text"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
        raise InputError(f"{path} describes no checkpoint, or was damaged: {why}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    own, wanted = manifest.own_sha256, {MODEL, *([OPTIMIZER] if manifest.optimizer is not None else [])}
    if own is not None and _sha256(text.replace(f'"own_sha256": "{own}"', _UNSIGNED)) != own:
        raise InputError(f"{path} is not the file that was written: its own checksum does not fit")
    if set(manifest.files) - {AVERAGE} != wanted:
        raise InputError(f"{path} names the files {shown(sorted(manifest.files))}: a checkpoint has {sorted(wanted)}")
    return manifest


def read_checked(checkpoint: Path) -> Manifest:
    """Read checkpoint.json, and verify size and checksum of the other files. InputError as `read_manifest`."""
    manifest = read_manifest(checkpoint)
    for name, expected in manifest.files.items():
        path = checkpoint / name
        try:
            with open_regular(path) as file:
                sha256, size_bytes = hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        if Written(size_bytes, sha256) != expected:
            there = f"{size_bytes} bytes with the sha256 {sha256}, not {expected.size_bytes} with {expected.sha256}"
            raise InputError(f"{path} is not the file that was written: it has {there}")
    return manifest


def encode(value: Any, what: str) -> Any:
    """Convert numbers, text, small tensors, and lists, tuples and mappings of them to JSON. InputError for anything else.

    A type that JSON lacks becomes an object whose first key begins with "!".
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"!float": str(value)}
        case Tensor() if value.numel() <= MOST_NUMBERS:
            return {"!tensor": encode(value.tolist(), what), "dtype": str(value.dtype).removeprefix("torch.")}
        case list():
            return [encode(each, what) for each in value]
        case tuple():
            return {"!tuple": [encode(each, what) for each in value]}
        case Mapping():
            is_plain = all(isinstance(key, str) and not key.startswith("!") for key in value)
            if is_plain and not isinstance(value, Counter):
                return {key: encode(each, what) for key, each in value.items()}
            pairs = [[encode(key, what), encode(each, what)] for key, each in value.items()]
            return {"!counter" if isinstance(value, Counter) else "!pairs": pairs}
    size = f" of {value.numel()} numbers" if isinstance(value, Tensor) else ""
    raise InputError(
        f"{what} holds a {type(value).__name__}{size}, which a checkpoint cannot store: it stores numbers, text, tensors "
        f"of at most {MOST_NUMBERS} numbers, and lists and mappings of them; leave it out, and set it again on resume"
    )


def decode(coded: Any) -> Any:
    """Return the value that `encode` converted, with tensors on the CPU. ValueError or TypeError for other JSON."""
    match coded:
        case {"!float": text}:
            return float(text)
        case {"!tensor": numbers, "dtype": dtype}:
            return torch.tensor(decode(numbers), dtype=torch_dtype(dtype))
        case {"!tuple": items}:
            return tuple(decode(items))
        case {"!counter": rows}:
            return Counter(dict(decode(rows)))
        case {"!pairs": rows}:
            return dict(decode(rows))
        case dict():
            return {key: decode(each) for key, each in coded.items()}
        case list():
            return [decode(each) for each in coded]
        case _:
            return coded


def torch_dtype(name: object) -> torch.dtype:
    """Return the torch type of a name such as "float32". ValueError where torch has none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no type {shown(name)}")
    return dtype


KEEP = 3  # latest checkpoints, besides the best and the last one with finite weights

BEST, LOCK = "best", ".lock"
_DRAFT, _LINK = ".draft", ".best"
_TRACES = {LOCK, _DRAFT, "log.jsonl", "run.toml"}  # of a run that ended before its first checkpoint

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
    """Return the checkpoint from which a run starts; None: from the beginning. InputError: see `Checkpointer.begin`."""
    found = folder if is_checkpoint(folder) else latest(folder)
    if found is not None and not resume:
        raise InputError(
            f"{folder} holds the checkpoint {found.name} of another run: resume it (--resume), or name another folder"
        )
    run_folder(folder)  # refuses a checkpoint of an unknown run
    names = {path.name for path in folder.iterdir()} if os.path.isdir(folder) else set()
    if found is None and resume and names and not names & _TRACES:
        raise InputError(
            f"there is nothing to resume: {folder} is a folder of something else ({shown(min(names))}, ...); give that of an "
            "earlier run, or start without resuming"
        )
    return found


def publish(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Call `write` with an empty folder, and rename this to the latest checkpoint. If `write` fails, remove the folder."""
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
    """Link `best` to the best checkpoint. Remove all others but the last `KEEP` and the last one with finite weights."""
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
            # Rename it first, because a partly removed folder must not look like a checkpoint.
            shutil.rmtree(path.rename(folder / _DRAFT))
    _sync(folder)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_locked: dict[Path, int] = {}  # file descriptors of lock files


def hold(folder: Path) -> bool:
    """Lock a folder for this process until `release`. Return False if it already has the lock. OSError names another owner."""
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
        warnings.warn(f"{why}: let one run at a time write into it", stacklevel=2)
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
    is_new = hold(folder)
    try:
        yield
    finally:
        if is_new:
            release(folder)
