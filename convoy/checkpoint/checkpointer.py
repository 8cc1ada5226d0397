"""When a training run is saved, and where it resumes."""

import math
import os
import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from convoy.checkpoint.folder import Progress, is_checkpoint, latest, run_folder
from convoy.checkpoint.load import load_checkpoint
from convoy.checkpoint.lock import LOCK, hold, release
from convoy.checkpoint.save import KEEP, Contents, Stateful, attempt
from convoy.checkpoint.tensors import Parts
from convoy.comm.collectives import from_first
from convoy.errors import InputError, shown

_TRACES = {LOCK, ".draft", "log.jsonl", "run.toml"}
"""Files of a run that ended before its first checkpoint."""

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0)
"""Pauses between attempts to write the last checkpoint of a run."""


def starting_point(folder: Path, resume: bool) -> Path | None:
    """Return the checkpoint that a run starts from; None for a start from the beginning. Change nothing.

    Args:
        folder: of the run, or one of its checkpoints.

    Raises:
        InputError: there is nothing to resume; or there is, and `resume` is False.
    """
    held = folder if is_checkpoint(folder) else latest(folder)
    if not resume:
        if held == folder:
            raise InputError(
                f"{folder} is a checkpoint of a run: go on from it (--resume), or name another folder for a new run"
            )
        if held is not None:
            raise InputError(
                f"{folder} holds the checkpoints of another run, the latest is {held.name}: resume it (--resume), or name "
                "another folder"
            )
        return None
    if not os.path.isdir(folder):
        raise InputError(
            f"there is nothing to resume: the folder {folder} does not exist; give that of an earlier run, or start without "
            "resuming"
        )
    run_folder(folder)  # refuses a checkpoint of an unknown run
    names = {path.name for path in folder.iterdir()}
    if held is None and names and not names & _TRACES:
        raise InputError(
            f"there is nothing to resume: {folder} is a folder of something else ({shown(min(names))}, ...); give that of an "
            "earlier run, or start without resuming"
        )
    return held


