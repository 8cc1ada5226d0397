"""When a training run is saved, and where it resumes."""

import math
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

from convoy.checkpoint.checkpoint import Contents, Stateful, load_checkpoint, try_to_save
from convoy.checkpoint.run_folder import Progress, hold, release, run_folder, starting_point
from convoy.checkpoint.tensors import ModelShards
from convoy.comm.control_messages import from_first
from convoy.comm.group import Group
from convoy.errors import InputError

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0, 30.0)
"""Pauses between attempts to write the last checkpoint of a run."""


class Checkpointer:
    """The checkpoints of a training loop, with the count of its steps. Every device has one, and makes the same calls.

    If a checkpoint cannot be written, as on a full disk, training continues with a warning. Only `at_end` raises then, after
    two minutes of further attempts.

    `docs/training.md` has an example.

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
            raise InputError(
                f"a checkpoint every {every} steps: give 1 or more, or nothing for one after each evaluation"
            )
        self.folder, self.every, self.tell = Path(folder), every, tell
        self.contents = Contents(model, optimizer, others, settings)
        self.progress = Progress()
        self._saved = Progress()
        self._unsaved: tuple[Progress, float | None] = Progress(), None  # progress and score of the last attempt
        self._release: Callable[[], object] | None = None

    def begin(self, resume: bool) -> Progress:
        """Return where the run starts. Call it before the first step.

        Args:
            resume: continue from the latest checkpoint, or the named one; from the beginning if there is none yet.

        Raises:
            InputError: another run writes into the folder; without `resume`, it holds checkpoints of another run; with it, it
                holds something else than a run; see also `load_checkpoint`.
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
        """Save at the end of an epoch, after its evaluation and the schedule's step. NaN and infinity are never the best."""
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, batch=0)
        self._save(score if math.isfinite(score) else None)

    def at_end(self) -> None:
        """Save the finished run unless that has been done, and release the folder. InputError if that fails for two minutes."""
        score = self._unsaved[1] if self._unsaved[0] == self.progress else None
        for attempts, pause_s in enumerate((*PAUSES_S, None)):
            why = "" if self.progress == self._saved else self._attempt(score)
            if not why:
                self.close()
                return
            if pause_s is None:
                raise InputError(f"the training is over, and its last state is not saved: {why}")
            if attempts == 0:
                self._report(
                    f"WARNING: {why}. The training is over: this is tried again for {sum(PAUSES_S):g} s", warns=True
                )
            time.sleep(pause_s)

    def reload(self) -> Progress:
        """Load the latest checkpoint of this run into the model, whose devices have changed. Errors as `load_checkpoint`."""
        # The run may have begun from a named checkpoint.
        self.folder = Path(from_first(self._group, "checkpoint: reload", lambda: str(run_folder(self.folder))))
        return self._load(self.folder)

    def go_back(self, progress: Progress) -> None:
        """Continue after an earlier step on other devices, the first of which writes from now on."""
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
        """Save. Return why that was not possible, or an empty text."""
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
