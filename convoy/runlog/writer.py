"""The log of a run: one JSON object per line, written as it happens, so that a run that is killed keeps what it had."""

import datetime
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from convoy._version import __version__
from convoy.adapt.rebalance import Reshare
from convoy.errors import InputError
from convoy.model.graph import Graph
from convoy.plan.plan import Plan
from convoy.runlog.values import plan_fields
from convoy.train.loop import EpochResult, Evaluation, Observer


class RunLog:
    """Appends to a JSONL file. Each line has a "what": "run", "fleet", "plan" and "prediction" stand first, then "step",
    "evaluation", "epoch", "busy" and "reshare" as they happen, then "device" and "end".

    Args:
        path: the file; its folder must exist. An older file of that name is replaced, unless the run goes on.
        step: the steps that the run has done before.
        lr: the learning rate of the next step, when it is called.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: Path, step: int = 0, lr: Callable[[], float] | None = None) -> None:
        try:
            if step and path.exists():
                _drop_half_a_line(path)
            self.file: IO[str] = path.open("a" if step else "w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write the log {path}: {error.strerror}; give a path in a folder that exists"
            ) from None
        self.count = step
        self.graph: Graph | None = None
        self._lr, self._next_lr = lr, lr() if lr is not None else None
        self._start_s = time.perf_counter()

    def run(self, options: Mapping[str, Any], **facts: Any) -> None:
        """The first line: what runs, where, with which versions, when, from which step on."""
        self.write(
            "run",
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            convoy=__version__,
            torch=torch.__version__,
            python=platform.python_version(),
            machine=platform.machine(),
            system=platform.platform(),
            from_step=self.count,
            options=dict(options),
            **facts,
        )

    def plan(self, plan: Plan, graph: Graph) -> None:
        """The plan as a file holds it, and what follows from it."""
        self.graph = graph
        self.write("plan", plan=json.loads(plan.to_json()), inexact=plan.inexact, **plan_fields(plan, graph))

    def reshare(self, step: int, decision: Reshare) -> None:
        """Other shares from a step on, and why."""
        follows = {} if self.graph is None else plan_fields(decision.plan, self.graph)
        self.write("reshare", step=step, reason=decision.reason, plan=json.loads(decision.plan.to_json()), **follows)

    def step(self, epoch: int, loss: float, samples: int) -> None:
        """With the seconds since the log was opened, and the learning rate of this step."""
        passed_s = time.perf_counter() - self._start_s
        self.write(
            "step", step=self.count, epoch=epoch, loss=loss, samples=samples, s=round(passed_s, 6), lr=self._next_lr
        )
        self.count += 1
        if self._lr is not None:
            self._next_lr = self._lr()

    def on_evaluation(self, result: Evaluation, is_best: bool) -> None:
        self.write("evaluation", step=result.step, epoch=result.epoch, accuracy=result.accuracy, best=is_best)

    def epoch(self, epoch: int, result: EpochResult) -> None:
        self.write(
            "epoch", epoch=epoch, loss=result.loss, accuracy=result.accuracy, train_s=result.train_s,
            samples_per_s=result.samples_per_s, lr=result.lr,
        )  # fmt: skip

    def write(self, what: str, **fields: Any) -> None:
        """One line. A number that is not finite, such as the loss of a training that diverged, is written as null."""
        self.file.write(json.dumps(_finite({"what": what, **fields}), default=str, allow_nan=False) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()


class All:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def step(self, epoch: int, loss: float, samples: int) -> None:
        for observer in self.observers:
            observer.step(epoch, loss, samples)

    def on_evaluation(self, result: Evaluation, is_best: bool) -> None:
        for observer in self.observers:
            observer.on_evaluation(result, is_best)

    def epoch(self, epoch: int, result: EpochResult) -> None:
        for observer in self.observers:
            observer.epoch(epoch, result)


def _drop_half_a_line(path: Path) -> None:
    """What a killed run began to write: the next line must not be joined to it."""
    whole = path.read_bytes().rfind(b"\n") + 1
    os.truncate(path, whole)


def _finite(value: Any) -> Any:
    """JSON knows no NaN; most readers refuse a line that holds one."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value
