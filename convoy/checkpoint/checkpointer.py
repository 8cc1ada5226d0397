"""When a training run is saved, and from where it goes on: what a training loop needs of checkpoints."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from convoy.checkpoint.folder import Progress, latest
from convoy.checkpoint.load import load_checkpoint
from convoy.checkpoint.save import KEEP, Stateful, save_checkpoint
from convoy.checkpoint.tensors import Parts
from convoy.comm.agreement import from_first
from convoy.errors import InputError


class Checkpointer:
    """Saves a run as it goes, and counts how far it is. Every device has one, and calls it alike.

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
        folder: of the run, on device 0's machine.
        model, optimizer, schedule, scaler, settings, keep: see `save_checkpoint`.
        every: steps from one checkpoint to the next; None: only after evaluations.
        tell: is called on every device with a line of text when a run goes on, and when it was saved.

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

    def begin(self, resume: bool) -> Progress:
        """Before the first step.

        Args:
            resume: go on from the latest checkpoint, or from the beginning where a run was ended before its first.

        Returns:
            where the run goes on.

        Raises:
            InputError: without `resume`, the folder holds the checkpoints of another run; with it, see `load_checkpoint`.
        """
        group = Parts.of(self.model).group
        found = from_first(group, "checkpoint: begin", lambda: self._found(resume))
        if found is not None:
            self.progress = self._saved = load_checkpoint(
                found,
                self.model,
                self.optimizer,
                schedule=self.schedule,
                scaler=self.scaler,
                settings=self.settings,
            )
            self._tell(f"goes on from {found}: step {self.progress.step}, epoch {self.progress.epoch}")
        elif resume:
            self._tell(f"{self.folder} holds no checkpoint yet: the run begins at its beginning")
        return self.progress

    def after_step(self) -> None:
        """After every step of the optimizer, and of the schedule if it steps as often."""
        here = self.progress
        self.progress = replace(here, step=here.step + 1, batch=here.batch + 1)
        if self.every is not None and self.progress.step % self.every == 0:
            self._save()

    def at_evaluation(self, score: float) -> None:
        """At the end of an epoch, after its evaluation, and the schedule's step if it has one there.

        Args:
            score: the greater the better; what is not finite is nobody's best.
        """
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, batch=0)
        self._save(score if math.isfinite(score) else None)

    def at_end(self) -> None:
        """When the run is over: saves it unless that has been done."""
        if self.progress != self._saved:
            self._save()

    def _found(self, resume: bool) -> str | None:
        if resume:
            if not self.folder.is_dir():
                raise InputError(
                    f"there is nothing to resume: the folder {self.folder} does not exist; give that of an earlier run, or "
                    "start without resuming"
                )
            path = latest(self.folder)
            return None if path is None else str(path)
        if held := latest(self.folder):
            raise InputError(
                f"{self.folder} holds the checkpoints of another run, the latest is {held.name}: resume it (--resume), or "
                "name another folder"
            )
        try:
            # From now on there is something to resume, even if the run is ended before its first checkpoint.
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the folder {self.folder} for checkpoints: {error.strerror}; name one that you may write"
            ) from None
        return None

    def _save(self, score: float | None = None) -> None:
        path = save_checkpoint(
            self.folder, self.model, self.optimizer, self.progress,
            schedule=self.schedule, scaler=self.scaler, settings=self.settings, score=score, keep=self.keep,
        )  # fmt: skip
        self._saved = self.progress
        self._tell(f"saved {path}")

    def _tell(self, line: str) -> None:
        if self.tell is not None:
            self.tell(line)
