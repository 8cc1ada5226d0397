"""Loggers of other projects: TensorBoard, Weights & Biases, MLflow, and whatever else takes named numbers.

A logger is an observer that hands the numbers of a training to a *sink*, on a thread of its own. However slow the sink is, or
broken, training neither waits nor ends: that is told once.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from convoy.runlog.schema import SystemLine
from convoy.train.observer import EpochResult, Evaluation, Observer, StepResult

MOST_ROWS = 10_000
"""That wait for a slow sink; later ones are left out."""

CLOSE_S = 10.0
"""How long the end of a training waits for a sink to take what is left, and to close."""

EXPERIMENT = "convoy"
"""Of MLflow, where MLFLOW_EXPERIMENT_NAME names none."""

MOST_ENTRIES = 100
"""That MLflow takes in one call, of parameters."""


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers of one step, by their names; `time_s` since 1970."""

    step: int
    time_s: float
    numbers: Mapping[str, float]


class Sink(Protocol):
    """Where numbers go. It is made, used and closed on one thread, may take its time, and may raise what it likes."""

    def write(self, rows: Sequence[Row]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Logger(Observer):
    """Hands loss, learning rate and samples/s of every step and the accuracy of every test to a sink. A context: it ends it.

    Args:
        name: of the sink, for messages.
        make: makes the sink.
        tell: is called with a line of text when numbers are lost, once.
    """

    def __init__(self, name: str, make: Callable[[], Sink], tell: Callable[[str], None] = warnings.warn) -> None:
        self.name, self.make, self.tell = name, make, tell
        self._rows: list[Row] = []
        self._changed = threading.Condition()
        self._closing = self._told = self._failed = self._ended_badly = False
        self._last_s: float | None = None
        self._thread = threading.Thread(target=self._serve, name=f"convoy {name}", daemon=True)
        self._thread.start()

    def on_step(self, result: StepResult) -> None:
        now_s = result.ended_s
        numbers = {"loss": result.loss, "learning rate": result.lr}
        if self._last_s is not None:
            numbers["samples per s"] = result.samples / max(now_s - self._last_s, 1e-9)
        self._last_s = now_s
        self.write(result.step, numbers)

    def on_evaluation(self, result: Evaluation) -> None:
        self.write(result.step, {"accuracy": result.accuracy})
        self._last_s = None

    def on_epoch(self, result: EpochResult) -> None:  # noqa: ARG002
        self._last_s = None

    def on_system(self, line: SystemLine, ids: Sequence[int] | None = None) -> None:
        """What the devices used: seven numbers each, where all are known. `ids` name them; None: 0, 1, ..."""
        numbers = {
            f"device {device if ids is None else ids[device]}/{name.replace('_', ' ')}": value
            for name, values in line.per_device.items()
            for device, value in enumerate(values)
            if value is not None
        }
        self.write(line.step, numbers)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Any other numbers of a step. Returns at once."""
        with self._changed:
            full = len(self._rows) >= MOST_ROWS
            if not (full or self._failed):
                self._rows.append(Row(step, time.time(), numbers))
                self._changed.notify()
        if full:
            self._tell_once(f"{self.name} is slower than the training: some of its numbers are left out")

    def close(self, *, failed: bool = False) -> None:
        """Let the sink take what is left, and close it; at most `CLOSE_S`."""
        with self._changed:
            self._closing, self._ended_badly = True, failed
            self._changed.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._tell_once(f"{self.name} did not take its last numbers within {CLOSE_S:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _serve(self) -> None:
        try:
            sink = self.make()
            for rows in self._batches():
                sink.write(rows)
            sink.close(failed=self._ended_badly)
        except Exception as error:  # whatever another project raises is not worth the training
            with self._changed:
                self._failed = True
                self._rows.clear()
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._tell_once(f"{self.name} takes no numbers ({lines[0]}): the training goes on without it")

    def _batches(self) -> Iterator[list[Row]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._closing)
                rows, self._rows = self._rows, []
            if not rows:
                return
            yield rows

    def _tell_once(self, words: str) -> None:
        with self._changed:
            told, self._told = self._told, True
        if not told:
            self.tell(f"WARNING: {words}")


def to_tensorboard(folder: Path, step: int = 0, tell: Callable[[str], None] = warnings.warn) -> Logger:
    """Into TensorBoard's events.

    Args:
        folder: is made where it does not exist.
        step: the steps that the run has done before; what TensorBoard has of later ones is dropped.
    """

    class Events:
        def __init__(self) -> None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(folder, purge_step=step or None)

        def write(self, rows: Sequence[Row]) -> None:
            for row in rows:
                for name, number in row.numbers.items():
                    self.writer.add_scalar(name, number, row.step, row.time_s)

        def close(self, *, failed: bool) -> None:  # noqa: ARG002
            self.writer.close()

    return Logger(f"TensorBoard in {folder}", Events, tell)


def to_wandb(
    project: str,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    tell: Callable[[str], None] = warnings.warn,
) -> Logger:
    """Into a run of Weights & Biases. Its own variables count: WANDB_MODE=offline, WANDB_ENTITY and others.

    Args:
        name: of the run; None: W&B chooses.
        settings: what the run was made with.
        folder: where W&B keeps its files; None: as it chooses.
    """

    class Run:
        def __init__(self) -> None:
            import wandb

            self.run = wandb.init(
                project=project, name=name, config=dict(settings or {}), dir=None if folder is None else str(folder)
            )

        def write(self, rows: Sequence[Row]) -> None:
            for row in rows:
                self.run.log(dict(row.numbers), step=row.step)

        def close(self, *, failed: bool) -> None:
            self.run.finish(exit_code=int(failed))

    return Logger("W&B", Run, tell)


def to_mlflow(
    uri: str,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = warnings.warn,
) -> Logger:
    """Into a run of MLflow's, in the experiment that MLFLOW_EXPERIMENT_NAME names, or else in "convoy".

    Args:
        uri: of the tracking store: http://host:5000, sqlite:///mlflow.db.
        name: of the run; None: MLflow chooses.
        settings: what the run was made with; its parameters.
    """

    class Run:
        def __init__(self) -> None:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param

            self.client, self.metric = MlflowClient(tracking_uri=uri), Metric
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
            found = self.client.get_experiment_by_name(experiment)
            place = self.client.create_experiment(experiment) if found is None else found.experiment_id
            self.run_id = self.client.create_run(place, run_name=name).info.run_id
            params = [Param(key, str(value)) for key, value in (settings or {}).items() if value is not None]
            for start in range(0, len(params), MOST_ENTRIES):
                self.client.log_batch(self.run_id, params=params[start : start + MOST_ENTRIES])

        def write(self, rows: Sequence[Row]) -> None:
            metrics = [
                self.metric(key, number, int(row.time_s * 1000), row.step)
                for row in rows
                for key, number in row.numbers.items()
            ]
            for start in range(0, len(metrics), 10 * MOST_ENTRIES):
                self.client.log_batch(self.run_id, metrics=metrics[start : start + 10 * MOST_ENTRIES])

        def close(self, *, failed: bool) -> None:
            self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")

    return Logger("MLflow", Run, tell)
