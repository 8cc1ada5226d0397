"""Loading: device 0 finds and checks a checkpoint, then sends every device its shards, tensor by tensor."""

import itertools
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from convoy.checkpoint.folder import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    Manifest,
    Progress,
    SavedOptimizer,
    checkpoints,
    is_checkpoint,
    latest,
    read_checked,
)
from convoy.checkpoint.save import Stateful
from convoy.checkpoint.tensors import Parts, Spec, read_specs, reading
from convoy.checkpoint.values import decode, dtype_named, encode
from convoy.comm.collectives import from_first
from convoy.errors import InputError, shortened, shown
from convoy.runtime.marks import mark_changed

_SHOWN = 3


@torch.no_grad()
def load_checkpoint(
    folder: Path | str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    schedule: Stateful | None = None,
    scaler: Stateful | None = None,
    settings: Mapping[str, Any] | None = None,
    missing_ok: bool = False,
) -> Progress:
    """Continue a saved run on any fleet, with any plan. Every device calls it; only device 0 reads files.

    The checkpoint is checked before anything changes. The optimizer gets the saved settings (learning rate, momentum), not
    those it was made with.

    Args:
        folder: of the run, for its latest checkpoint; or a checkpoint.
        model: the net that was saved, distributed or not.
        optimizer: of the class that was saved, with the same parameter groups; None: only the weights are loaded.
        schedule, scaler: of the classes that were saved; used with an optimizer only.
        settings: compared with the saved settings of the same names.
        missing_ok: return `Progress()` and change nothing if the run has no checkpoint yet.

    Returns:
        how far the run was, and where in the data it goes on.

    Raises:
        InputError: there is no checkpoint, or it is damaged (the message names an intact earlier one), of a newer Convoy, of
            another net, optimizer or setting, or its weights are NaN or infinite; on every device.
        DeviceLostError: a device did not take part; device 0 needed longer than the group's time limit to check the files.
    """
    parts = Parts.of(model)
    groups = None if optimizer is None else parts.group_names(optimizer)
    others = {"schedule": schedule, "scaler": scaler}

    def find() -> list[str] | None:
        if missing_ok and not is_checkpoint(Path(folder)) and latest(folder) is None:
            return None
        path, manifest = find_checkpoint(Path(folder))
        _check_model(path, parts.specs)
        check_settings(path, manifest, encode(dict(settings or {}), "settings"))
        if optimizer is not None and groups is not None:
            _check_optimizer(path, manifest, type(optimizer).__name__, groups, parts.specs)
            _check_others(path, manifest, others)
        return [str(path), manifest.model_dump_json()]

    if (found := from_first(parts.group, "checkpoint: found", find)) is None:
        return Progress()
    path, manifest = Path(found[0]), Manifest.model_validate_json(found[1])
    types = {key: spec.dtype for key, spec in parts.specs.items()}
    with reading(path / MODEL, types, here=parts.first) as read:
        for key, own in parts.pieces.items():
            piece = parts.scatter(key, read(key))
            if piece is not None:
                own.copy_(piece)
    mark_changed(model.parameters())
    if optimizer is not None and manifest.optimizer is not None:
        _restore(parts, optimizer, manifest.optimizer, path / OPTIMIZER)
        for what, each in others.items():
            if each is not None:
                each.load_state_dict(decode(manifest.others[what].state))
    return manifest.progress


def _restore(parts: Parts, optimizer: Optimizer, saved: SavedOptimizer, path: Path) -> None:
    for group, settings in zip(optimizer.param_groups, saved.groups, strict=True):
        group.update(decode(settings.settings))
    optimizer.state.clear()
    types = {f"{key}/{name}": dtype for key, name, dtype in saved.tensors()}
    with reading(path, types, here=parts.first) as read:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = _state(parts, saved, parts.names[parameter], read)
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        # torch counts steps on the CPU, unless the optimizer runs as one kernel.
                        near = name != "step" or group.get("capturable") or group.get("fused")
                        state[name] = value.to(parameter.device if near else "cpu")
                if state:
                    optimizer.state[parameter] = state


def _state(parts: Parts, saved: SavedOptimizer, key: str, read: Callable[[str], Tensor]) -> dict[str, Any]:
    """Return the optimizer's state of a parameter, as far as this device holds it. Every device calls it."""
    state: dict[str, Any] = {}
    for name, row in decode(saved.state.get(key, {})).items():
        if row["kind"] == "tensor":
            piece = parts.scatter(key, read(f"{key}/{name}"))
            # A copy: the shard may share memory with the whole tensor, or with the file.
            state[name] = None if piece is None else piece.clone()
        elif row["kind"] == "number":
            state[name] = torch.tensor(row["value"], dtype=dtype_named(row["dtype"]))
        else:
            state[name] = row["value"]
    return state if parts.holds(key) else {}


