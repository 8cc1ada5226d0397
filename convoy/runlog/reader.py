"""Reads the log of a run, whatever happened to the run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from convoy.errors import InputError
from convoy.runlog.schema import (
    KINDS,
    LINE,
    EndLine,
    EpochLine,
    EvaluationLine,
    FleetLine,
    Line,
    PlanLine,
    PredictionLine,
    ReshareLine,
    RunLine,
    StepLine,
    UtilizationLine,
)

LOG_NAME = "log.jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """What a log tells of a run. A resumed run is one: a step that was done twice counts as it was done last.

    Attributes:
        prediction: of the last plan that the planner chose.
        in_force: the prediction of the shares that ran last; None where these were not predicted.
        seconds: of each of `steps`, from the end of the one before; None of the first, and of the first after a test.
        changes: the shares of the plan, and from which step on: at the beginning, and after each change.
        end: None where the run still goes on, or was ended.
        is_cut: the last line is not whole.
    """

    path: Path
    run: RunLine
    fleet: FleetLine | None
    plan: PlanLine | None
    prediction: PredictionLine | None
    in_force: PredictionLine | None
    steps: tuple[StepLine, ...]
    seconds: tuple[float | None, ...]
    evaluations: tuple[EvaluationLine, ...]
    epochs: tuple[EpochLine, ...]
    utilization: tuple[UtilizationLine, ...]
    changes: tuple[tuple[int, PlanLine | ReshareLine], ...]
    end: EndLine | None
    is_cut: bool

    @property
    def reshares(self) -> tuple[ReshareLine, ...]:
        return tuple(line for _, line in self.changes if isinstance(line, ReshareLine))


def log_of(run: Path) -> Path:
    """The log of a run, which is given as a folder or as the log itself.

    Raises:
        InputError: there is none; where the folder holds runs, the latest is named.
    """
    if not run.is_dir():
        return run
    if (run / LOG_NAME).exists():
        return run / LOG_NAME
    inner = sorted(path.parent for path in run.glob(f"*/{LOG_NAME}"))
    remedy = f"the latest run in it is {inner[-1]}" if inner else "give the folder of a run, or its log"
    raise InputError(f"there is no {LOG_NAME} in {run}: {remedy}")


def read_log(path: Path) -> Record:
    """Read a log. Its last line may be cut off.

    Raises:
        InputError: the file cannot be read, is empty or no log of a run; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot read the log {path}: {error.strerror}; give the folder of a run, or its log"
        ) from None
    except UnicodeDecodeError:
        raise _foreign(path, "it is no text in UTF-8") from None
    rows = text.splitlines()
    is_cut = bool(rows) and not text.endswith("\n")
    lines = list(_lines(path, rows[:-1] if is_cut else rows))
    if not lines or not isinstance(lines[0], RunLine):
        raise _foreign(path, 'its first line is not that of a run, {"what": "run", ...}' if lines else "it is empty")
    record = _record(path, lines, is_cut)
    if len(_device_counts(record)) > 1:
        raise _foreign(path, "its lines are of different numbers of devices")
    return record


def _lines(path: Path, rows: list[str]) -> Iterator[Line]:
    for number, row in enumerate(rows, 1):
        try:
            raw = json.loads(row)
        except (ValueError, RecursionError):
            raise _foreign(path, f"line {number} is no JSON") from None
        if not isinstance(raw, dict) or "what" not in raw:
            raise _foreign(path, f'line {number} has no "what"')
        if raw["what"] in KINDS:
            try:
                yield LINE.validate_python(raw)
            except ValidationError as error:
                fault = error.errors()[0]
                raise _foreign(path, f"line {number}: {fault['loc'][-1]}: {fault['msg'].lower()}") from None


def _foreign(path: Path, why: str) -> InputError:
    return InputError(f"{path} is no log of a training: {why}; give the folder of a run, or the log that it wrote")


def _record(path: Path, lines: list[Line], is_cut: bool) -> Record:
    latest: dict[type[Line], Any] = {}
    steps: dict[int, tuple[StepLine, float | None]] = {}
    tests: dict[int, EvaluationLine] = {}
    epochs: dict[int, EpochLine] = {}
    utilization: dict[int, UtilizationLine] = {}
    changes: list[tuple[int, PlanLine | ReshareLine]] = []
    prediction: PredictionLine | None = None
    in_force: PredictionLine | None = None
    begun, last_s = 0, None
    for line in lines:
        latest[type(line)] = line
        match line:
            case RunLine():
                begun, last_s = line.from_step, None
                latest.pop(EndLine, None)
                prediction = in_force = None
                steps = {n: row for n, row in steps.items() if n < begun}
                tests = {n: row for n, row in tests.items() if n <= begun}
                changes = [row for row in changes if row[0] < begun]
            case PredictionLine():
                in_force = line
                prediction = prediction if line.shares_only else line
            case StepLine():
                steps[line.step] = line, None if last_s is None else line.s - last_s
                last_s = line.s
            case EvaluationLine():
                tests[line.step], last_s = line, None
            case EpochLine():
                epochs[line.epoch], last_s = line, None
            case UtilizationLine():
                utilization[line.epoch] = line
            case PlanLine():
                changes.append((begun, line))
            case ReshareLine():
                changes.append((line.step + 1, line))
                in_force = None
    done = [steps[number] for number in sorted(steps)]
    return Record(
        path, latest[RunLine], latest.get(FleetLine), latest.get(PlanLine), prediction, in_force,
        tuple(line for line, _ in done), tuple(s for _, s in done), tuple(tests.values()),
        tuple(epochs[n] for n in sorted(epochs)), tuple(utilization[n] for n in sorted(utilization)), tuple(changes),
        latest.get(EndLine), is_cut,
    )  # fmt: skip


def _device_counts(record: Record) -> set[int]:
    """The numbers of devices that its lines are of."""
    per_device: list[tuple[Any, ...]] = []
    for line in record.utilization:
        per_device += [line.wall_s, line.compute_s, line.exchange_s]
    for _, change in record.changes:
        per_device += [layer.parts for layer in change.layers]
        per_device += [change.work] if change.work else []
    if record.fleet is not None:
        per_device.append(record.fleet.devices)
    for predicted in (record.prediction, record.in_force):
        if predicted is not None:
            per_device += [predicted.names, predicted.one_pass.compute_s, predicted.one_pass.exchange_s]
    return {len(each) for each in per_device}
