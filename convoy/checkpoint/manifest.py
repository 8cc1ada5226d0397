"""The manifest of a checkpoint: its progress, files with checksums, and settings of optimizers and schedules as JSON."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping
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
AVERAGE = "average.safetensors"
"""The averages under the keys of the weights, for users. Loading takes the averages from the optimizer's file."""

MOST_NUMBERS = 10_000
"""A larger tensor is no setting, and would make the JSON file unreadable."""

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
        settings: what must be the same when the run is resumed, e.g. seed and batch.
        score: of the evaluation at this point; the greater the better.
        others: states of the "schedule", the "scaler", the "loader".
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
        text = self.model_copy(update={"own_sha256": ""}).model_dump_json(indent=1) + "\n"
        return text.replace(_UNSIGNED, _UNSIGNED[:-1] + _sha256(text) + '"')


_UNSIGNED = '"own_sha256": ""'


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class _Stamp(BaseModel):
    format: int
    convoy: str


def read_manifest(checkpoint: Path) -> Manifest:
    """Read checkpoint.json. InputError if it is missing, damaged, foreign, or of a newer format."""
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
        names = ", ".join(sorted(wanted))
        raise InputError(f"{path} names the files {shown(sorted(manifest.files))}: a checkpoint has {names}")
    return manifest


def read_checked(checkpoint: Path) -> Manifest:
    """Read checkpoint.json, and verify size and checksum of all other files. InputError as `read_manifest`."""
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


# --- settings as JSON --------------------------------------------------------------------------------------------------


def encode(value: Any, what: str) -> Any:
    """Return numbers, text, small tensors, and lists, tuples and mappings of them as JSON. InputError for anything else.

    A type that JSON lacks becomes an object whose first key begins with "!". `what` names the value in an error.
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
    """Return the value that `encode` turned into this JSON, with tensors on the CPU. ValueError or TypeError for other JSON."""
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
