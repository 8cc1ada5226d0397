"""Saving: the pieces travel to device 0, tensor by tensor, and it writes them as they come."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from convoy.checkpoint.folder import (
    AVERAGE,
    BEST,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Manifest,
    Progress,
    SavedGroup,
    SavedOptimizer,
    SavedState,
    draft,
    is_checkpoint,
    latest,
    new_file,
    publish,
    tidy,
)
from convoy.checkpoint.lock import holding
from convoy.checkpoint.tensors import Parts, Spec, Stream, broken, file_order, write_tensors
from convoy.checkpoint.values import encode
from convoy.comm.agreement import agree_on, from_first
from convoy.errors import InputError
from convoy.runtime.average import WeightAverage

KEEP = 3

OF_THE_MACHINE = ("foreach", "fused", "capturable", "param_names")
"""Settings of an optimizer that say how it computes, not what: they are those of the machine it runs on."""


class Stateful(Protocol):
    """What has a state of its own, such as the schedules of torch.optim.lr_scheduler, and torch.amp.GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Saved:
    """What came of saving.

    Attributes:
        path: the folder of the checkpoint, as device 0 names it; None: it could not be written.
        why: then, in words, with path, bytes and remedy.
    """

    path: Path | None
    why: str = ""


def save_checkpoint(
    folder: Path | str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    progress: Progress | None = None,
    *,
    schedule: Stateful | None = None,
    scaler: Stateful | None = None,
    settings: Mapping[str, Any] | None = None,
    score: float | None = None,
    keep: int = KEEP,
    tell: Callable[[str], None] | None = None,
) -> Path:
    """Save a run between two steps. Every device calls it; device 0 writes, into a folder of its own machine.

    The checkpoint appears under its name when all of it is on the disk. Until then, and whatever happens, those before it stay
    as they are. Gradients and random numbers are not saved. No device needs room for more than one whole tensor.

    Args:
        folder: of the run; it is made where it is missing.
        model: a distributed model, or an ordinary one on one device.
        optimizer: of the model's parameters; None: only the weights are saved.
        progress: how far the run is.
        schedule: of learning rates, as in torch.optim.lr_scheduler.
        scaler: of the loss, for fp16.
        settings: what JSON can hold, and must be the same when the run goes on: the seed of the loader, the batch, the data.
        score: of an evaluation at this point; the greater the better. `best` in the folder leads to the highest.
        keep: the last few stay, the best, and the last one whose weights are all numbers; older ones are removed.
        tell: is called on device 0 with a line of text where the checkpoint was saved and something beside it went wrong;
            default: a warning.

    Returns:
        the folder of the checkpoint, as device 0 names it.

    Raises:
        InputError: it cannot be written (the message says which earlier one is still there), another run writes into the
            folder, or it holds something that a file cannot; on every device.
        MismatchError: the devices are at different steps.
        DeviceLostError: a device did not take part; device 0 needed longer than the group's time limit for a tensor.
    """
    saved = attempt(
        Path(folder), model, optimizer, progress or Progress(), schedule, scaler, settings or {}, score, keep, tell
    )
    if saved.path is None:
        raise InputError(saved.why)
    return saved.path


@torch.no_grad()
def attempt(
    folder: Path, model: nn.Module, optimizer: Optimizer | None, progress: Progress, schedule: Stateful | None,
    scaler: Stateful | None, settings: Mapping[str, Any], score: float | None, keep: int, tell: Callable[[str], None] | None,
) -> Saved:  # fmt: skip
    """As `save_checkpoint`, but a disk that cannot take the checkpoint is a result, the same on every device, and no error."""
    if keep < 1:
        raise InputError(f"keep={keep}: a run keeps its last checkpoint at least; give 1 or more")
    parts = Parts.of(model)
    agree_on(parts.group, "checkpoint", json.dumps([asdict(progress), score]), "saves another checkpoint")
    saved = None if optimizer is None else _described(parts, optimizer)
    description = Manifest(
        progress=progress, score=score, settings=encode(dict(settings), "settings"), optimizer=saved,
        others=_states({"schedule": schedule, "scaler": scaler}), files={},
    )  # fmt: skip
    streams = _streams(parts, optimizer, saved)
    if not parts.first:
        _drain(streams)
    work = partial(_write, folder, streams, description, parts, keep, tell or warnings.warn)
    path, why = from_first(parts.group, "checkpoint: written", work)
    return Saved(None if path is None else Path(path), why)


def _described(parts: Parts, optimizer: Optimizer) -> SavedOptimizer:
    name, groups = type(optimizer).__name__, []
    for names, group in zip(parts.group_names(optimizer), optimizer.param_groups, strict=True):
        kept = {key: value for key, value in group.items() if key not in ("params", *OF_THE_MACHINE)}
        groups.append(SavedGroup(parameters=names, settings=encode(kept, f"a parameter group of {name}")))
    state = encode(parts.state_rows(optimizer), f"the state of {name}")
    return SavedOptimizer(name=name, groups=groups, state=state)


