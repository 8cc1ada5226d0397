"""Members: what a training loop uses around its steps, and between them, so that devices may be lost, leave and join."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from convoy.comm.collectives import share_number
from convoy.comm.connection import Fields
from convoy.comm.group import ChangingGroup
from convoy.comm.processes import JoinedGroup
from convoy.elastic.admission import Admission, ScriptAdmission, facts_of, offer
from convoy.elastic.entrance import Entrance
from convoy.elastic.recovery import GrownError, InProportion, LeftError, Recovery, Replan, StateLostError, StoppedError
from convoy.elastic.regroup import Home, Membership, home_here, listens
from convoy.elastic.snapshot import Stateful
from convoy.errors import DeviceLostError, InputError
from convoy.machine.signals import handle_signals
from convoy.runtime.module import Distributed, StaleBatchError, not_distributed

__all__ = [
    "Attempt",
    "GrownError",
    "InProportion",
    "LeftError",
    "Members",
    "Replan",
    "StateLostError",
    "Stateful",
    "StoppedError",
]

T = TypeVar("T")

ASKED_STATUS = 2
"""Exit status of a script that ended by request, as of `convoy train`."""


@dataclass
class Attempt:
    """One attempt at a step.

    Attributes:
        finished: whether the step is complete; otherwise its batches come again. Known after the step.
    """

    finished: bool = False


class Members(Recovery):
    """The membership of one device in an elastic training. Every device makes one before the first step.

    It takes snapshots after steps, and copies the shards that only this device has to the next one. When a device is lost, the
    others regroup, return to the last step that all have finished, plan again, and continue: the trajectory stays that of one
    device.

    Args:
        model, optimizers: all optimizers that work on the model's parameters.
        others: schedules, a scaler: whatever else has a state that changes from step to step.
        every: steps from one snapshot to the next; the steps since are repeated after a loss. None: chosen so that snapshots
            take at most 2 % of the time, measured in the first steps.
        spares: copy shards that only one device has to another. Otherwise they are lost with their device.
        replan: makes the plan after a change, as `Plans.anew` does; None: the same strategies, with shares in proportion.
        tell: is called with a line of text when the devices have changed.
        admission: judges join requests, and tells joining devices what they must know; None: nobody is admitted.
        home: where a device that trains alone answers admission.
        entrance: of a joining device, with how it describes itself.

    Attributes:
        steps: finished steps.

    Raises:
        InputError: a model that is not distributed, or by inexact mixing; `every` below 1.
    """

    def __init__(
        self,
        model: Distributed,
        *optimizers: Optimizer,
        others: Sequence[Stateful] = (),
        every: int | None = 1,
        spares: bool = True,
        replan: Replan | None = None,
        tell: Callable[[str], None] | None = None,
        admission: Admission | None = None,
        home: Home | None = None,
        entrance: tuple[Entrance, Fields] | None = None,
    ) -> None:
        if not isinstance(model, Distributed):
            raise not_distributed("Members", model)
        if every is not None and every < 1:
            raise InputError(f"every={every}: steps from one snapshot to the next; give 1 or more")
        if model.plan.mixes:
            raise InputError(
                f"Members with reduce {model.plan.reduce}, where each device has weights of its own: leave it out"
            )
        replan = replan or InProportion()
        self._epoch: int | None = None  # of `epochs`
        self._joins_here = False  # within `epochs`
        self._inside = False  # what is repeated as a whole
        self._signals = ExitStack()
        group = model.group
        if entrance is None and isinstance(group, ChangingGroup) and group.entrance is not None:
            entrance, group.entrance = (group.entrance, facts_of(model)), None
        home = home_here(group) if home is None else home
        if admission is None and (entrance is not None or listens()):
            admission = ScriptAdmission(model, replan, lambda: self._epoch is not None)
        changes = isinstance(group, ChangingGroup) and (isinstance(group.present, JoinedGroup) or home is not None)
        membership = Membership(group, home) if changes and isinstance(group, ChangingGroup) else None
        super().__init__(model, optimizers, others, every, spares, replan, tell, membership, admission, entrance)
        model.guard = self._begin_epoch

    def epochs(self, count: int, start: int = 0) -> Iterator[int]:
        """Yield the numbers of the epochs of your own loop, from `start` to `count - 1`. Devices join at the start of each.

        On a joining device it waits until the others start their next epoch, and yields from that one on::

            for epoch in members.epochs(20):
                for x, y in loader:
                    with members.step():
                        ...

        Raises:
            InputError: the job refuses this device.
            DeviceLostError: see `recover`; or the job has ended.
        """
        self._joins_here = True
        self._start()
        joined = self._facts is not None and self._epoch is not None
        for epoch in range(start if self._epoch is None else self._epoch, count):
            self._epoch = epoch
            if not joined:
                self._admit()
            joined = False
            yield epoch

    def _admit(self) -> None:
        """Admit the joining devices that are wanted, at the start of an epoch."""
        if self.membership is None or self.admission is None:
            return
        self._note_others(torch.get_rng_state())
        try:
            self._grow()
        except DeviceLostError as error:
            self.recover(error)

    @contextmanager
    def step(self) -> Iterator[Attempt]:
        """Surround one step of your own loop, from forward to the optimizer's step. If a device is lost in it, the rest of the
        body is skipped, and Convoy's loader returns the same batches again.

        ::

            members = Members(model, optimizer)
            for x, y in loader:
                with members.step() as attempt:
                    optimizer.zero_grad()
                    loss = criterion(model(x), y)
                    loss.backward()
                    optimizer.step()
                if attempt.finished:
                    print(float(loss))

        A step that one device has finished is finished for all: at its end the devices wait until all have its snapshot, with
        the copies.

        Raises:
            DeviceLostError: see `recover`.
        """
        self._start()
        wanted = self.steps + 1
        # Random numbers drawn since, such as the order of an epoch, are not drawn again.
        self._note_others(torch.get_rng_state())
        attempt = Attempt()
        try:
            yield attempt
            if not self.model.stale:
                self.after_step()
        except StaleBatchError:
            pass  # the loader hands it out again
        except DeviceLostError as error:
            self.recover(error)
            self.model.repeats += self.steps < wanted
        self.model.stale = False
        attempt.finished = self.steps == wanted
        self.model.finished_steps = self.steps

    def _start(self) -> None:
        """Begin, before the first communication of a script's loop."""
        if self._strict:
            return
        if self.entrance is not None and self.membership is None and not self._joins_here:
            raise InputError(
                "this device joins a running job, which it can at the start of an epoch: write "
                "`for epoch in members.epochs(n):` around the loop over batches, on all devices"
            )
        if self.every > 1:
            raise InputError(
                f"every={self.every} with `with members.step()`: what this loop has done after a step is not undone; leave it "
                "out"
            )
        self._strict, self._pace = True, None
        self.run_state = lambda: self._epoch, self._take_epoch
        self._signals.enter_context(handle_signals(self))
        if threading.current_thread() is threading.main_thread():
            self._signals.callback(_print_asked_end())
        # Where the group has broken, the next message says it again.
        with suppress(DeviceLostError) if self.entrance is None else nullcontext():
            self.begin()
        if self.membership is not None and self.admission is not None:
            self.membership.offer = offer()

    def _take_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def _begin_epoch(self, loader: Any) -> tuple[int, list[list[int]]]:
        """Return the loader's seed and batches of the epoch that it begins."""
        work = partial(loader.begin, joined=self._facts is not None)
        if self._inside:
            return work()  # type: ignore[no-any-return]
        self._start()
        return self._repeated(work)  # type: ignore[no-any-return]

    def _note_others(self, random: Tensor | None = None) -> None:
        """Add to the snapshot what the script has done since the last step, such as a schedule's step after an epoch."""
        if self._strict and self.states.kept:
            kept = self.states.kept[-1]
            kept.others = {**self._others(), "random": kept.others["random"] if random is None else random}

    def repeated(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, which communicates between two steps, such as a test. It is repeated if a device is lost.
        If others had completed it by then, this device gets their result if JSON can hold it, else None.

        Before the first of `epochs` a joining device gets None: the others did the work without it.

        Raises:
            DeviceLostError: see `recover`; or there is no snapshot of the last step.
        """
        if self._inside:
            return work()
        if self.entrance is not None and self.membership is None:
            return None  # type: ignore[return-value]
        if self.membership is not None and self._planned is None:
            self._start()  # from here on a loss ends nothing
        return self._repeated(work)

    def _repeated(self, work: Callable[[], T]) -> T:
        self._note_others()
        while True:
            try:
                self._inside = True
                try:
                    result = work()
                    if self.membership is not None:
                        share_number(self.model.group, 0.0)  # all have completed it
                finally:
                    self._inside = False
                self._completed.done(result)
                return result
            except DeviceLostError as error:
                count, steps = self._completed.count, self.steps
                self.recover(error)
                if self.steps != steps:
                    raise error
                if self._completed.count > count:
                    return self._completed.result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Leave the membership at the end of all work. Every device calls it."""
        self._signals.close()
        super().close()


def _print_asked_end() -> Callable[[], None]:
    """Print one line instead of a traceback when a script ends by request. Return what undoes this."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, LeftError | StoppedError):
            before(kind, error, trace)
            return
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(ASKED_STATUS)

    def undo() -> None:
        sys.excepthook = before

    sys.excepthook = hook
    return undo
