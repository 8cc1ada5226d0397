"""Reads the log of a run, whatever happened to the run."""

import codecs
import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from convoy.errors import InputError, shown
from convoy.files import open_regular, parse_json
from convoy.runlog.schema import (
    KINDS,
    LINE,
    EndLine,
    EpochLine,
    EvaluationLine,
    FleetLine,
    Line,
    MembersLine,
    PlanLine,
    PredictionLine,
    ReshareLine,
    RunLine,
    StepLine,
    SystemLine,
    UtilizationLine,
)

LOG_NAME = "log.jsonl"

LEAST_STEP_S = 1e-9
"""Less is no step: its clock was set, or the log was changed."""

MOST_LOG_BYTES = 1 << 30
"""A step takes about 100 bytes."""

COMPARED_BYTES = 512
"""Of the end of what was read, which must still stand there when a log is read on."""


@dataclass(frozen=True, slots=True)
class InForce:
    """What the devices do from a step on.

    Attributes:
        prediction: of these shares of this plan; None where there is none.
    """

    step: int
    line: PlanLine | ReshareLine
    prediction: PredictionLine | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What a log tells of a run. A resumed run is one: a step that was done twice counts as it was done last.

    Attributes:
        prediction: of the last plan that the planner chose.
        seconds: of each of `steps`, from the end of the one before; None of the first, and of the first after a test.
        times_s: the end of each of `steps`, from the beginning of the run, without the time between its parts.
        plans: what the devices did, from the first step and from each change on.
        end: None where the run still goes on, or was ended.
        is_cut: the last line is not whole.
        ids: of the devices that train at its end, in the order of what is told by device. Empty: none was lost or came.
    """

    path: Path
    run: RunLine
    fleet: FleetLine | None
    plan: PlanLine | None
    prediction: PredictionLine | None
    steps: tuple[StepLine, ...]
    seconds: tuple[float | None, ...]
    times_s: tuple[float, ...]
    evaluations: tuple[EvaluationLine, ...]
    epochs: tuple[EpochLine, ...]
    utilization: tuple[UtilizationLine, ...]
    system: tuple[SystemLine, ...]
    plans: tuple[InForce, ...]
    end: EndLine | None
    is_cut: bool
    ids: tuple[int, ...] = ()

    def id_of(self, place: int) -> int:
        """The id of a device by its place among those that train at the end."""
        return self.ids[place] if place < len(self.ids) else place

    @property
    def reshares(self) -> tuple[ReshareLine, ...]:
        return tuple(each.line for each in self.plans if isinstance(each.line, ReshareLine))

    @property
    def steps_done(self) -> int:
        return self.steps[-1].step + 1 if self.steps else self.run.from_step


def log_of(run: Path) -> Path:
    """The log of a run, which is given as a folder or as the log itself.

    Raises:
        InputError: there is none; where the folder holds runs, the latest is named.
    """
    if (log := _own_log(run)) is not None:
        return log
    inner = sorted(path.parent for path in run.glob(f"*/{LOG_NAME}"))
    remedy = f"the latest run in it is {inner[-1]}" if inner else "give the folder of a run, or its log"
    raise InputError(f"there is no {LOG_NAME} in {run}: {remedy}")


def _own_log(run: Path) -> Path | None:
    """What is no folder is a log itself; the log in a folder, if there is one."""
    return run if not os.path.isdir(run) else run / LOG_NAME if os.path.exists(run / LOG_NAME) else None


def newest_log(run: Path) -> Path:
    """The log of a run, or of the latest run in a folder of runs; where there is none yet, where it would be."""
    if (log := _own_log(run)) is not None:
        return log
    known = []
    for path in run.glob(f"*/{LOG_NAME}"):
        with suppress(OSError):
            known.append((path.stat().st_mtime_ns, path))
    return max(known)[1] if known else run / LOG_NAME


def newest_run(runs: Path) -> Path:
    """The latest run in a folder of runs.

    Raises:
        InputError: there is none.
    """
    log = newest_log(runs)
    if log.parent.parent != runs:
        raise InputError(f"there is no run in {runs} yet: give the folder of a run, or its log")
    return log.parent


def read_log(path: Path) -> Record:
    """Read a log. Its last line may be cut off.

    Raises:
        InputError: the file cannot be read, is empty or no log of a run; names the line.
    """
    return GrowingLog(path).read()


class GrowingLog:
    """A log that may still be written: each reading reads what was added since the one before.

    A file that was replaced, cut off or written anew in between is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._lines: list[Line] = []
        self._rows = self._offset = 0
        self._file: tuple[int, int] | None = None
        self._end = b""

    def read(self) -> Record:
        """The log as it is now; errors as of :func:`read_log`."""
        try:
            rest = self._read_on()
        except InputError:
            self._forget()
            raise
        if not self._lines or not isinstance(self._lines[0], RunLine):
            why = 'its first line is not that of a run, {"what": "run", ...}' if self._lines else "it is empty"
            raise _foreign(self.path, why)
        record = _record(self.path, self._lines, bool(rest))
        if len(_device_counts(record)) > 1:
            raise _foreign(self.path, "its lines are of different numbers of devices")
        return record

    def _read_on(self) -> bytes:
        """Take the whole lines that were added; what stands behind the last of them."""
        try:
            with open_regular(self.path) as file:
                state = os.fstat(file.fileno())
                file.seek(self._offset - len(self._end))
                # What was read stands there still, and in the same file; else all of it is read anew.
                if self._file != (state.st_dev, state.st_ino) or file.read(len(self._end)) != self._end:
                    self._forget()
                self._file = state.st_dev, state.st_ino
                file.seek(self._offset)
                content = file.read(MOST_LOG_BYTES - self._offset + 1)
            if self._offset + len(content) > MOST_LOG_BYTES:
                raise OSError(errno.EFBIG, f"it has more than {MOST_LOG_BYTES:,} bytes")
            whole, newline, rest = content.rpartition(b"\n")
            rows = whole.decode("utf-8").split("\n") if newline else []
            codecs.getincrementaldecoder("utf-8")().decode(rest)
        except UnicodeDecodeError as error:
            raise _unreadable(self.path, f"it is no text in UTF-8 ({error.reason} at byte {error.start})") from None
        except OSError as error:
            raise _unreadable(self.path, error.strerror or str(error)) from None
        self._lines += _lines(self.path, rows, self._rows)
        self._rows += len(rows)
        self._offset += len(content) - len(rest)
        if newline:
            self._end = (self._end + whole + newline)[-COMPARED_BYTES:]
        return rest


