"""Loading: device 0 finds and checks a checkpoint, then gives every device its pieces, tensor by tensor."""

import copy
import inspect
import itertools
import math
import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR, ReduceLROnPlateau
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
from convoy.checkpoint.tensors import Parts, Spec, broken, read_specs, reading
from convoy.checkpoint.values import decode, dtype_named, encode
from convoy.comm.agreement import from_first
from convoy.errors import InputError, shortened, shown
from convoy.runtime.average import WeightAverage
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
            or of another net, optimizer or setting, or holds weights that are no numbers; on every device.
        DeviceLostError: a device did not take part; device 0 needed longer than the group's time limit to check the files.
    """
    parts = Parts.of(model)
    groups = None if optimizer is None else parts.group_names(optimizer)
    others = {"schedule": schedule, "scaler": scaler}

    def find() -> list[str]:
        path, manifest = find_checkpoint(Path(folder))
        _check_model(path, parts.specs)
        _check_numbers(path, parts)
        check_settings(path, manifest, encode(dict(settings or {}), "settings"))
        if optimizer is not None and groups is not None:
            _check_optimizer(path, manifest, optimizer, groups, parts.specs)
            _check_others(path, manifest, others)
        text = manifest.model_dump_json()
        if Manifest.model_validate_json(text) != manifest:  # NaN, which JSON does not have
            raise InputError(f"{path / MANIFEST} is damaged: a number of it is NaN or infinite; {_instead(path)}")
        return [str(path), text]

    path, text = from_first(parts.group, "checkpoint: found", find)
    manifest = Manifest.model_validate_json(text)
    types = {key: spec.dtype for key, spec in parts.specs.items()}
    with reading(Path(path) / MODEL, types, here=parts.first) as read:
        for key, own in parts.pieces.items():
            piece = parts.scatter(key, read(key))
            if piece is not None:
                own.copy_(piece)
    mark_changed(model.parameters())
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
            state[name] = _numbers(row)
        else:
            state[name] = row["value"]
    return state if parts.holds(key) else {}


def _numbers(row: Mapping[str, Any]) -> Tensor | None:
    """The small tensor that a row holds, such as the number of steps."""
    return torch.tensor(row["value"], dtype=dtype_named(row["dtype"])) if row["kind"] == "number" else None


def _home(name: str, group: Mapping[str, Any], parameter: Tensor) -> torch.device:
    """Where an optimizer expects what it remembers: beside the parameter, but steps are counted on the CPU, as torch does."""
    counts_there = group.get("capturable") or group.get("fused")
    return parameter.device if name != "step" or counts_there else torch.device("cpu")


def find_checkpoint(folder: Path) -> tuple[Path, Manifest]:
    """The checkpoint that a folder is, or the latest of a run, checked against its checksums.

    Raises:
        InputError: there is none, or it is damaged; says which earlier one is whole.
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
        raise _useless(path, "some are NaN or infinite")
    return path, manifest


def _instead(path: Path) -> str:
    """What can be done without this checkpoint."""
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
        told = "; ".join(what + _some(names) for what, names in rows if names)
        raise InputError(
            f"the checkpoint {path} is of another net: {told}; build the net as it was when it was saved, with the same dtype"
        )


def _check_numbers(path: Path, parts: Parts) -> None:
    with reading(path / MODEL, {}, here=True) as read:
        faults = (broken(key, read(key), is_parameter=parts.is_parameter(key)) for key in parts.pieces)
        fault = next((each for each in faults if each), None)
    if fault is not None:
        raise _useless(path, fault)


def _useless(path: Path, fault: str) -> InputError:
    return InputError(
        f"the weights of the checkpoint {path} are useless: {fault}, so the training had diverged, and what goes on from there "
        f"stays so; {_instead(path)}. Its tensors as they are: safetensors.torch.load_file"
    )


def check_settings(path: Path, manifest: Manifest, here: Mapping[str, Any]) -> None:
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
    path: Path, manifest: Manifest, optimizer: Optimizer, groups: list[list[str]], specs: Mapping[str, Spec]
) -> None:
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
    for key, rows in saved.state.items():
        own, others = _remembered(rows), [_remembered(other) for other in saved.state.values()]
        if own and any(own < other for other in others if "step" in other and "step" not in own):
            raise InputError(f"{path / MANIFEST} is damaged: {name} does not know the step of {key}; {_instead(path)}")
    for number, (there_group, here_group) in enumerate(zip(saved.groups, optimizer.param_groups, strict=True)):
        what = f"group {number} of {name}"
        with _damage_told(path, what):
            settings = decode(there_group.settings)
        _check_form(path, what, settings, here_group)
        with _damage_told(path, what):
            _try_settings(optimizer, settings)
    with _damage_told(path, f"the state of {name}"):
        for rows in decode(saved.state).values():
            _ = [_numbers(row) for row in rows.values()]
    wanted = {f"{key}/{state}": Spec(specs[key].shape, dtype) for key, state, dtype in saved.tensors() if key in specs}
    held = read_specs(path / OPTIMIZER)
    if wanted != held or not saved.state.keys() <= specs.keys():
        odd = [key for key in {**held, **wanted} if held.get(key) != wanted.get(key)]
        raise InputError(
            f"{path / OPTIMIZER} is not what {MANIFEST} says: {_some(odd) or 'parameters of another net'}; {_instead(path)}"
        )