class Checkpointer:
    """The checkpoints of a training loop, with the count of its steps. Every device has one, and makes the same calls.

    A checkpoint that cannot be written, as on a full disk, is reported, and the training goes on: earlier checkpoints stay as
    they are, and the next one is tried when it is due. Only `at_end` raises then, after two minutes of further attempts.

    ::

        keeper = Checkpointer("run", model, optimizer, every=500, settings={"seed": 0, "batch": 64})
        start = keeper.begin(resume=True)
        for epoch in range(start.epoch, epochs):
            loader.set_epoch(epoch, keeper.progress.batch)
            for x, y in loader:
                ...
                optimizer.step()
                keeper.after_step()
            keeper.at_evaluation(accuracy(model))

    Args:
        folder: of the run, on device 0's machine; or one of its checkpoints, to resume from that one.
        model, optimizer, schedule, scaler, settings, keep: see `save_checkpoint`.
        every: steps between checkpoints; None: only after evaluations.
        tell: called on every device with a line of text when the run resumes, is saved, or cannot be saved; None: only the
            last, as a warning on device 0.

    Attributes:
        progress: how far the run is.

    Raises:
        InputError: `every` below 1.
    """

    def __init__(
        self,
        folder: Path | str,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        every: int | None = None,
        schedule: Stateful | None = None,
        scaler: Stateful | None = None,
        settings: Mapping[str, Any] | None = None,
        keep: int = KEEP,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise InputError(
                f"a checkpoint every {every} steps: give 1 or more, or nothing for one after each evaluation"
            )
        self.folder, self.every, self.keep, self.tell = Path(folder), every, keep, tell
        self.contents = Contents(model, optimizer, schedule, scaler, settings)
        self.progress = Progress()
        self._saved = Progress()
        self._unsaved: tuple[Progress, float | None] = Progress(), None  # progress and score of the last attempt
        self.run: str | None = None
        self._release: Callable[[], object] | None = None

    def begin(self, resume: bool) -> Progress:
        """Return where the run starts. Call it before the first step.

        Args:
            resume: continue from the latest checkpoint, or the named one; from the beginning if the run ended before its first.

        Raises:
            InputError: another run writes into the folder; without `resume`, it holds checkpoints of another run; with it, it
                holds something else than a run; see also `load_checkpoint`.
        """
        group = Parts.of(self.contents.model).group
        folder, found, self.run = from_first(group, "checkpoint: begin", lambda: self._begin(resume))
        self.folder = Path(folder)
        if found is not None:
            try:
                self.progress = self._saved = self._load(found)
            except BaseException:
                self.close()
                raise
            self._report(f"goes on from {found}: step {self.progress.step}, epoch {self.progress.epoch}")
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
        """Save at the end of an epoch, after its evaluation and the schedule's step.

        Args:
            score: the greater the better; NaN and infinity are never the best.
        """
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, batch=0)
        self._save(score if math.isfinite(score) else None)

    def at_end(self) -> None:
        """Save the finished run unless that has been done, and release the folder.

        Raises:
            InputError: it cannot be saved, even after the pauses in `PAUSES_S`; on every device.
        """
        score = self._unsaved[1] if self._unsaved[0] == self.progress else None
        for attempts, pause_s in enumerate((*PAUSES_S, None)):
            why = "" if self.progress == self._saved else self._attempt(score)
            if not why:
                self.close()
                return
            if pause_s is None:
                raise InputError(f"the training is over, and its last state is not saved: {why}")
            if attempts == 0:
                self._warn(f"WARNING: {why}. The training is over: this is tried again for {sum(PAUSES_S):g} s")
            time.sleep(pause_s)

    def reload(self) -> Progress:
        """Load the latest checkpoint of this run into the model, whose devices have changed. Every device calls it.

        Raises:
            InputError: there is none yet; see also `load_checkpoint`.
        """
        group = Parts.of(self.contents.model).group  # the run may have begun from a named checkpoint
        self.folder = Path(from_first(group, "checkpoint: reload", lambda: str(run_folder(self.folder))))
        return self._load(self.folder)

    def go_back(self, progress: Progress) -> None:
        """Continue after an earlier step on other devices. Device 0 of these writes from now on."""
        self.progress = progress
        if Parts.of(self.contents.model).first and self._release is None:
            try:
                self._take_over()
            except InputError as error:
                self._report(f"WARNING: {error}; the next checkpoint ends the training, if that lasts")
            except OSError as error:
                self._report(f"WARNING: {error}; tried again at the next checkpoint")

    def close(self) -> None:
        """Release the folder. So does the end of this object, or of the process."""
        if self._release is not None:
            self._release()

    def _begin(self, resume: bool) -> tuple[str, str | None, str]:
        """Lock the run's folder. Return that folder, the checkpoint to start from, and the run's identifier."""
        starting_point(self.folder, resume)  # refuse before anything is written
        folder, run = run_folder(self.folder), secrets.token_hex(8)
        try:
            # From now on there is something to resume, even if the run ends before its first checkpoint.
            folder.mkdir(parents=True, exist_ok=True)
            hold(folder, run)
        except OSError as error:
            raise InputError(
                f"cannot make the folder {folder} for checkpoints: {error.strerror}; name one that you may write"
            ) from None
        self._release = weakref.finalize(self, release, folder)
        try:
            found = starting_point(self.folder, resume)  # again: now nobody else writes there
        except InputError:
            self.close()
            raise
        return str(folder), None if found is None else str(found), run

    def _load(self, folder: Path | str) -> Progress:
        held = self.contents
        return load_checkpoint(
            folder, held.model, held.optimizer, schedule=held.schedule, scaler=held.scaler, settings=held.settings
        )

    def _take_over(self) -> None:
        """Lock the folder in place of a lost device."""
        folder = run_folder(self.folder)
        hold(folder, self.run, from_lost=True)
        self._release = weakref.finalize(self, release, folder)

    def _save(self, score: float | None = None) -> None:
        if why := self._attempt(score):
            self._warn(f"WARNING: {why}. The training goes on, and tries again when the next one is due")

    def _attempt(self, score: float | None) -> str:
        """Save. Return why that was not possible, or an empty text."""
        if self.run is not None and self._release is None and Parts.of(self.contents.model).first:
            with suppress(InputError, OSError):  # the attempt reports it
                self._take_over()
        tell = self.tell or warnings.warn
        path, why = attempt(self.folder, self.contents, self.progress, score, self.keep, tell)
        self._unsaved = self.progress, score
        if path is not None:
            self._saved = self.progress
            self._report(f"saved {path}")
        return why

    def _warn(self, line: str) -> None:
        if self.tell is not None:
            self.tell(line)
        elif Parts.of(self.contents.model).first:
            warnings.warn(line, stacklevel=3)

    def _report(self, line: str) -> None:
        if self.tell is not None:
            self.tell(line)