def _lines(path: Path, rows: list[str], before: int) -> Iterator[Line]:
    for number, row in enumerate(rows, before + 1):
        try:
            raw = parse_json(row)
        except ValueError:
            raise _foreign(path, f"line {number} is no JSON") from None
        if not isinstance(raw, dict) or "what" not in raw:
            raise _foreign(path, f'line {number} has no "what"')
        if isinstance(raw["what"], str) and raw["what"] in KINDS:
            try:
                yield LINE.validate_python(raw)
            except ValidationError as error:
                fault = error.errors()[0]
                raise _foreign(path, f"line {number}: {fault['loc'][-1]}: {fault['msg'].lower()}") from None


_REMEDY = "give the folder of a run, or the log that it wrote"


def _foreign(path: Path, why: str) -> InputError:
    return InputError(f"{path} is no log of a training: {why}; {_REMEDY}")


def _unreadable(path: Path, why: str) -> InputError:
    return InputError(f"cannot read the log {shown(path)}: {why}; {_REMEDY}")


def _record(path: Path, lines: list[Line], is_cut: bool) -> Record:
    latest: dict[type[Line], Any] = {}
    steps: dict[int, tuple[StepLine, float | None, float]] = {}
    tests: dict[int, EvaluationLine] = {}
    epochs: dict[int, EpochLine] = {}
    utilization: dict[int, UtilizationLine] = {}
    system: dict[int, SystemLine] = {}
    plans: list[InForce] = []
    prediction: PredictionLine | None = None
    begun, begun_s = 0, 0.0
    last_s: float | None = None
    for line in lines:
        latest[type(line)] = line
        match line:
            case RunLine():
                begun, last_s, prediction = line.from_step, None, None
                latest.pop(EndLine, None)
                latest.pop(MembersLine, None)
                steps = {n: row for n, row in steps.items() if n < begun}
                tests = {n: row for n, row in tests.items() if n <= begun}
                system = {n: row for n, row in system.items() if n <= begun}
                plans = [each for each in plans if each.step < begun]
                begun_s = max((time_s for _, _, time_s in steps.values()), default=0.0)
            case MembersLine():
                begun, last_s, prediction = line.step, None, None
                latest.pop(FleetLine, None)
                utilization, plans = {}, []
                # Lines that say whose values they have are read on.
                system = {n: row for n, row in system.items() if n <= begun and row.ids}
            case PredictionLine():
                prediction = prediction if line.shares_only else line
                if plans:
                    plans[-1] = replace(plans[-1], prediction=line)
            case StepLine():
                passed_s = None if last_s is None else line.s - last_s
                known_s = passed_s if passed_s is not None and passed_s > LEAST_STEP_S else None
                steps[line.step] = line, known_s, begun_s + line.s
                last_s = line.s
            case EvaluationLine():
                tests[line.step], last_s = line, None
            case EpochLine():
                epochs[line.epoch], last_s = line, None
            case UtilizationLine():
                utilization[line.epoch] = line
            case SystemLine():
                system[line.step] = line
            case PlanLine():
                plans.append(InForce(begun, line))
            case ReshareLine():
                plans.append(InForce(line.step + 1, line))
    done = [steps[number] for number in sorted(steps)]
    return Record(
        path, latest[RunLine], latest.get(FleetLine), latest.get(PlanLine), prediction,
        tuple(line for line, _, _ in done), tuple(s for _, s, _ in done), tuple(time_s for _, _, time_s in done),
        tuple(tests.values()), tuple(epochs[n] for n in sorted(epochs)),
        tuple(utilization[n] for n in sorted(utilization)), tuple(system[n] for n in sorted(system)), tuple(plans),
        latest.get(EndLine), is_cut, latest[MembersLine].devices if MembersLine in latest else (),
    )  # fmt: skip


def _device_counts(record: Record) -> set[int]:
    """The numbers of devices that its lines are of."""
    per_device: list[tuple[Any, ...]] = []
    for line in record.utilization:
        per_device += [line.wall_s, line.compute_s, line.exchange_s]
    for each in record.system:
        own = [*each.per_device.values(), *([each.ids] if each.ids else [])]
        # Lines of devices that were lost since are whole in themselves.
        per_device += own if each.ids in ((), record.ids) or len({len(values) for values in own}) > 1 else []
    for plan in record.plans:
        per_device += [layer.parts for layer in plan.line.layers]
        per_device += [plan.line.work] if plan.line.work else []
    if record.fleet is not None:
        per_device.append(record.fleet.devices)
    for predicted in (record.prediction, *(plan.prediction for plan in record.plans)):
        if predicted is not None:
            per_device += [predicted.names, predicted.one_pass.compute_s, predicted.one_pass.exchange_s]
    return {len(each) for each in per_device}
