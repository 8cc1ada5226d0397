"""Writes the log of a run line by line, so that the log of a killed run has all lines until then."""

import datetime
import fcntl
import json
import os
import platform
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from convoy._version import __version__
from convoy.errors import InputError
from convoy.machine.accelerator import modes
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.text import layer_rows, work_shares
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.prediction import PlanPrediction, predict_plan
from convoy.planner.request import PlanRequest
from convoy.runlog import schema
from convoy.simulate.table import Measurement
from convoy.train.rebalance import Reshard
from convoy.train.record import EpochResult, Evaluation, Observer, StepResult


class RunLog(Observer):
    """An observer that writes one JSON line per event of a training to a file.

    If a line cannot be written, for instance because the disk is full, the log ends and the training continues.

    Args:
        path: the file, in a folder that exists. An older file is replaced, unless the run is resumed.
        step: steps before the run was resumed.
        report: called with a line of text if the log ends early.
        from_lost: continue the log of a lost process. That process may be suspended with the file open, so a copy replaces
            the file. Missing folders are created.
    """

    def __init__(
        self, path: Path, step: int = 0, report: Callable[[str], None] = warnings.warn, *, from_lost: bool = False
    ) -> None:
        self.path, self.done, self.report = path, step, report
        self.graph: Graph | None = None
        self._start_s = time.perf_counter()
        self._has_ended = False
        try:
            if from_lost:
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_file():
                    copy = path.with_name(f".{path.name}.{os.getpid()}")
                    shutil.copyfile(path, copy)
                    copy.replace(path)
            self._file = _open(path, resumed=step > 0)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise InputError(f"cannot write the log {path}: {why}; give a path in a folder that exists") from None

    def write(self, line: schema.Line) -> None:
        rest = line.model_dump_json(by_alias=True).encode("utf-8", "backslashreplace") + b"\n"
        try:
            while rest and not self._has_ended:
                rest = rest[os.write(self._file, rest) :]  # a nearly full disk may take only a part of the line
        except OSError as error:
            self._has_ended = True
            self.report(
                f"WARNING: cannot write the log {self.path} ({error.strerror}): training continues, and the log ends here"
            )

    def run(self, options: Mapping[str, Any], **more: Any) -> None:
        """Write the first line: settings, versions, date and first step. `more`: further fields of `RunLine`."""
        self.write(
            schema.RunLine(
                date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), convoy=__version__,
                torch=torch.__version__, python=platform.python_version(), machine=platform.machine(),
                system=platform.platform(), from_step=self.done, options=dict(options), modes=modes(), **more
            )
        )  # fmt: skip

    def fleet(
        self, devices: Sequence[tuple[str, str, float]], solo: Sequence[float | None], ids: Sequence[int]
    ) -> None:
        """Write the devices (kind, host, slowdown), their solo throughputs if these were measured, and their ids."""
        entries = [
            schema.DeviceEntry(name=name, host=host, slowdown=slowdown, samples_per_s=samples_per_s)
            for (name, host, slowdown), samples_per_s in zip(devices, solo, strict=True)
        ]
        self.write(schema.FleetLine(devices=tuple(entries), ids=tuple(ids)))

    def plan(self, plan: Plan, graph: Graph) -> None:
        self.graph = graph
        self.write(plan_line(plan, graph))

    def predict(
        self, plan: Plan, measured: Measurement, optimizer: str, micro_batches: int, shares_only: bool = False
    ) -> None:
        """Write a plan's prediction for the measured devices. Call :meth:`plan` first."""
        assert self.graph is not None
        request = PlanRequest(
            self.graph, plan.batch, FleetKnowledge(measured=measured), optimizer=optimizer, wire=plan.wire,
            micro_batches=micro_batches
        )  # fmt: skip
        self.write(prediction_line(predict_plan(plan, request), request, shares_only))

    def reshard(self, step: int, decision: Reshard) -> None:
        """Write new shares or another plan after a step, with the reason. Call :meth:`plan` first."""
        assert self.graph is not None
        now = plan_line(decision.plan, self.graph)
        self.write(
            schema.ReshardLine(
                step=step, reason=decision.reason, plan=json.loads(decision.plan.to_json()), layers=now.layers,
                work=now.work
            )
        )  # fmt: skip

    def on_step(self, result: StepResult) -> None:
        fields = asdict(result)
        self.write(schema.StepLine(s=round(max(0.0, fields.pop("ended_s") - self._start_s), 6), **fields))

    def on_evaluation(self, result: Evaluation) -> None:
        self.write(
            schema.EvaluationLine(step=result.step, epoch=result.epoch, accuracy=result.accuracy, best=result.is_best)
        )

    def on_epoch(self, result: EpochResult) -> None:
        self.write(schema.EpochLine(**asdict(result)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def _open(path: Path, *, resumed: bool) -> int:
    """Open a log for appending. If the run is resumed, keep its complete lines; otherwise empty it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        os.set_blocking(handle, True)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another run writes the log {path}: wait until it ends, or name another file"
                ) from None
            except OSError:
                pass  # a file system without locks
            # A killed run may have left an incomplete line: remove it.
            content = path.read_bytes() if resumed else b""
            os.ftruncate(handle, content.rfind(b"\n") + 1)
        return handle
    except BaseException:
        os.close(handle)
        raise


def prediction_line(
    predicted: PlanPrediction, request: PlanRequest, shares_only: bool = False
) -> schema.PredictionLine:
    timeline = predicted.timeline
    return schema.PredictionLine(
        step_s=predicted.step_s * request.micro_batches, samples_per_s=predicted.samples_per_s,
        limit_samples_per_s=sum(request.speeds.devices), bound=predicted.bound, names=request.names,
        one_pass=schema.MicroBatchEntry(
            s=timeline.step_s, compute_s=timeline.compute_s, exchange_s=timeline.exchange_s
        ),
        events=tuple(
            (e.device, e.activity, e.label, e.start_s, e.end_s, e.peer, e.size_bytes)
            for e in timeline.events if e.activity != "wait" and e.end_s > e.start_s
        ),
        spread=min(predicted.spread, 1e12), shares_only=shares_only,
        joules_per_image=predicted.image_j,
    )  # fmt: skip


def plan_line(plan: Plan, graph: Graph) -> schema.PlanLine:
    """Describe a plan: each device's share of each layer and of the arithmetic, and the traffic of a micro-batch."""
    layers = [
        schema.LayerEntry(
            layer=row.layer, kind=row.kind, strategy=row.strategy, parts=row.parts, note=row.note,
            flop=graph[row.layer].flop, bytes=row.bytes_,
        )
        for row in layer_rows(plan, graph)
    ]  # fmt: skip
    return schema.PlanLine(
        plan=schema.PlanEntry.model_validate_json(plan.to_json()), inexact=plan.inexact, layers=tuple(layers),
        work=work_shares(lower(plan, graph), graph),
    )  # fmt: skip