def find_checkpoint(folder: Path) -> tuple[Path, Manifest]:
    """Return the checkpoint that a folder is, or the latest of a run, with its checksums verified.

    Raises:
        InputError: there is none, it is damaged, or its weights are not finite; names an intact earlier one.
    """
    if not os.path.isdir(folder):
        raise InputError(
            f"the folder {folder} does not exist: give that of a run which saved checkpoints, or one of these"
        )
    path = folder if is_checkpoint(folder) else latest(folder)
    if path is None:
        raise InputError(
            f"{folder} holds no checkpoint, a folder such as 000001-step-100: give the folder of a run that saved one"
        )
    try:
        manifest = read_checked(path)
    except InputError as error:
        raise InputError(f"{error}; {_instead(path)}") from None
    if not manifest.finite:
        raise InputError(
            f"the weights of the checkpoint {path} are useless: some are NaN or infinite, so the training had diverged; "
            f"{_instead(path)}. To read its tensors: safetensors.torch.load_file"
        )
    return path, manifest


def _instead(path: Path) -> str:
    """Return what the user can do without this checkpoint."""
    damaged = Path(os.path.realpath(path))
    before = itertools.takewhile(lambda other: other.name != damaged.name, checkpoints(damaged.parent))
    for other in reversed(list(before)):
        try:
            if not read_checked(other).finite:
                continue
        except InputError:
            continue
        command = f"--checkpoint {shlex.quote(str(other))} --resume"
        return f"the checkpoint before it, {other}, is whole: to go on from there give that folder ({command}); this one stays"
    return "no checkpoint before it is whole: bring the file back from a copy, or start a new run in another folder"


def _check_model(path: Path, here: Mapping[str, Spec]) -> None:
    there = read_specs(path / MODEL)
    both = [key for key in here if key in there]
    rows = [
        ("it lacks ", [key for key in here if key not in there]),
        ("it has, and this net has not, ", [key for key in there if key not in here]),
        ("", [f"{key} is {there[key]} there and {here[key]} here" for key in both if there[key] != here[key]]),
    ]
    if any(names for _, names in rows):
        different = "; ".join(what + _some(names) for what, names in rows if names)
        raise InputError(
            f"the checkpoint {path} is of another net: {different}; build the net as it was when it was saved, with the same "
            "dtype"
        )


def check_settings(path: Path, manifest: Manifest, here: Mapping[str, Any]) -> None:
    """Compare settings, as `values.encode` writes them, with the saved ones of the same names. InputError if they differ."""
    there = manifest.settings
    different = [
        f"{name} was {shown(there.get(name))} and is {shown(value)}"
        for name, value in here.items()
        if there.get(name) != value
    ]
    if different:
        raise InputError(
            f"the run of the checkpoint {path} had other settings: {_some(different)}; give the same, or start a new run "
            "in another folder"
        )


def _check_optimizer(
    path: Path, manifest: Manifest, name: str, groups: Sequence[Sequence[str]], specs: Mapping[str, Spec]
) -> None:
    saved = manifest.optimizer
    if saved is None:
        raise InputError(
            f"the checkpoint {path} was saved without an optimizer: load it without one, for the weights alone"
        )
    if saved.name != name:
        raise InputError(
            f"the checkpoint {path} was saved with {saved.name}, this run has {name}: use {saved.name}, or load the weights "
            "alone, without an optimizer"
        )
    there, here = _numbered(group.parameters for group in saved.groups), _numbered(groups)
    different = next((pair for pair in itertools.zip_longest(there, here) if pair[0] != pair[1]), None)
    if different is not None:
        raise InputError(
            f"the checkpoint {path} was saved with other groups of parameters: {different[0] or 'nothing'} there, where "
            f"{name} has {different[1] or 'nothing'} here; make the same groups, in the same order"
        )
    wanted = {f"{key}/{state}": Spec(specs[key].shape, dtype) for key, state, dtype in saved.tensors() if key in specs}
    held = read_specs(path / OPTIMIZER)
    if wanted != held or not saved.state.keys() <= specs.keys():
        odd = [key for key in {**held, **wanted} if held.get(key) != wanted.get(key)]
        raise InputError(
            f"{path / OPTIMIZER} is not what {MANIFEST} says: {_some(odd) or 'parameters of another net'}; {_instead(path)}"
        )
    try:
        decode([saved.state, *(group.settings for group in saved.groups)])
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{path / MANIFEST} is damaged: {shortened(str(error))}; {_instead(path)}") from None


def _check_others(path: Path, manifest: Manifest, others: Mapping[str, Stateful | None]) -> None:
    for what, each in others.items():
        there = manifest.others[what].name if what in manifest.others else f"no {what}"
        here = f"no {what}" if each is None else type(each).__name__
        if there != here:
            raise InputError(
                f"the checkpoint {path} was saved with {there}, this run has {here}: give the {what} that the run began "
                "with, or load the weights alone, without an optimizer"
            )


def _numbered(groups: Iterable[Sequence[str]]) -> list[str]:
    return [f"{name} in group {number}" for number, names in enumerate(groups) for name in names]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
