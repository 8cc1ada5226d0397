"""The log of a run, read back: a value, whatever happened to the run."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from convoy.errors import InputError
from convoy.runlog.schema import (
    KNOWN,
    LINE,
    BusyLine,
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
)

LOG_NAME = "log.jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """What a log tells of a run. A run that went on is one: what it did twice counts as it was done last.

    Attributes:
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
    steps: tuple[StepLine, ...]
    seconds: tuple[float | None, ...]
    evaluations: tuple[EvaluationLine, ...]
    epochs: tuple[EpochLine, ...]
    busy: tuple[BusyLine, ...]
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
    if not _fits(record):
        raise _foreign(path, "its lines are of different numbers of devices")
    return record


def _lines(path: Path, rows: list[str]) -> Iterator[Line]:
    for number, row in enumerate(rows, 1):
        try:
            raw = json.loads(row)
            if isinstance(raw, dict) and raw.get("what") in KNOWN:
                yield LINE.validate_python(raw)
            elif not isinstance(raw, dict) or "what" not in raw:
                raise _foreign(path, f'line {number} has no "what"')
        except ValidationError as error:
            fault = error.errors()[0]
            raise _foreign(path, f"line {number}: {fault['loc'][-1]}: {fault['msg'].lower()}") from None
        except (ValueError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise _foreign(path, f"line {number} is no JSON") from None


def _foreign(path: Path, why: str) -> InputError:
    return InputError(f"{path} is no log of a training: {why}; give the folder of a run, or the log that it wrote")


def _record(path: Path, lines: list[Line], is_cut: bool) -> Record:
    latest: dict[type[Line], Any] = {}
    steps: dict[int, tuple[StepLine, float | None]] = {}
    tests: dict[int, EvaluationLine] = {}
    epochs: dict[int, EpochLine] = {}
    busy: dict[int, BusyLine] = {}
    changes: list[tuple[int, PlanLine | ReshareLine]] = []
    begun, last_s = 0, None
    for line in lines:
        latest[type(line)] = line
        match line:
            case RunLine():
                begun, last_s = line.from_step, None
                latest.pop(EndLine, None)
                latest.pop(PredictionLine, None)
                steps = {n: row for n, row in steps.items() if n < begun}
                tests = {n: row for n, row in tests.items() if n <= begun}
                changes = [row for row in changes if row[0] < begun]
            case StepLine():
                steps[line.step] = line, None if last_s is None else line.s - last_s
                last_s = line.s
            case EvaluationLine():
                tests[line.step], last_s = line, None
            case EpochLine():
                epochs[line.epoch], last_s = line, None
            case BusyLine():
                busy[line.epoch] = line
            case PlanLine():
                changes.append((begun, line))
            case ReshareLine():
                changes.append((line.step + 1, line))
    done = [steps[number] for number in sorted(steps)]
    return Record(
        path, latest[RunLine], latest.get(FleetLine), latest.get(PlanLine), latest.get(PredictionLine),
        tuple(line for line, _ in done), tuple(s for _, s in done), tuple(tests.values()),
        tuple(epochs[n] for n in sorted(epochs)), tuple(busy[n] for n in sorted(busy)), tuple(changes),
        latest.get(EndLine), is_cut,
    )  # fmt: skip


def _fits(record: Record) -> bool:
    """Whether all lines are of as many devices."""
    counts = {len(line.wall_s) for line in record.busy} | {len(line.compute_s) for line in record.busy}
    counts |= {len(line.exchange_s) for line in record.busy}
    for _, line in record.changes:
        counts |= {len(layer.parts) for layer in line.layers} | ({len(line.work)} if line.work else set())
    if record.fleet is not None:
        counts.add(len(record.fleet.devices))
    if record.prediction is not None:
        whole = record.prediction.one_pass
        counts |= {len(record.prediction.names), len(whole.compute_s), len(whole.exchange_s)}
    return len(counts) <= 1
