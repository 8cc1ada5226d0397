"""checkpoint.json: everything of a checkpoint but its tensors, and what its files must be to be the ones that were written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from convoy._version import __version__
from convoy.checkpoint.disk import Written, fingerprint
from convoy.errors import InputError

FORMAT = 1
MANIFEST = "checkpoint.json"
MODEL = "model.safetensors"
AVERAGE = "average.safetensors"
"""Beside the weights, where they are averaged: the averages under the same keys, which tests use. Nothing reads it back: what
goes on is in the optimizer's file."""
OPTIMIZER = "optimizer.safetensors"

_Count = Annotated[int, Field(ge=0)]
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come; also the place in the data where it goes on.

    Attributes:
        step: steps of the optimizer done since the beginning.
        epoch: the epoch, from 0, that the next batch belongs to.
        batch: batches of that epoch done.
    """

    step: _Count = 0
    epoch: _Count = 0
    batch: _Count = 0


class SavedGroup(BaseModel):
    """One parameter group: names in its order, and its settings as `values.encode` writes them."""

    model_config = _STRICT
    parameters: list[str]
    settings: dict[str, Any]


class SavedOptimizer(BaseModel):
    """An optimizer but for its tensors.

    Attributes:
        name: of its class.
        state: by parameter and name: rows as `execute.optimizer.described` makes them. A tensor lies in the optimizer's file.
    """

    model_config = _STRICT
    name: str
    groups: list[SavedGroup]
    state: dict[str, dict[str, dict[str, Any]]]

    def tensors(self) -> list[tuple[str, str, torch.dtype]]:
        """(parameter, name, type) of each tensor that lies in the optimizer's file."""
        rows = [(key, name, row) for key, state in self.state.items() for name, row in state.items()]
        return [(key, name, getattr(torch, row["dtype"])) for key, name, row in rows if row["kind"] == "tensor"]


class SavedState(BaseModel):
    """A schedule or a scaler: the name of its class, and its state as `values.encode` writes it."""

    model_config = _STRICT
    name: str
    state: dict[str, Any]


class Manifest(BaseModel):
    """What checkpoint.json says.

    Attributes:
        settings: whatever decides how the run goes on, e.g. seed and batch; compared when it is resumed.
        score: of the evaluation at this point; the greater the better.
        others: what else has a state, by what it is for: "schedule", "scaler".
        files: the others in the folder.
    """

    model_config = _STRICT
    format: int = FORMAT
    convoy: str = __version__
    torch: str = str(torch.__version__)
    progress: Progress
    score: float | None
    settings: dict[str, Any]
    optimizer: SavedOptimizer | None
    others: dict[str, SavedState]
    files: dict[str, Written]

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"


class _Stamp(BaseModel):
    """What every format has."""

    format: int
    convoy: str


def read_manifest(checkpoint: Path) -> Manifest:
    """Read checkpoint.json.

    Raises:
        InputError: it is missing, truncated, foreign, or of a newer format.
    """
    path = checkpoint / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        stamp = _Stamp.model_validate_json(text)
        if stamp.format > FORMAT:
            raise InputError(
                f"{path} has format {stamp.format}, written by Convoy {stamp.convoy}; this is Convoy {__version__}, which "
                f"reads formats up to {FORMAT}: update Convoy"
            )
        return Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{path} is no checkpoint's description, or was truncated: {field}: {first['msg']}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no checkpoint's description, or was damaged: it is not text") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def check_files(checkpoint: Path, manifest: Manifest) -> None:
    """Read all files of a checkpoint once, to see that they are the ones that were written.

    Raises:
        InputError: names the file, what it is and what it should be.
    """
    for name, expected in manifest.files.items():
        path = checkpoint / name
        try:
            found = fingerprint(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        if found.size_bytes != expected.size_bytes:
            raise InputError(f"{path} has {found.size_bytes} bytes, and was written with {expected.size_bytes}")
        if found.sha256 != expected.sha256:
            raise InputError(
                f"{path} is not the file that was written: its sha256 is {found.sha256}, not {expected.sha256}"
            )