def _remembered(rows: Mapping[str, Any]) -> set[str]:
    """What an optimizer itself remembers of a parameter, by name."""
    return set(rows) - {WeightAverage.STATE}


def _check_others(path: Path, manifest: Manifest, others: Mapping[str, Stateful | None]) -> None:
    for what, each in others.items():
        there = manifest.others[what].name if what in manifest.others else f"no {what}"
        here = f"no {what}" if each is None else type(each).__name__
        if there != here:
            raise InputError(
                f"the checkpoint {path} was saved with {there}, this run has {here}: give the {what} that the run began "
                "with, or load the weights alone, without an optimizer"
            )
        if each is not None:
            with _damage_told(path, what):
                state = decode(manifest.others[what].state)
            _check_form(path, what, state, each.state_dict())
            with _damage_told(path, what):
                _try_schedule(each, state, manifest.optimizer)


@contextmanager
def _damage_told(path: Path, what: str) -> Iterator[None]:
    """Refuse what was saved of something where it cannot be used. InputError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{path / MANIFEST} is damaged: {what}: {shortened(str(error))}; {_instead(path)}") from None


def _try_settings(optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Have torch check the saved settings of an optimizer of its own, as it does where one is made."""
    if type(optimizer).__module__.startswith("torch.optim."):
        known = inspect.signature(type(optimizer)).parameters
        type(optimizer)([torch.zeros(1, 1)], **{name: value for name, value in settings.items() if name in known})


def _try_schedule(schedule: Stateful, state: Mapping[str, Any], optimizer: SavedOptimizer | None) -> None:
    """Let a copy of a schedule of torch's take a step from a saved state: what it divides by may be 0.

    A ValueError of that step is no fault: so `OneCycleLR` says that it is at its end.

    Raises:
        ArithmeticError, AttributeError, LookupError, TypeError: it cannot, or leads to no learning rate.
    """
    if type(schedule).__module__ != LRScheduler.__module__ or not isinstance(schedule, LRScheduler):
        return
    saved = [decode(group.settings) for group in optimizer.groups] if optimizer is not None else []
    beside = torch.optim.SGD([{"params": [torch.zeros(1)], **settings} for settings in saved], lr=0.1)
    try:
        copied = copy.deepcopy(schedule, {id(schedule.optimizer): beside})
    except Exception:  # a function of the user's that cannot be copied
        return
    copied.load_state_dict(dict(state))
    if isinstance(copied, LambdaLR | MultiplicativeLR):
        return  # what it computes is the user's
    with suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer did no step before
        if isinstance(copied, ReduceLROnPlateau):
            copied.step(0.0)
        else:
            copied.step()
    for group in beside.param_groups:
        if not math.isfinite(group["lr"]):
            raise ArithmeticError(f"the learning rate becomes {group['lr']}")


def _check_form(path: Path, what: str, there: Any, here: Mapping[str, Any]) -> None:
    """Refuse saved settings that are another kind of thing than the present ones of that name."""
    for name, value in there.items():
        if name in here and _form(value) != _form(here[name]) and None not in (value, here[name]):
            raise InputError(
                f"{path / MANIFEST} is damaged: {what}: {name} = {shown(value)}, which is no {_form(here[name])}; "
                f"{_instead(path)}"
            )


def _form(value: Any) -> str:
    """What kind of thing a setting is. A number may be a tensor."""
    match value:
        case bool():
            return "truth value"
        case int() | float() | Tensor():
            return "number"
        case str():
            return "text"
        case Mapping():
            return "table"
        case tuple():
            return f"({', '.join(map(_form, value))})"
        case _:
            return "list" if isinstance(value, Sequence) else type(value).__name__


def _numbered(groups: Iterable[Sequence[str]]) -> list[str]:
    """Every parameter with its group."""
    return [f"{name} in group {number}" for number, names in enumerate(groups) for name in names]


def _some(names: Iterable[str]) -> str:
    """The first few of them."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
