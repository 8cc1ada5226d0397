"""Writes the log of a run line by line as it happens, so that a run that is killed keeps what it had."""

import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from convoy._version import __version__
from convoy.adapt.rebalance import Reshare
from convoy.errors import InputError
from convoy.model.graph import Graph
from convoy.plan.plan import Plan
from convoy.runlog.rows import plan_line, plan_parts
from convoy.runlog.schema import EpochLine, EvaluationLine, Line, ReshareLine, RunLine, StepLine
from convoy.train.loop import EpochResult, Evaluation


class RunLog:
    """Appends lines to a JSONL file; observes the training.

    Args:
        path: the file; its folder must exist. An older file of that name is replaced, unless the run is resumed.
        step: the steps that the run has done before.
        lr: returns the learning rate of the next step.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: Path, step: int = 0, lr: Callable[[], float] | None = None) -> None:
        try:
            if step and path.exists():
                # What a killed run left of its last line: the next one must not be joined to it.
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self.file: IO[str] = path.open("a" if step else "w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write the log {path}: {error.strerror}; give a path in a folder that exists"
            ) from None
        self.count = step
        self.graph: Graph | None = None
        self._lr, self._next_lr = lr, lr() if lr is not None else None
        self._start_s = time.perf_counter()

    def write(self, line: Line) -> None:
        self.file.write(line.model_dump_json(by_alias=True) + "\n")

    def run(self, options: Mapping[str, Any], **more: Any) -> None:
        """The first line: what runs, where, with which versions, when, from which step on.

        Args:
            more: other fields of `RunLine`.
        """
        self.write(
            RunLine(
                date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), convoy=__version__,
                torch=torch.__version__, python=platform.python_version(), machine=platform.machine(),
                system=platform.platform(), from_step=self.count, options=dict(options), **more,
            )
        )  # fmt: skip

    def plan(self, plan: Plan, graph: Graph) -> None:
        self.graph = graph
        self.write(plan_line(plan, graph))

    def reshare(self, step: int, decision: Reshare) -> None:
        """Other shares, or another plan, after a step, and why."""
        parts = {} if self.graph is None else plan_parts(decision.plan, self.graph)
        plan = json.loads(decision.plan.to_json())
        self.write(ReshareLine(step=step, reason=decision.reason, plan=plan, **parts))

    def step(self, epoch: int, loss: float, samples: int) -> None:
        passed_s = round(time.perf_counter() - self._start_s, 6)
        line = StepLine(step=self.count, epoch=epoch, loss=loss, samples=samples, s=passed_s, lr=self._next_lr)
        self.write(line)
        self.count += 1
        if self._lr is not None:
            self._next_lr = self._lr()

    def on_evaluation(self, result: Evaluation, is_best: bool) -> None:
        self.write(EvaluationLine(step=result.step, epoch=result.epoch, accuracy=result.accuracy, best=is_best))

    def epoch(self, epoch: int, result: EpochResult) -> None:
        self.write(EpochLine(epoch=epoch, **asdict(result)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()
