"""Loading: device 0 finds and checks a checkpoint, then gives every device its pieces, tensor by tensor."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from convoy.checkpoint.folder import (
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
from convoy.checkpoint.values import decode, encode
from convoy.comm.agreement import from_first
from convoy.errors import InputError

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
) -> Progress:
    """Continue a saved run: on any fleet, by any plan. Every device calls it; only device 0 reads files.

    All is checked before anything changes. The optimizer goes on with the settings it was saved with (learning rate,
    momentum), not those it was made with.

    Args:
        folder: of the run, for its latest checkpoint; or a checkpoint.
        model: the net that was saved, distributed or not.
        optimizer: of the class that was saved, with the same groups of parameters; None: only the weights are loaded.
        schedule, scaler: of the classes that were saved; with an optimizer only.
        settings: compared with those of the same names that were saved.

    Returns:
        how far the run was; the place in the data where it goes on.

    Raises:
        InputError: there is no checkpoint, or it is damaged (the message says which earlier one is whole), of a newer Convoy,
            or of another net, optimizer or setting; on every device.
        DeviceLostError: a device did not take part; device 0 needed longer than the group's time limit to check the files.
    """
    parts = Parts.of(model)
    groups = None if optimizer is None else parts.group_names(optimizer)
    others = {"schedule": schedule, "scaler": scaler}

    def find() -> list[str]:
        path, manifest = _found(Path(folder))
        _check_model(path, parts.specs)
        _check_settings(path, manifest, encode(dict(settings or {}), "settings"))
        if optimizer is not None and groups is not None:
            _check_optimizer(path, manifest, optimizer, groups)
            _check_others(path, manifest, others)
        return [str(path), manifest.model_dump_json()]

    path, text = from_first(parts.group, "checkpoint: found", find)
    manifest = Manifest.model_validate_json(text)
    types = {key: spec.dtype for key, spec in parts.specs.items()}
    with reading(Path(path) / MODEL, types, here=parts.first) as read:
        for key, own in parts.pieces.items():
            piece = parts.scatter(key, read(key))
            if piece is not None:
                own.copy_(piece)
    if optimizer is not None and manifest.optimizer is not None:
        _restore(parts, optimizer, manifest.optimizer, Path(path) / OPTIMIZER)
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
                        state[name] = value.to(_home(name, group, parameter))
                if state:
                    optimizer.state[parameter] = state


def _state(parts: Parts, saved: SavedOptimizer, key: str, read: Callable[[str], Tensor]) -> dict[str, Any]:
    """What the optimizer remembered of a parameter, as far as this device holds it."""
    state: dict[str, Any] = {}
    for name, row in decode(saved.state.get(key, {})).items():
        if row["kind"] == "tensor":
            piece = parts.scatter(key, read(f"{key}/{name}"))
            # A copy: the piece may be a part of the whole tensor, or of the file.
            state[name] = None if piece is None else piece.clone()
        elif row["kind"] == "number":
            state[name] = torch.tensor(row["value"], dtype=getattr(torch, row["dtype"]))
        else:
            state[name] = row["value"]
    return state if parts.holds(key) else {}


def _home(name: str, group: Mapping[str, Any], parameter: Tensor) -> torch.device:
    """Where an optimizer expects what it remembers: beside the parameter, but steps are counted on the CPU, as torch does."""
    counts_there = group.get("capturable") or group.get("fused")
    return parameter.device if name != "step" or counts_there else torch.device("cpu")


def _found(folder: Path) -> tuple[Path, Manifest]:
    if not folder.is_dir():
        raise InputError(
            f"the folder {folder} does not exist: give that of a run which saved checkpoints, or one of these"
        )
    path = folder if is_checkpoint(folder) else latest(folder)
    if path is None:
        raise InputError(
            f"{folder} holds no checkpoint, a folder such as 000001-step-100: give the folder of a run that saved one"
        )
    try:
        return path, read_checked(path)
    except InputError as error:
        raise InputError(f"{error}; {_instead(path)}") from None


def _instead(path: Path) -> str:
    """What can be done without this checkpoint."""
    damaged = path.resolve()
    before = itertools.takewhile(lambda other: other.name != damaged.name, checkpoints(damaged.parent))
    for other in reversed(list(before)):
        try:
            read_checked(other)
        except InputError:
            continue
        return f"the checkpoint before it, {other}, is whole: to resume from there give that folder, or remove {path}"
    return "no checkpoint before it is whole: bring the file back from a copy, or start the run again"


def _check_model(path: Path, here: Mapping[str, Spec]) -> None:
    there = read_specs(path / MODEL)
    both = [key for key in here if key in there]
    rows = [
        ("it lacks ", [key for key in here if key not in there]),
        ("it has, and this net has not, ", [key for key in there if key not in here]),
        ("", [f"{key} is {there[key]} there and {here[key]} here" for key in both if there[key] != here[key]]),
    ]
    if any(names for _, names in rows):
        told = "; ".join(what + _some(names) for what, names in rows if names)
        raise InputError(
            f"the checkpoint {path} is of another net: {told}; build the net as it was when it was saved, with the same dtype"
        )


def _check_settings(path: Path, manifest: Manifest, here: Mapping[str, Any]) -> None:
    there = manifest.settings
    different = [
        f"{name} was {there.get(name)!r} and is {value!r}" for name, value in here.items() if there.get(name) != value
    ]
    if different:
        raise InputError(
            f"the run of the checkpoint {path} had other settings: {_some(different)}; give the same, or start a new run "
            "in another folder"
        )


def _check_optimizer(path: Path, manifest: Manifest, optimizer: Optimizer, groups: list[list[str]]) -> None:
    saved, name = manifest.optimizer, type(optimizer).__name__
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
    """Every parameter with its group."""
    return [f"{name} in group {number}" for number, names in enumerate(groups) for name in names]


def _some(names: Iterable[str]) -> str:
    """The first few of them."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