def _states(others: Mapping[str, Stateful | None]) -> dict[str, SavedState]:
    rows = [(what, type(each).__name__, each.state_dict()) for what, each in others.items() if each is not None]
    return {what: SavedState(name=name, state=encode(state, f"the state of {name}")) for what, name, state in rows}


def _streams(parts: Parts, optimizer: Optimizer | None, saved: SavedOptimizer | None) -> dict[str, Stream]:
    """The tensors of each file: the model's; the optimizer's, as "parameter/name"; and the model with averages in place of its
    weights (what is not averaged, such as statistics, as the model has it)."""
    files = {MODEL: _stream(parts, {key: (key, piece) for key, piece in parts.pieces.items()})}
    if optimizer is not None and saved is not None:
        state = {key: optimizer.state.get(parameter, {}) for parameter, key in parts.names.items()}
        rows = {
            (key, name): state[key][name] if parts.holds(key) else torch.empty(0, dtype=dtype)
            for key, name, dtype in saved.tensors()
        }
        files[OPTIMIZER] = _stream(parts, {f"{key}/{name}": (key, piece) for (key, name), piece in rows.items()})
        averages = {key: piece for (key, name), piece in rows.items() if name == WeightAverage.STATE}
        if averages:
            whole = {key: (key, averages.get(parts.first_names[key], piece)) for key, piece in parts.pieces.items()}
            files[AVERAGE] = _stream(parts, whole)
    return files


def _stream(parts: Parts, rows: Mapping[str, tuple[str, torch.Tensor]]) -> Stream:
    """Tensors by their names in a file: each lies like the model's tensor of that key, and this is this device's piece."""
    specs = file_order({name: Spec(parts.shapes[key], piece.dtype) for name, (key, piece) in rows.items()})
    pieces = (rows[name] for name in specs)
    return Stream(specs, (parts.gather(key, piece.to(parts.group.torch_device)) for key, piece in pieces))


def _drain(streams: Mapping[str, Stream]) -> None:
    """Take part in all moves that are left."""
    for stream in streams.values():
        for _ in stream.tensors:
            pass


def _write(
    folder: Path, streams: Mapping[str, Stream], description: Manifest, parts: Parts, keep: int,
    tell: Callable[[str], object],
) -> tuple[str | None, str]:  # fmt: skip
    """On device 0: write the checkpoint and tidy the folder; the fields of `Saved`."""
    size_bytes = sum(spec.size_bytes for stream in streams.values() for spec in stream.specs.values())
    try:
        if is_checkpoint(folder):
            raise InputError(f"{folder} is a checkpoint itself: name the folder of the run, {folder.parent}")
        folder.mkdir(parents=True, exist_ok=True)
        with holding(folder):
            written = _write_files(folder, streams, description, parts)
            try:
                tidy(folder, keep)
            except OSError as error:
                tell(
                    f"{written} is saved, but {error.filename or folder} could not be tidied ({error.strerror}): "
                    f"{BEST} may lead to an earlier one, and old checkpoints may stay; remove what is in the way"
                )
            return str(written), ""
    except (OSError, InputError) as error:
        _drain(streams)  # the others are in the middle of sending
        if isinstance(error, OSError):
            return None, _unwritten(folder, description.progress, size_bytes, error)
        raise


def _write_files(folder: Path, streams: Mapping[str, Stream], description: Manifest, parts: Parts) -> Path:
    faults: list[str] = []

    def watched(stream: Stream) -> Iterator[torch.Tensor]:
        for name, tensor in zip(stream.specs, stream.tensors, strict=True):
            faults.append(broken(name, tensor, is_parameter=parts.is_parameter(name)))
            yield tensor

    streams = {**streams, MODEL: replace(streams[MODEL], tensors=watched(streams[MODEL]))}
    with draft(folder) as path:
        files = {name: write_tensors(path / name, stream) for name, stream in streams.items()}
        with new_file(path / MANIFEST) as sink:
            whole = description.model_copy(update={"files": files, "finite": not any(faults)})
            sink.write(whole.to_json().encode())
        return publish(path, description.progress.step)


def _unwritten(folder: Path, progress: Progress, size_bytes: int, error: OSError) -> str:
    before, room = None, ""
    with suppress(OSError):
        room = f", {shutil.disk_usage(folder).free:,} are free there"
        before = latest(folder)
    what = f"cannot write the checkpoint of step {progress.step} into {folder}: {error.strerror or error} ({error.filename})"
    remedy = f"it has {size_bytes:,} bytes{room}: make room there, or name another folder"
    return f"{what}; {remedy}; " + ("no earlier checkpoint is there" if before is None else f"{before} is as it was")
