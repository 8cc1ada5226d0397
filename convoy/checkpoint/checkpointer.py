"""When a training run is saved, and from where it goes on: what a training loop needs of checkpoints."""

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
from convoy.checkpoint.save import KEEP, Saved, Stateful, attempt
from convoy.checkpoint.tensors import Parts
from convoy.comm.agreement import from_first
from convoy.errors import InputError, shown

_TRACES = {LOCK, ".draft", "log.jsonl", "run.toml"}
"""What a run leaves in its folder that was ended before its first checkpoint."""

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0)
"""Between attempts to write the last checkpoint of a run, which nothing comes after."""


def starting_point(folder: Path, resume: bool) -> Path | None:
    """The checkpoint that a run begins from; None where it begins at its beginning. Nothing is changed.

    Args:
        folder: of the run, or one of its checkpoints.

    Raises:
        InputError: there is nothing to resume; or without `resume` there is.
    """
    if not resume:
        if is_checkpoint(folder):
            raise InputError(
                f"{folder} is a checkpoint of a run: go on from it (--resume), or name another folder for a new run"
            )
        if held := latest(folder):
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
    if is_checkpoint(folder):
        run_folder(folder)
        return folder
    names = {path.name for path in folder.iterdir()}
    if (path := latest(folder)) is None and names and not names & _TRACES:
        raise InputError(
            f"there is nothing to resume: {folder} is a folder of something else ({shown(min(names))}, ...); give that of an "
            "earlier run, or start without resuming"
        )
    return path


