"""Saving: every device sends its shards to device 0, tensor by tensor, which writes them as they arrive."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
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
from convoy.checkpoint.tensors import Parts, Spec, Stream, file_order, write_tensors
from convoy.checkpoint.values import encode
from convoy.comm.collectives import agree_on, from_first
from convoy.errors import InputError
from convoy.runtime.average import WeightAverage

KEEP = 3

OF_THE_MACHINE = ("foreach", "fused", "capturable", "param_names")
"""Optimizer settings that say how it computes, not what: those of the present machine apply."""


class Stateful(Protocol):
    """An object with a state of its own, such as a schedule of torch.optim.lr_scheduler, or torch.amp.GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds; see `save_checkpoint`."""

    model: nn.Module
    optimizer: Optimizer | None = None
    schedule: Stateful | None = None
    scaler: Stateful | None = None
    settings: Mapping[str, Any] | None = None


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
) -> Path:
    """Save a run between two steps. Every device calls it; device 0 writes, into a folder of its own machine.

    The checkpoint appears under its name when all of it is on the disk; earlier ones stay as they are, whatever happens.
    Gradients and random numbers are not saved. No device needs room for more than one whole tensor.

    Args:
        folder: of the run; made if missing.
        model: a distributed model, or an ordinary one on one device.
        optimizer: of the model's parameters; None: only the weights are saved.
        progress: how far the run is.
        schedule: of learning rates, as in torch.optim.lr_scheduler.
        scaler: of the loss, for fp16.
        settings: JSON values that must be the same on resume: the loader's seed, the batch size, the data.
        score: of an evaluation at this point; the greater the better. `best` in the folder links to the highest.
        keep: how many checkpoints stay, besides the best and the last one with finite weights.

    Returns:
        the folder of the checkpoint, on device 0's machine.

    Raises:
        InputError: it cannot be written (the message names the latest earlier one), another run writes into the folder, or
            it holds something that a file cannot; on every device.
        MismatchError: the devices are at different steps.
        DeviceLostError: a device did not take part; device 0 needed longer than the group's time limit for a tensor.
    """
    contents = Contents(model, optimizer, schedule, scaler, settings)
    path, why = attempt(Path(folder), contents, progress or Progress(), score, keep, warnings.warn)
    if path is None:
        raise InputError(why)
    return path


@torch.no_grad()
def attempt(
    folder: Path,
    contents: Contents,
    progress: Progress,
    score: float | None,
    keep: int,
    tell: Callable[[str], object],
) -> tuple[Path | None, str]:
    """Save as `save_checkpoint`. If the disk refuses, return (None, why) on every device instead of raising an error.

    Args:
        tell: called on device 0 with a line of text if old checkpoints could not be removed.
    """
    if keep < 1:
        raise InputError(f"keep={keep}: a run keeps its last checkpoint at least; give 1 or more")
    parts, optimizer = Parts.of(contents.model), contents.optimizer
    agree_on(parts.group, "checkpoint", json.dumps([asdict(progress), score]), "saves another checkpoint")
    saved = None if optimizer is None else _described(parts, optimizer)
    others = {"schedule": contents.schedule, "scaler": contents.scaler}
    manifest = Manifest(
        progress=progress,
        score=score,
        settings=encode(dict(contents.settings or {}), "settings"),
        optimizer=saved,
        others={
            what: SavedState(
                name=type(each).__name__, state=encode(each.state_dict(), f"the state of {type(each).__name__}")
            )
            for what, each in others.items()
            if each is not None
        },
        files={},
    )
    streams = _streams(parts, optimizer, saved)
    if not parts.first:
        _drain(streams)

    def write() -> tuple[str | None, str]:
        try:
            return str(_write(folder, streams, manifest, parts, keep, tell)), ""
        except (OSError, InputError) as error:
            _drain(streams)  # the other devices are in the middle of sending
            if isinstance(error, InputError):
                raise
            size_bytes = sum(spec.size_bytes for stream in streams.values() for spec in stream.specs.values())
            return None, _unwritten(folder, progress, size_bytes, error)

    path, why = from_first(parts.group, "checkpoint: written", write)
    return None if path is None else Path(path), why


def _described(parts: Parts, optimizer: Optimizer) -> SavedOptimizer:
    name, groups = type(optimizer).__name__, []
    for names, group in zip(parts.group_names(optimizer), optimizer.param_groups, strict=True):
        kept = {key: value for key, value in group.items() if key not in ("params", *OF_THE_MACHINE)}
        groups.append(SavedGroup(parameters=names, settings=encode(kept, f"a parameter group of {name}")))
    state = encode(parts.state_rows(optimizer), f"the state of {name}")
    return SavedOptimizer(name=name, groups=groups, state=state)


def _streams(parts: Parts, optimizer: Optimizer | None, saved: SavedOptimizer | None) -> dict[str, Stream]:
    """Return the tensors of each file: the model's, the optimizer's ("parameter/name"), and the model with averaged weights."""
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


def _stream(parts: Parts, rows: Mapping[str, tuple[str, Tensor]]) -> Stream:
    """Stream tensors, given by name in the file as (key with the same layout, local shard)."""
    specs = file_order({name: Spec(parts.shapes[key], piece.dtype) for name, (key, piece) in rows.items()})
    pieces = (rows[name] for name in specs)
    return Stream(specs, (parts.gather(key, piece.to(parts.group.torch_device)) for key, piece in pieces))


def _drain(streams: Mapping[str, Stream]) -> None:
    """Take part in the remaining gathers."""
    for stream in streams.values():
        for _ in stream.tensors:
            pass


def _write(
    folder: Path,
    streams: Mapping[str, Stream],
    manifest: Manifest,
    parts: Parts,
    keep: int,
    tell: Callable[[str], object],
) -> Path:
    if is_checkpoint(folder):
        raise InputError(f"{folder} is a checkpoint itself: name the folder of the run, {folder.parent}")
    parameters, finite = set(parts.names.values()), True

    def watched(stream: Stream) -> Iterator[Tensor]:
        nonlocal finite
        for name, tensor in zip(stream.specs, stream.tensors, strict=True):
            # Infinity in a buffer may be meant, as in the mask of an attention.
            is_parameter = parts.first_names[name] in parameters
            bad = tensor.isnan().any() or (is_parameter and tensor.isinf().any())
            finite = finite and not bool(bad)
            yield tensor

    streams = {**streams, MODEL: replace(streams[MODEL], tensors=watched(streams[MODEL]))}
    folder.mkdir(parents=True, exist_ok=True)
    with holding(folder):
        with draft(folder) as path:
            files = {name: write_tensors(path / name, stream) for name, stream in streams.items()}
            with new_file(path / MANIFEST) as sink:
                sink.write(manifest.model_copy(update={"files": files, "finite": finite}).to_json().encode())
            written = publish(path, manifest.progress.step)
        try:
            tidy(folder, keep)
        except OSError as error:
            tell(
                f"{written} is saved, but {error.filename or folder} could not be tidied ({error.strerror}): "
                f"{BEST} may lead to an earlier one, and old checkpoints may stay; remove what is in the way"
            )
    return written


def _unwritten(folder: Path, progress: Progress, size_bytes: int, error: OSError) -> str:
    before, room = None, ""
    with suppress(OSError):
        room = f", {shutil.disk_usage(folder).free:,} are free there"
        before = latest(folder)
    what = f"cannot write the checkpoint of step {progress.step} into {folder}: {error.strerror or error} ({error.filename})"
    remedy = f"it has {size_bytes:,} bytes{room}: make room there, or name another folder"
    return f"{what}; {remedy}; " + ("no earlier checkpoint is there" if before is None else f"{before} is as it was")
