"""The log of a run: one JSON object per line, written as it happens, so that a run that is killed keeps what it had."""

import datetime
import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from convoy._version import __version__
from convoy.errors import InputError
from convoy.execute.train import EpochResult, Evaluation, Observer


class RunLog:
    """Appends to a JSONL file; each line has a "what": "run", "step", "evaluation", "epoch", "reshare" or "device".

    Args:
        path: the file; its folder must exist. An older file of that name is replaced, unless the run goes on.
        step: the steps that the run has done before.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        try:
            self.file: IO[str] = path.open("a" if step else "w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"cannot write the log {path}: {error.strerror}; give a path in a folder that exists"
            ) from None
        self.count = step

    def run(self, options: Mapping[str, Any]) -> None:
        """The first line: what runs, where, with which versions, when."""
        self.write(
            "run",
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            convoy=__version__,
            torch=torch.__version__,
            python=platform.python_version(),
            machine=platform.machine(),
            system=platform.platform(),
            options=dict(options),
        )

    def step(self, epoch: int, loss: float, samples: int) -> None:
        self.write("step", step=self.count, epoch=epoch, loss=loss, samples=samples)
        self.count += 1

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


class Both:
    """Two observers as one."""

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
