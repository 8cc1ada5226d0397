"""`convoy.record`: a training loop of one's own writes down what it does, as `convoy train` does."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from convoy.adapt.rebalance import Decision, Reshare
from convoy.comm.agreement import from_first, gather
from convoy.errors import InputError, shown
from convoy.plan.presets import Speeds
from convoy.runlog.directory import new_folder
from convoy.runlog.meters import Meters
from convoy.runlog.observers import StepTimer, Utilization
from convoy.runlog.reader import LOG_NAME
from convoy.runlog.rows import fleet_line
from convoy.runlog.schema import EndLine
from convoy.runlog.writer import RunLog
from convoy.runtime.module import Distributed
from convoy.train.late_losses import LateLosses, Unread, UnreadNumber, lateness
from convoy.train.observer import EpochResult, Evaluation, Observer, Observers, StepResult


def record(
    model: Distributed,
    optimizer: Optimizer,
    *,
    observers: Sequence[Observer] = (),
    settings: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> "Recorder":
    """Write down a training: a log from which `convoy report` makes its page, and whatever observers do. Every device calls it.

    ::

        with convoy.record(model, optimizer, settings={"lr": 0.02}) as run:
            for epoch in range(2):
                for x, y in loader:
                    ...
                    optimizer.step()
                    run.step(loss)
                run.epoch(accuracy)

    Args:
        model, optimizer: from `convoy.prepare` or `convoy.distribute`.
        observers: are told every step, test and epoch, on the devices that were given them; see `convoy.train.Observer`.
        settings: what the page tells of the run, by name: `net` and `data` stand in its title.
        folder: where device 0 writes; None: a new folder in `runs`, or in the folder that CONVOY_RUNS names.

    Raises:
        InputError: the folder cannot be made, or another run writes there; on every device.
        DeviceLostError: a device did not take part.
    """
    return Recorder(model, optimizer, observers, settings or {}, folder)


class Recorder:
    """What `record` gives. A context: its end is that of the training.

    Attributes:
        folder: of the run, on device 0's host.
    """

    _log: RunLog | None = None
    _sum: float
    _samples: int
    _begun_s: float

    def __init__(
        self,
        model: Distributed,
        optimizer: Optimizer,
        observers: Sequence[Observer],
        settings: Mapping[str, Any],
        folder: Path | None,
    ) -> None:
        group = model.group
        self.optimizer, self.batch = optimizer, model.plan.batch
        self.steps = self.epochs = 0
        self._unread = LateLosses(lateness(group.torch_device))
        self._best: float | None = None
        self._begin_epoch()
        about = [str(group.torch_device), os.uname().nodename, torch.get_num_threads(), model.clock.slowdown]
        rows = gather(group, "devices of the record", about)
        with ExitStack() as stack:
            net = str(settings.get("net", type(model.module).__name__))
            self.folder = Path(from_first(group, "folder of the record", lambda: self._opened(folder, net, stack)))
            if self._log is not None:
                told = {"net": net, "plan": model.plan.name, "batch": self.batch, **settings}
                self._log.run({name: _plain(value) for name, value in told.items()})
                devices = [
                    (f"{device} ({threads} thread{'s' * (threads > 1)})", host, slowdown)
                    for device, host, threads, slowdown in rows
                ]
                self._log.write(fleet_line(devices, Speeds((1.0,) * len(rows), measured=False)))
                self._log.plan(model.plan, model.traced[True].graph)
            self._timer = StepTimer(self.batch)
            own = [self._timer, Utilization(group, model.clock, self._log)]
            own += [] if self._log is None else [self._log]
            self._observers = Observers(
                *own, *observers, Meters(group, (lambda _: None) if self._log is None else self._log.write)
            )
            self._stack = stack.pop_all()

    def _opened(self, folder: Path | None, net: str, stack: ExitStack) -> str:
        try:
            place = new_folder(net) if folder is None else folder
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror or str(error)
            raise InputError(
                f"cannot make the folder {shown(folder or net)} for the log: {why}; name another"
            ) from None
        self._log = stack.enter_context(RunLog(place / LOG_NAME))
        return str(place)

    def step(self, loss: float | Tensor, samples: int | None = None) -> None:
        """After `optimizer.step()`, and before a schedule goes on.

        Args:
            loss: of the whole batch.
            samples: of it; None: as many as the plan's batch has.
        """
        value = UnreadNumber([loss]) if isinstance(loss, Tensor) else float(loss)
        count = self.batch if samples is None else samples
        lr = float(self.optimizer.param_groups[0]["lr"])
        self._unread.add(Unread(self.steps, self.epochs, value, count, lr, time.perf_counter()))
        self._observers.on_step_end(self.steps, count)
        self._tell_steps(self._unread.due())
        self.steps += 1

    def evaluation(self, accuracy: float) -> None:
        """After a test within an epoch; accuracy from 0 to 1."""
        self._tell_steps(self._unread.rest())
        self._evaluate(accuracy, ends_epoch=False)

    def epoch(self, accuracy: float | None = None) -> None:
        """At the end of an epoch; `accuracy`, from 0 to 1, where it was tested."""
        train_s = time.perf_counter() - self._begun_s
        self._tell_steps(self._unread.rest())
        if accuracy is not None:
            self._evaluate(accuracy, ends_epoch=True)
        mean = self._sum / self._samples if self._samples else float("nan")
        lr = float(self.optimizer.param_groups[0]["lr"])
        self._observers.on_epoch(EpochResult(self.epochs, mean, accuracy, train_s, self._samples / train_s, lr))
        self.epochs += 1
        self._begin_epoch()

    def _tell_steps(self, read: Iterable[tuple[Unread, float]]) -> None:
        for each, loss in read:
            self._sum, self._samples = self._sum + loss * each.samples, self._samples + each.samples
            self._observers.on_step(StepResult(each.step, each.epoch, loss, each.samples, each.lr, each.ended_s))

    def tell(self, step: int, decision: Decision) -> None:
        """For `convoy.Rebalancer(..., tell=run.tell)`: other shares, or another plan, after a step."""
        if self._log is not None and isinstance(decision, Reshare):
            self._log.reshare(step, decision)
        self._timer.restart()

    def _begin_epoch(self) -> None:
        self._sum, self._samples, self._begun_s = 0.0, 0, time.perf_counter()

    def _evaluate(self, accuracy: float, *, ends_epoch: bool) -> None:
        is_best = self._best is None or accuracy > self._best
        self._best = accuracy if is_best else self._best
        self._observers.on_evaluation(Evaluation(self.epochs, self.steps, accuracy, ends_epoch, is_best))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._tell_steps(self._unread.rest())
        if self._log is not None and kind is None:
            self._log.write(EndLine(step_s=self._timer.step_s))
        self._stack.close()


def _plain(value: Any) -> Any:
    """As JSON holds it."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
