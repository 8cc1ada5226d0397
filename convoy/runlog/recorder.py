"""`convoy.record`: lets your own training loop write the same log as `convoy train`."""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from convoy.comm.control_messages import from_first, gather
from convoy.errors import InputError, shown
from convoy.runlog.directory import new_folder
from convoy.runlog.observers import Meters, StepTimer, Utilization
from convoy.runlog.reader import LOG_NAME
from convoy.runlog.schema import EndLine
from convoy.runlog.writer import RunLog
from convoy.runtime.module import Distributed
from convoy.train.rebalance import Decision, Reshard
from convoy.train.record import EpochResult, Evaluation, LateLosses, Observer, Observers, StepResult, lateness


class Recorder:
    """A context manager that logs a training for `convoy report` and observers. Every device creates one.

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
        observers: called at every step, evaluation and epoch, on the devices that give them; see `convoy.train.Observer`.
        settings: shown on the page of the run; `net` and `data` appear in its title.
        folder: the folder in which device 0 writes the log; None: a new folder in `runs` or in CONVOY_RUNS.

    Attributes:
        folder: of the run, on device 0's host.
    """

    _log: RunLog | None = None

    def __init__(
        self,
        model: Distributed,
        optimizer: Optimizer,
        *,
        observers: Sequence[Observer] = (),
        settings: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        group, settings = model.group, settings or {}
        self.optimizer, self.batch = optimizer, model.plan.batch
        self.steps = self.epochs = 0
        self._unread = LateLosses(lateness(group.torch_device))
        self._best: float | None = None
        self._begin_epoch()
        about = [str(group.torch_device), os.uname().nodename, torch.get_num_threads(), model.clock.slowdown]
        rows = gather(group, "devices of the record", about)
        with ExitStack() as stack:
            net = str(settings.get("net", type(model.module).__name__))
            self.folder = Path(from_first(group, "folder of the record", lambda: self._open_log(folder, net, stack)))
            if self._log is not None:
                options = {"net": net, "plan": model.plan.name, "batch": self.batch, **settings}
                plain = bool | int | float | str | None
                self._log.run({name: v if isinstance(v, plain) else str(v) for name, v in options.items()})
                devices = [
                    (f"{device} ({threads} thread{'s' * (threads > 1)})", host, slowdown)
                    for device, host, threads, slowdown in rows
                ]
                self._log.fleet(devices, [None] * len(rows), range(len(rows)))
                self._log.plan(model.plan, model.traced[True].graph)
            self._timer = StepTimer(self.batch)
            logs = [] if self._log is None else [self._log]
            meters = Meters(group, self._log.write if self._log else lambda _: None)
            usage = Utilization(group, model.clock, self._log)
            self._observers = Observers(self._timer, usage, *logs, *observers, meters)
            self._stack = stack.pop_all()

    def _open_log(self, folder: Path | None, net: str, stack: ExitStack) -> str:
        try:
            place = new_folder(net) if folder is None else folder
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot make the folder {shown(folder or net)} for the log: {error.strerror}; name another"
            ) from None
        self._log = stack.enter_context(RunLog(place / LOG_NAME))
        return str(place)

    def step(self, loss: float | Tensor, samples: int | None = None) -> None:
        """Call after `optimizer.step()`, before a learning rate schedule steps.

        Args:
            loss: of the global batch.
            samples: in the global batch; None: the plan's batch size.
        """
        value = loss if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
        count = self.batch if samples is None else samples
        self._unread.add(StepResult(self.steps, self.epochs, math.nan, count, self._lr), [value])
        self._observers.on_step_end(self.steps, count)
        self._report_steps(self._unread.due())
        self.steps += 1

    def evaluation(self, accuracy: float, *, ends_epoch: bool = False) -> None:
        """Call after an evaluation within an epoch; accuracy from 0 to 1."""
        self._report_steps(self._unread.due(late=0))
        is_best = self._best is None or accuracy > self._best
        self._best = accuracy if is_best else self._best
        self._observers.on_evaluation(Evaluation(self.epochs, self.steps, accuracy, ends_epoch, is_best))

    def epoch(self, accuracy: float | None = None) -> None:
        """Call at the end of an epoch, with its test accuracy (0 to 1) if there is one."""
        train_s = time.perf_counter() - self._start_s
        self._report_steps(self._unread.due(late=0))
        if accuracy is not None:
            self.evaluation(accuracy, ends_epoch=True)
        mean = self._loss_sum / self._samples if self._samples else float("nan")
        self._observers.on_epoch(EpochResult(self.epochs, mean, accuracy, train_s, self._samples / train_s, self._lr))
        self.epochs += 1
        self._begin_epoch()

    def tell(self, step: int, decision: Decision) -> None:
        """Log new shares or another plan after a step. Use: `convoy.Rebalancer(..., tell=run.tell)`."""
        if self._log is not None and isinstance(decision, Reshard):
            self._log.reshard(step, decision)
        self._timer.restart()

    @property
    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _begin_epoch(self) -> None:
        self._loss_sum, self._samples, self._start_s = 0.0, 0, time.perf_counter()

    def _report_steps(self, read: Iterable[StepResult]) -> None:
        for each in read:
            self._loss_sum, self._samples = self._loss_sum + each.loss * each.samples, self._samples + each.samples
            self._observers.on_step(each)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._report_steps(self._unread.due(late=0))
        if self._log is not None and kind is None:
            self._log.write(EndLine(step_s=self._timer.step_s))
        self._stack.close()


record = Recorder
