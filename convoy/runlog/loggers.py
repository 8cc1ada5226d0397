"""Loggers for TensorBoard, Weights & Biases, MLflow and other tools.

`Logger` is an observer that writes the metrics of a training to a `MetricSink` in a separate thread. A slow or broken sink
neither delays nor ends the training: it is reported once.
"""

import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from convoy.runlog.schema import SystemLine
from convoy.train.record import EpochResult, Evaluation, Observer, StepResult

MAX_ROWS = 10_000  # in the queue of a slow sink; further rows are dropped
CLOSE_S = 10.0  # to wait for a sink at the end of a training
MLFLOW_PARAMS, MLFLOW_METRICS = 100, 1000  # MLflow's limits of one call


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Metrics of one step by name; `time_s` is Unix time."""

    step: int
    time_s: float
    numbers: Mapping[str, float]


class MetricSink(Protocol):
    """A destination of metrics, used by one thread. Its methods may block, and raise any exception."""

    def write(self, rows: Sequence[MetricRow]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Logger(Observer):
    """An observer that writes loss, learning rate, samples/s and test accuracy to a sink. Leaving its context closes it.

    Its thread calls `make` for the sink, which messages call `name`. `tell` is called once with a line when numbers are lost.
    """

    def __init__(self, name: str, make: Callable[[], MetricSink], tell: Callable[[str], None] = warnings.warn) -> None:
        self.name, self.make, self.tell = name, make, tell
        self._rows: queue.SimpleQueue[MetricRow | None] = queue.SimpleQueue()
        self._is_reported = self._has_failed = False
        self._last_s: float | None = None
        self._thread = threading.Thread(target=self._serve, name=f"convoy {name}", daemon=True)
        self._thread.start()

    def on_step(self, result: StepResult) -> None:
        numbers = {"loss": result.loss, "learning rate": result.lr}
        if self._last_s is not None:
            numbers["samples per s"] = result.samples / max(result.ended_s - self._last_s, 1e-9)
        self._last_s = result.ended_s
        self.write(result.step, numbers)

    def on_evaluation(self, result: Evaluation) -> None:
        self.write(result.step, {"accuracy": result.accuracy})
        self._last_s = None

    def on_epoch(self, result: EpochResult) -> None:  # noqa: ARG002
        self._last_s = None

    def on_system(self, line: SystemLine) -> None:
        """Write the resources that each device uses."""
        numbers = {
            f"device {device}/{name.replace('_', ' ')}": value
            for name, values in line.by_id.items()
            for device, value in values.items()
        }
        self.write(line.step, numbers)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue further metrics of a step. Does not block."""
        if self._rows.qsize() < MAX_ROWS:
            self._rows.put(MetricRow(step, time.time(), numbers))
        else:
            self._report(f"{self.name} is slower than the training: some numbers are dropped")

    def close(self, *, failed: bool = False) -> None:
        """Wait at most `CLOSE_S` until the sink has written all rows and is closed. `failed`: the training failed."""
        self._has_failed = failed
        self._rows.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._report(f"{self.name} did not take its last numbers within {CLOSE_S:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _serve(self) -> None:
        try:
            sink, is_open = self.make(), True
            while is_open:
                rows = [self._rows.get()]
                while len(rows) < MAX_ROWS and not self._rows.empty():
                    rows.append(self._rows.get())
                is_open = None not in rows
                sink.write([row for row in rows if row is not None])
            sink.close(failed=self._has_failed)
        except Exception as error:  # no error of another project's package may end the training
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._report(f"{self.name} failed ({lines[0]}): training continues without it")

    def _report(self, message: str) -> None:
        if not self._is_reported:
            self._is_reported = True
            self.tell(f"WARNING: {message}")


class _TensorBoard:
    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(folder, purge_step=step or None)

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            for name, number in row.numbers.items():
                self.writer.add_scalar(name, number, row.step, row.time_s)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        self.writer.close()


class _Wandb:
    def __init__(self, project: str, name: str | None, settings: Mapping[str, Any], folder: Path | None) -> None:
        import wandb

        self.run = wandb.init(project=project, name=name, config=dict(settings), dir=folder and str(folder))

    def write(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            self.run.log(dict(row.numbers), step=row.step)

    def close(self, *, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class _MLflow:
    def __init__(self, uri: str, name: str | None, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.client, self.metric = MlflowClient(tracking_uri=uri), Metric
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "convoy")
        found = self.client.get_experiment_by_name(experiment)
        place = self.client.create_experiment(experiment) if found is None else found.experiment_id
        self.run_id = self.client.create_run(place, run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in settings.items() if value is not None]
        for start in range(0, len(params), MLFLOW_PARAMS):
            self.client.log_batch(self.run_id, params=params[start : start + MLFLOW_PARAMS])

    def write(self, rows: Sequence[MetricRow]) -> None:
        metrics = [
            self.metric(key, number, int(row.time_s * 1000), row.step)
            for row in rows
            for key, number in row.numbers.items()
        ]
        for start in range(0, len(metrics), MLFLOW_METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + MLFLOW_METRICS])

    def close(self, *, failed: bool) -> None:
        self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def to_tensorboard(folder: Path, step: int = 0, tell: Callable[[str], None] = warnings.warn) -> Logger:
    """Return a logger that writes TensorBoard's event files into a folder. Those after `step` of a resumed run are dropped."""
    return Logger(f"TensorBoard in {folder}", partial(_TensorBoard, folder, step), tell)


def to_wandb(
    project: str, name: str | None = None, settings: Mapping[str, Any] | None = None, folder: Path | None = None,
    tell: Callable[[str], None] = warnings.warn,
) -> Logger:  # fmt: skip
    """Return a logger to a run of Weights & Biases, which reads its own variables: WANDB_MODE=offline, WANDB_ENTITY, ..."""
    return Logger("W&B", partial(_Wandb, project, name, settings or {}, folder), tell)


def to_mlflow(
    uri: str, name: str | None = None, settings: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = warnings.warn,
) -> Logger:  # fmt: skip
    """Return a logger to a run of MLflow in a store such as sqlite:///mlflow.db; see MLFLOW_EXPERIMENT_NAME ("convoy")."""
    return Logger("MLflow", partial(_MLflow, uri, name, settings or {}), tell)