class Checkpointer:
    """Saves a run as it goes, and counts how far it is. Every device has one, and calls it alike.

    Where a checkpoint cannot be written, as on a full disk, that is told, and the training goes on: earlier checkpoints stay as
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
        folder: of the run, on device 0's machine; to go on from one of its checkpoints, that checkpoint.
        model, optimizer, schedule, scaler, settings, keep: see `save_checkpoint`.
        every: steps from one checkpoint to the next; None: only after evaluations.
        tell: is called on every device with a line of text when a run goes on, when it was saved, and when it could not be;
            None: only the last, as a warning of device 0.

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
        self.folder, self.model, self.optimizer = Path(folder), model, optimizer
        self.schedule, self.scaler, self.settings = schedule, scaler, settings
        self.every, self.keep, self.tell = every, keep, tell
        self.progress = Progress()
        self._saved = Progress()
        self._unsaved: tuple[Progress, float | None] = Progress(), None  # what was tried last, and the score there
        self.run: str | None = None
        self._release: Callable[[], object] | None = None

    def begin(self, resume: bool) -> Progress:
        """Before the first step.

        Args:
            resume: go on from the latest checkpoint, or the one that was named; from the beginning where a run was ended before
                its first.

        Returns:
            where the run goes on.

        Raises:
            InputError: another run writes into the folder; without `resume`, it holds the checkpoints of another run; with it,
                it holds something else than a run; see also `load_checkpoint`.
        """
        group = Parts.of(self.model).group
        folder, found, self.run = from_first(group, "checkpoint: begin", lambda: self._begin(resume))
        self.folder = Path(folder)
        if found is not None:
            try:
                self.progress = self._saved = load_checkpoint(
                    found, self.model, self.optimizer,
                    schedule=self.schedule, scaler=self.scaler, settings=self.settings,
                )  # fmt: skip
            except BaseException:
                self.close()
                raise
            self._tell(f"goes on from {found}: step {self.progress.step}, epoch {self.progress.epoch}")
        elif resume:
            self._tell(f"{self.folder} holds no checkpoint yet: the run begins at its beginning")
        return self.progress

    @property
    def saves_next(self) -> bool:
        """Whether the next `after_step` saves."""
        return self.every is not None and (self.progress.step + 1) % self.every == 0

    def after_step(self) -> None:
        """After every step of the optimizer, and of the schedule if it steps as often."""
        here, saves = self.progress, self.saves_next
        self.progress = replace(here, step=here.step + 1, batch=here.batch + 1)
        if saves:
            self._save()

    def at_evaluation(self, score: float) -> None:
        """At the end of an epoch, after its evaluation, and the schedule's step if it has one there.

        Args:
            score: the greater the better; what is not finite is nobody's best.
        """
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, batch=0)
        self._save(score if math.isfinite(score) else None)

    def at_end(self) -> None:
        """When the run is over: saves it unless that has been done, and lets another run have the folder.

        Raises:
            InputError: it cannot be saved, also after the pauses in `PAUSES_S`; on every device.
        """
        score = self._unsaved[1] if self._unsaved[0] == self.progress else None
        for attempts, pause_s in enumerate((*PAUSES_S, None)):
            why = "" if self.progress == self._saved else self._attempt(score).why
            if not why:
                self.close()
                return
            if pause_s is None:
                raise InputError(f"the training is over, and its last state is not saved: {why}")
            if attempts == 0:
                self._warn(f"WARNING: {why}. The training is over: this is tried again for {sum(PAUSES_S):g} s")
            time.sleep(pause_s)

    def reload(self) -> Progress:
        """Load the latest checkpoint of this run into the model, which has other devices now. Every device calls it.

        Raises:
            InputError: there is none yet; see also `load_checkpoint`.
        """
        group = Parts.of(self.model).group
        self.folder = Path(
            from_first(group, "checkpoint: reload", lambda: str(run_folder(self.folder)))
        )  # where the run began from a checkpoint that was named
        return load_checkpoint(
            self.folder, self.model, self.optimizer, schedule=self.schedule, scaler=self.scaler, settings=self.settings
        )

    def go_back(self, progress: Progress) -> None:
        """The training goes on after an earlier step, on other devices: device 0 is the one that writes from now on."""
        self.progress = progress
        if Parts.of(self.model).first and self._release is None:
            try:
                self._take_over()
            except InputError as error:
                self._tell(f"WARNING: {error}; the next checkpoint ends the training, if that lasts")
            except OSError as error:
                self._tell(f"WARNING: {error}; tried again at the next checkpoint")

    def _take_over(self) -> None:
        """Hold the folder instead of a device that is lost."""
        hold(run_folder(self.folder), self.run, from_lost=True)
        self._release = weakref.finalize(self, release, run_folder(self.folder))

    def close(self) -> None:
        """Let another run have the folder. So does the end of this object, or of the process."""
        if self._release is not None:
            self._release()

    def _begin(self, resume: bool) -> tuple[str, str | None, str]:
        """Take the folder of the run for this process; that folder, the checkpoint to go on from, and the run's own text."""
        starting_point(self.folder, resume)  # what it refuses leaves no trace
        folder = run_folder(self.folder)
        try:
            # From now on there is something to resume, even if the run is ended before its first checkpoint.
            folder.mkdir(parents=True, exist_ok=True)
            run = secrets.token_hex(8)
            hold(folder, run)
            self._release = weakref.finalize(self, release, folder)
        except OSError as error:
            raise InputError(
                f"cannot make the folder {folder} for checkpoints: {error.strerror}; name one that you may write"
            ) from None
        try:
            found = starting_point(self.folder, resume)  # nobody else writes there from now on
        except InputError:
            self.close()
            raise
        return str(folder), None if found is None else str(found), run

    def _save(self, score: float | None = None) -> None:
        if why := self._attempt(score).why:
            self._warn(f"WARNING: {why}. The training goes on, and tries again when the next one is due")

    def _attempt(self, score: float | None) -> Saved:
        if self.run is not None and self._release is None and Parts.of(self.model).first:
            with suppress(InputError, OSError):  # of which the attempt tells
                self._take_over()
        saved = attempt(
            self.folder, self.model, self.optimizer, self.progress, self.schedule, self.scaler, self.settings or {},
            score, self.keep, self.tell,
        )  # fmt: skip
        self._unsaved = self.progress, score
        if saved.path is not None:
            self._saved = self.progress
            self._tell(f"saved {saved.path}")
        return saved

    def _warn(self, line: str) -> None:
        if self.tell is not None:
            self.tell(line)
        elif Parts.of(self.model).first:
            warnings.warn(line, stacklevel=3)

    def _tell(self, line: str) -> None:
        if self.tell is not None:
            self.tell(line)
