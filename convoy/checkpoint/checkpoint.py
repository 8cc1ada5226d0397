"""A checkpoint of a distributed model, and when a training loop saves one.

Device 0 gathers and writes it tensor by tensor, and reads and scatters it in the same way.
"""

import itertools
import json
import math
import os
import shlex
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from convoy.checkpoint.run_folder import (
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
    checkpoints,
    decode,
    encode,
    hold,
    holding,
    is_checkpoint,
    latest,
    publish,
    read_checked,
    release,
    run_folder,
    starting_point,
    tidy,
)
from convoy.checkpoint.tensors import (
    ModelShards,
    Spec,
    TensorStream,
    file_chunks,
    file_order,
    read_specs,
    reading,
    write_file,
)
from convoy.comm.control_messages import agree_on, from_first, share_number
from convoy.comm.group import Group
from convoy.errors import InputError, shown
from convoy.runtime.module import Distributed
from convoy.runtime.optimizer import WeightAverage

# Optimizer settings that do not affect results. They are not restored: the current machine's apply.
OF_THE_MACHINE = ("foreach", "fused", "capturable", "param_names")


class Stateful(Protocol):
    """An object with a state: a schedule of torch.optim.lr_scheduler, torch.amp.GradScaler, a loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Contents:
    """The objects and settings that a checkpoint saves; see `save_checkpoint`."""

    model: nn.Module
    optimizer: Optimizer | None
    others: Mapping[str, Stateful | None]
    settings: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        for name, each in self.others.items():
            if each is not None and not hasattr(each, "load_state_dict"):
                raise InputError(
                    f"{name}={shown(each)} has no state_dict(): give objects with a state, such as schedule=, scaler=, loader="
                )


def save_checkpoint(
    folder: Path | str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    progress: Progress | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    score: float | None = None,
    **others: Stateful | None,
) -> Path:
    """Save a run between two steps. Every device calls it; device 0 writes, into a folder of its own machine.

    The checkpoint gets its name when it is complete on the disk. The last three, the best, and the last one with finite weights
    are kept. Gradients are not saved; random states are saved only with a loader of `convoy.prepare`. No device needs memory
    for more than one unsplit tensor.

    Args:
        folder: of the run; made if missing.
        optimizer: None: only the weights are saved.
        settings: JSON values that must be the same on resume: the loader's seed, the batch size, the data.
        score: of an evaluation at this point; higher is better. `best` in the folder links to the highest.
        others: objects whose state is saved, by name: schedule=, scaler=, loader= (its position and random states), ...

    Raises:
        InputError: it cannot be written, another run writes into the folder, or a value has no form in JSON; on every device.
        MismatchError: the devices are at different steps.
    """
    contents = Contents(model, optimizer, others, settings)
    path, why = try_to_save(Path(folder), contents, progress or Progress(), score, warnings.warn)
    if path is None:
        raise InputError(why)
    return path


@torch.no_grad()
def try_to_save(
    folder: Path, contents: Contents, progress: Progress, score: float | None, report: Callable[[str], object]
) -> tuple[Path | None, str]:
    """Save like `save_checkpoint`, but if writing fails, return (None, reason) on every device instead of raising.

    Device 0 calls `report` with a line of text if old checkpoints could not be removed.
    """
    shards, optimizer = ModelShards.of(contents.model), contents.optimizer
    agree_on(shards.group, "checkpoint", json.dumps([asdict(progress), score]), "saves another checkpoint")
    saved = None
    if optimizer is not None:
        name, groups = type(optimizer).__name__, []
        for names, group in zip(shards.group_names(optimizer), optimizer.param_groups, strict=True):
            kept = {key: value for key, value in group.items() if key not in ("params", *OF_THE_MACHINE)}
            groups.append(SavedGroup(parameters=names, settings=encode(kept, f"a parameter group of {name}")))
        state = encode(shards.state_rows(optimizer), f"the state of {name}")
        saved = SavedOptimizer(name=name, groups=groups, state=state)
    others = {}
    for what, each in contents.others.items():
        if each is not None:
            name = type(each).__name__
            others[what] = SavedState(name=name, state=encode(each.state_dict(), f"the state of {name}"))
    settings = encode(dict(contents.settings or {}), "settings")
    # Infinity in a buffer may be intended, as in an attention mask.
    parameters = set(shards.names.values())
    bad = any(
        bool(shard.isnan().any() or (shards.first_names[key] in parameters and shard.isinf().any()))
        for key, shard in shards.shards.items()
    )
    finite = not any(share_number(shards.group, float(bad)))
    streams = _streams(shards, optimizer, saved)
    if shards.group.device != 0:
        _drain(streams)

    def fill(draft: Path) -> None:
        files = {name: write_file(draft / name, file_chunks(stream)) for name, stream in streams.items()}
        manifest = Manifest(
            progress=progress,
            score=score,
            settings=settings,
            optimizer=saved,
            others=others,
            files=files,
            finite=finite,
        )
        write_file(draft / MANIFEST, [manifest.to_json().encode()])

    def write() -> tuple[str | None, str]:
        try:
            if is_checkpoint(folder):
                raise InputError(f"{folder} is a checkpoint itself: name the folder of the run, {folder.parent}")
            folder.mkdir(parents=True, exist_ok=True)
            with holding(folder):
                path = publish(folder, progress.step, fill)
                try:
                    tidy(folder)
                except OSError as error:
                    why = f"{error.filename or folder} could not be tidied ({error.strerror})"
                    report(f"{path} is saved, but {why}: {BEST} may link to an earlier one; remove what is in the way")
            return str(path), ""
        except InputError:
            _drain(streams)
            raise
        except OSError as error:
            _drain(streams)
            size_bytes = sum(spec.size_bytes for stream in streams.values() for spec in stream.specs.values())
            what = f"cannot write the checkpoint of step {progress.step} into {folder}: {error.strerror or error}"
            remedy = f"it has {size_bytes:,} bytes: make room there, or name another folder"
            return None, f"{what} ({error.filename or folder}); {remedy}. Earlier checkpoints are as they were"

    path, why = from_first(shards.group, "checkpoint: written", write)
    return None if path is None else Path(path), why


def _streams(shards: ModelShards, optimizer: Optimizer | None, saved: SavedOptimizer | None) -> dict[str, TensorStream]:
    """Return the tensors of each file: the model's, the optimizer's ("parameter/name"), and the model with averaged weights."""
    # By file and name: the key of a tensor with the same layout, and the local shard.
    files = {MODEL: {key: (key, shard) for key, shard in shards.shards.items()}}
    if optimizer is not None and saved is not None:
        state = {key: optimizer.state.get(parameter, {}) for parameter, key in shards.names.items()}
        rows = {
            (key, name): state[key][name] if shards.has(key) else torch.empty(0, dtype=dtype)
            for key, name, dtype in saved.tensors()
        }
        files[OPTIMIZER] = {f"{key}/{name}": (key, shard) for (key, name), shard in rows.items()}
        averages = {key: shard for (key, name), shard in rows.items() if name == WeightAverage.STATE}
        if averages:
            own = shards.shards.items()
            files[AVERAGE] = {key: (key, averages.get(shards.first_names[key], shard)) for key, shard in own}
    streams = {}
    for file, named in files.items():
        specs = file_order({name: Spec(shards.shapes[key], shard.dtype) for name, (key, shard) in named.items()})
        streams[file] = TensorStream(specs, itertools.starmap(shards.gather, [named[name] for name in specs]))
    return streams


def _drain(streams: Mapping[str, TensorStream]) -> None:
    """Run the remaining gathers and discard the tensors: all devices must take part in every gather."""
    for stream in streams.values():
        for _ in stream.tensors:
            pass


@torch.no_grad()
def load_checkpoint(
    folder: Path | str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    missing_ok: bool = False,
    **others: Stateful | None,
) -> Progress:
    """Continue a saved run on any fleet, with any plan. Every device calls it; only device 0 reads files.

    The checkpoint is checked before anything changes. The optimizer gets the saved settings (learning rate, momentum), not
    those it was made with.

    Args:
        folder: of the run, for its latest checkpoint; or a checkpoint.
        optimizer: of the class that was saved, with the same parameter groups; None: only the weights are loaded.
        settings: compared with the saved settings of the same names.
        missing_ok: return `Progress()` and change nothing if the run has no checkpoint yet.
        others: schedule=, scaler=, loader=, ...: of the names and classes that were saved; used with an optimizer only.

    Raises:
        InputError: no checkpoint, or one that is damaged (the message names an intact earlier one), of another run, or of NaN
            or infinite weights; on every device.
    """
    Contents(model, optimizer, others, settings)  # checks them
    shards = ModelShards.of(model)
    groups = None if optimizer is None else shards.group_names(optimizer)

    def find() -> list[str] | None:
        if missing_ok and not is_checkpoint(Path(folder)) and latest(folder) is None:
            return None
        path, manifest = find_checkpoint(Path(folder))
        remedy = "build the net as it was when it was saved, with the same dtype"
        _check_same(path, read_specs(path / MODEL), shards.specs, remedy)
        check_settings(path, manifest, encode(dict(settings or {}), "settings"))
        if optimizer is not None and groups is not None:
            saved = manifest.optimizer
            remedy = "give what the run began with, or load the weights alone, without optimizer"
            there = {"the optimizer": "missing" if saved is None else saved.name}
            here = {"the optimizer": type(optimizer).__name__}
            there |= _group_of([] if saved is None else [group.parameters for group in saved.groups])
            here |= _group_of(groups)
            there |= {f"the {name}": state.name for name, state in manifest.others.items()}
            here |= {f"the {name}": type(each).__name__ for name, each in others.items() if each is not None}
            _check_same(path, there, here, remedy)
            if saved is not None:
                wanted = {f"{k}/{name}": Spec(shards.shapes.get(k, ()), dtype) for k, name, dtype in saved.tensors()}
                _check_same(path / OPTIMIZER, read_specs(path / OPTIMIZER), wanted, _instead(path))
        return [str(path), manifest.model_dump_json()]

    if (found := from_first(shards.group, "checkpoint: found", find)) is None:
        return Progress()
    path, manifest = Path(found[0]), Manifest.model_validate_json(found[1])
    types = {key: spec.dtype for key, spec in shards.specs.items()}
    with reading(path / MODEL, types, here=shards.group.device == 0) as read:
        for key, own in shards.shards.items():
            own.copy_(shards.scatter(key, read(key)))
    if isinstance(model, Distributed):
        model.weights_changed()
    if optimizer is not None and manifest.optimizer is not None:
        _restore(shards, optimizer, manifest.optimizer, path / OPTIMIZER)
        for what, each in others.items():
            if each is not None:
                each.load_state_dict(decode(manifest.others[what].state))
    return manifest.progress


def _restore(shards: ModelShards, optimizer: Optimizer, saved: SavedOptimizer, path: Path) -> None:
    for group, settings in zip(optimizer.param_groups, saved.groups, strict=True):
        group.update(decode(settings.settings))
    optimizer.state.clear()
    types = {f"{key}/{name}": dtype for key, name, dtype in saved.tensors()}
    with reading(path, types, here=shards.group.device == 0) as read:
        for group in optimizer.param_groups:
            on_cpu = not (group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                key = shards.names[parameter]
                rows = decode(saved.state.get(key, {}))
                for name, row in rows.items():  # torch counts steps on the CPU, unless the optimizer runs as one kernel
                    row["near"] = not (name == "step" and on_cpu)
                state = shards.scatter_state(key, rows, lambda name: read(f"{key}/{name}"))  # noqa: B023 - called at once
                if state:
                    optimizer.state[parameter] = state


def find_checkpoint(folder: Path) -> tuple[Path, Manifest]:
    """Return a folder that is a checkpoint, or the latest checkpoint of a run, verified. InputError names an intact one."""
    path = folder if is_checkpoint(folder) else latest(folder)
    if path is None or not os.path.isdir(path):
        example = "a folder such as 000001-step-100"
        raise InputError(f"{folder} holds no checkpoint, {example}: give the folder of a run that saved one")
    try:
        manifest = read_checked(path)
    except InputError as error:
        raise InputError(f"{error}; {_instead(path)}") from None
    if not manifest.finite:
        useless = f"the weights of the checkpoint {path} are useless: some are NaN or infinite"
        raise InputError(f"{useless}, so the training had diverged; {_instead(path)}")
    return path, manifest


def _instead(path: Path) -> str:
    damaged = Path(os.path.realpath(path))
    before = itertools.takewhile(lambda other: other.name != damaged.name, checkpoints(damaged.parent))
    for other in reversed(list(before)):
        with suppress(InputError):
            if read_checked(other).finite:
                give = f"give that folder (--checkpoint {shlex.quote(str(other))} --resume)"
                return f"the checkpoint before it, {other}, is whole: to go on from there {give}; this one stays"
    return "no checkpoint before it is whole: bring the file back from a copy, or start a new run in another folder"


def check_settings(path: Path, manifest: Manifest, here: Mapping[str, Any]) -> None:
    """Raise InputError if settings (encoded) differ from the saved settings of the same names."""
    there = {name: manifest.settings.get(name) for name in here}
    _check_same(path, there, here, "give the same settings, or start a new run in another folder")


def check_resume(folder: Path, resume: bool, settings: Mapping[str, Any], epochs: int) -> None:
    """Raise InputError if a run cannot be saved in this folder, or cannot be resumed from it with these settings."""
    start, folder = starting_point(folder, resume), run_folder(folder)
    if folder.is_dir():
        try:
            with holding(folder):
                pass
        except OSError as error:
            raise InputError(f"cannot write into {folder}: {error.strerror}; name another folder") from None
    if start is not None:
        path, manifest = find_checkpoint(start)
        check_settings(path, manifest, settings)
        if (done := manifest.progress.epoch) >= epochs:
            raise InputError(f"the run in {folder} is complete: {done} epochs are done; give --epochs above {done}")


def _check_same(path: Path, there: Mapping[str, object], here: Mapping[str, object], remedy: str) -> None:
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    none = "missing"
    if different := [f"{name} is {there.get(name, none)} there and {here.get(name, none)} here" for name in names]:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise InputError(f"the checkpoint {path} is of another run: {', '.join(different[:3])}{more}; {remedy}")


def _group_of(groups: Sequence[Sequence[str]]) -> dict[str, str]:
    return {name: f"in group {number}" for number, names in enumerate(groups) for name in names}


PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0)  # between attempts to write the last checkpoint of a run


class Checkpointer:
    """A writer of a training loop's checkpoints, which counts its steps. Every device has one and makes the same calls.

    If a checkpoint cannot be written, as on a full disk, training continues with a warning. Only `at_end` raises an error,
    after two minutes of further attempts. `docs/training.md` has an example.

    Args:
        folder: of the run, on device 0's machine; or one of its checkpoints, to resume from that one.
        model, optimizer, settings, others: see `save_checkpoint`.
        every: steps between checkpoints; None: only after evaluations.
        tell: called on every device with a line of text when the run resumes, is saved, or cannot be saved; None: only the
            last, as a warning on device 0.
    """

    def __init__(
        self,
        folder: Path | str,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int | None = None,
        settings: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] | None = None,
        **others: Stateful | None,
    ) -> None:
        if every is not None and every < 1:
            raise InputError(f"a checkpoint every {every} steps: give 1 or more, or None: only after evaluations")
        self.folder, self.every, self.tell = Path(folder), every, tell
        self.contents = Contents(model, optimizer, others, settings)
        self.progress = Progress()
        self._saved = Progress()
        self._unsaved: tuple[Progress, float | None] = Progress(), None  # progress and score of the last attempt
        self._release: Callable[[], object] | None = None

    def begin(self, resume: bool) -> Progress:
        """Return where the run starts. Call it before the first step.

        With `resume`, continue from the latest checkpoint, or the named one; from the beginning if there is none yet.
        InputError: another run writes there, or it holds a run and `resume` is False; see also `load_checkpoint`.
        """

        def lock() -> tuple[str, str | None]:
            found = starting_point(self.folder, resume)  # refuse before anything is written
            folder = run_folder(self.folder)
            try:
                # From now on there is something to resume, even if the run ends before its first checkpoint.
                folder.mkdir(parents=True, exist_ok=True)
                self._lock(folder)
            except OSError as error:
                raise InputError(
                    f"cannot make or lock the folder {folder} for checkpoints: {error.strerror}; wait until another run has "
                    "ended, or name a folder that you may write"
                ) from None
            return str(folder), None if found is None else str(found)

        folder, found = from_first(self._group, "checkpoint: begin", lock)
        self.folder = Path(folder)
        if found is not None:
            try:
                self.progress = self._saved = self._load(found)
            except BaseException:
                self.close()
                raise
            self._report(f"continues from {found}: step {self.progress.step}, epoch {self.progress.epoch}")
        elif resume:
            self._report(f"{self.folder} holds no checkpoint yet: the run begins at its beginning")
        return self.progress

    @property
    def saves_next(self) -> bool:
        """Whether the next `after_step` saves."""
        return self.every is not None and (self.progress.step + 1) % self.every == 0

    def after_step(self) -> None:
        """Count a step, and save if it is due. Call it after the steps of optimizer and schedule."""
        here, saves = self.progress, self.saves_next
        self.progress = replace(here, step=here.step + 1, batch=here.batch + 1)
        if saves:
            self._save()

    def at_evaluation(self, score: float) -> None:
        """Save at the end of an epoch, after its evaluation and the schedule's step. A NaN or infinite score is never best."""
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, batch=0)
        self._save(score if math.isfinite(score) else None)

    def at_end(self) -> None:
        """Save the finished run if not yet saved, and release the folder. InputError if saving fails for two minutes."""
        score = self._unsaved[1] if self._unsaved[0] == self.progress else None
        for attempts, pause_s in enumerate((*PAUSES_S, None)):
            why = "" if self.progress == self._saved else self._attempt(score)
            if not why:
                self.close()
                return
            if pause_s is None:
                raise InputError(f"the training is over, and its last state is not saved: {why}")
            if attempts == 0:
                again = f"The training is over: this is tried again for {sum(PAUSES_S):g} s"
                self._report(f"WARNING: {why}. {again}", warns=True)
            time.sleep(pause_s)

    def reload(self) -> Progress:
        """Load the latest checkpoint of this run into the model, whose devices have changed. Errors as `load_checkpoint`."""
        # The run may have begun from a named checkpoint.
        self.folder = Path(from_first(self._group, "checkpoint: reload", lambda: str(run_folder(self.folder))))
        return self._load(self.folder)

    def go_back(self, progress: Progress) -> None:
        """Continue after an earlier step with changed devices. The first of these writes from now on."""
        self.progress = progress
        if self._group.device == 0 and self._release is None:
            with suppress(OSError):  # the next checkpoint reports it
                self._lock(run_folder(self.folder))

    def close(self) -> None:
        """Release the folder. So does the end of this object, or of the process."""
        if self._release is not None:
            self._release()

    def _lock(self, folder: Path) -> None:
        if hold(folder):
            self._release = weakref.finalize(self, release, folder)

    @property
    def _group(self) -> Group:
        return ModelShards.of(self.contents.model).group

    def _load(self, folder: Path | str) -> Progress:
        what = self.contents
        return load_checkpoint(folder, what.model, what.optimizer, settings=what.settings, **what.others)  # type: ignore[arg-type]

    def _save(self, score: float | None = None) -> None:
        if why := self._attempt(score):
            self._report(f"WARNING: {why}. Training continues, and the next checkpoint is tried when due", warns=True)

    def _attempt(self, score: float | None) -> str:
        """Save. Return the reason if saving failed, otherwise an empty text."""
        path, why = try_to_save(self.folder, self.contents, self.progress, score, self.tell or warnings.warn)
        self._unsaved = self.progress, score
        if path is not None:
            self._saved = self.progress
            self._report(f"saved {path}")
        return why

    def _report(self, line: str, *, warns: bool = False) -> None:
        if self.tell is not None:
            self.tell(line)
        elif warns and self._group.device == 0:
            warnings.warn(line, stacklevel=3)
