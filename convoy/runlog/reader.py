"""Reads the log of a run, also of a killed one, and computes the values that reports show."""

import bisect
import codecs
import os
import statistics
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from convoy.errors import InputError, shown
from convoy.files import open_regular, parse_json
from convoy.measure.energy_meter import ABSENT
from convoy.runlog import schema

LOG_NAME = "log.jsonl"

MIN_STEP_S = 1e-9
"""A shorter step means that the clock was set or the log was edited."""

MIN_STEPS = 5
"""Steps that the current shares need before their median is reported."""

_REMEDY = "give the folder of a run, or the log that it wrote"


@dataclass(frozen=True, slots=True)
class InForce:
    """The plan or shares from `step` on, and their prediction."""

    step: int
    line: schema.PlanLine | schema.ReshardLine
    prediction: schema.PredictionLine | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as recorded in its log, including its resumes. If a step was repeated, its last line counts.

    Attributes:
        prediction: of the last plan that the planner chose.
        seconds: of each of `steps`; None for the first step, and for the first after an evaluation.
        times_s: end of each of `steps` since the run began, without the time before a resume.
        plans: in force from the first step and from each change on.
        end: None while the run continues, or if it was killed.
        is_cut: the last line is incomplete.
        ids: of the devices that train at the end; empty if no device left or joined.
    """

    path: Path
    run: schema.RunLine
    fleet: schema.FleetLine | None
    plan: schema.PlanLine | None
    prediction: schema.PredictionLine | None
    steps: tuple[schema.StepLine, ...]
    seconds: tuple[float | None, ...]
    times_s: tuple[float, ...]
    evaluations: tuple[schema.EvaluationLine, ...]
    epochs: tuple[schema.EpochLine, ...]
    utilization: tuple[schema.UtilizationLine, ...]
    system: tuple[schema.SystemLine, ...]
    plans: tuple[InForce, ...]
    end: schema.EndLine | None
    is_cut: bool
    ids: tuple[int, ...] = ()

    def id_of(self, place: int) -> int:
        """Return the id of a device by its place among those that train at the end."""
        return self.ids[place] if place < len(self.ids) else place

    @property
    def reshards(self) -> tuple[schema.ReshardLine, ...]:
        return tuple(each.line for each in self.plans if isinstance(each.line, schema.ReshardLine))

    @property
    def steps_done(self) -> int:
        return self.steps[-1].step + 1 if self.steps else self.run.from_step

    @property
    def step_s(self) -> float | None:
        """Median seconds of a full step, with the current shares if enough steps had them."""
        batch = max((row.samples for row in self.steps), default=0)
        start = self.plans[-1].step if self.plans else 0
        rows = zip(self.steps, self.seconds, strict=True)
        timed = [(row.step, s) for row, s in rows if s is not None and row.samples == batch]
        late = [s for step, s in timed if step >= start]
        chosen = late if len(late) >= MIN_STEPS else [s for _, s in timed]
        return statistics.median(chosen) if chosen else None

    @property
    def samples_per_s(self) -> float | None:
        step_s = self.step_s
        return max(row.samples for row in self.steps) / step_s if step_s else None

    @property
    def limit_samples_per_s(self) -> float | None:
        """Sum of the devices' solo throughputs; None if they were not measured."""
        speeds = [None] if self.fleet is None else [row.samples_per_s for row in self.fleet.devices]
        return None if None in speeds else sum(speed for speed in speeds if speed is not None)

    @property
    def efficiency(self) -> float | None:
        rate, limit = self.samples_per_s, self.limit_samples_per_s
        return rate / limit if rate and limit else None

    @property
    def prediction_error(self) -> float | None:
        """Predicted step divided by the measured one, minus 1."""
        step_s = self.step_s
        return self.prediction.step_s / step_s - 1 if self.prediction and step_s else None

    @property
    def joules_per_image(self) -> float | None:
        """Measured joules of all devices per image, evaluation included; None if a device was not measured."""
        lines = [line for line in self.system if line.joules_by and line.samples]
        if not lines or any(by.startswith(ABSENT) for line in lines for by in line.joules_by):
            return None
        return sum(j for line in lines for j in line.joules if j is not None) / sum(line.samples for line in lines)

    @property
    def tests(self) -> list[tuple[int, float]]:
        """Step and accuracy of every evaluation with a finite accuracy."""
        return [(row.step, row.accuracy) for row in self.evaluations if row.accuracy is not None]

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and training loss of every step with a finite loss."""
        return [(row.step, row.loss) for row in self.steps if row.loss is not None]

    @property
    def best_test(self) -> tuple[int, float] | None:
        """The first evaluation with the highest accuracy."""
        return max(self.tests, key=lambda test: test[1], default=None)

    def time_of(self, steps: int) -> float | None:
        """Return the seconds from the start of the run until `steps` steps were done; None if not in the log."""
        place = bisect.bisect_left(self.steps, steps - 1, key=lambda row: row.step)
        return self.times_s[place] if place < len(self.steps) else None

    def time_shares(self, device: int, epoch: int | None = None) -> tuple[float, float, float] | None:
        """Return the shares of a device's time spent computing, exchanging or waiting, and on all else.

        Args:
            epoch: index into `utilization`; None: all epochs together.
        """
        rows = self.utilization if epoch is None else self.utilization[epoch : epoch + 1]
        wall_s = sum(row.wall_s[device] for row in rows)
        if wall_s <= 0:
            return None
        compute = min(1.0, sum(row.compute_s[device] for row in rows) / wall_s)
        exchange = min(1.0 - compute, sum(row.exchange_s[device] for row in rows) / wall_s)
        return compute, exchange, 1.0 - compute - exchange

    def rates(self) -> list[tuple[int, float]]:
        """Return step and samples/s of every timed step, averaged over about a twentieth of the run."""
        timed = [(row.step, row.samples, s) for row, s in zip(self.steps, self.seconds, strict=True) if s]
        reach = min(100, len(timed) // 40)
        samples = [0, *accumulate(count for _, count, _ in timed)]
        times_s = [0.0, *accumulate(s for _, _, s in timed)]
        spans = [(max(0, place - reach), min(len(timed), place + reach + 1)) for place in range(len(timed))]
        return [
            (step, (samples[stop] - samples[start]) / max(MIN_STEP_S, times_s[stop] - times_s[start]))
            for (step, _, _), (start, stop) in zip(timed, spans, strict=True)
        ]


def log_of(run: Path) -> Path:
    """Return the log of a run, given its folder or the log itself.

    Raises:
        InputError: there is none; if the folder holds runs, the message names the latest.
    """
    if not os.path.isdir(run):
        return run
    if os.path.exists(run / LOG_NAME):
        return run / LOG_NAME
    inner = sorted(path.parent for path in run.glob(f"*/{LOG_NAME}"))
    remedy = f"the latest run in it is {inner[-1]}" if inner else "give the folder of a run, or its log"
    raise InputError(f"there is no {LOG_NAME} in {run}: {remedy}")


def newest_run(runs: Path) -> Path:
    """Return the run in this folder with the latest change of its log.

    Raises:
        InputError: there is none.
    """
    logs = [path for path in runs.glob(f"*/{LOG_NAME}") if path.is_file()]
    if not logs:
        raise InputError(f"there is no run in {runs} yet: give the folder of a run, or its log")
    return max(logs, key=lambda path: path.stat().st_mtime_ns).parent


def read_log(path: Path) -> RunRecord:
    """Read a log. Its last line may be incomplete.

    Raises:
        InputError: the file cannot be read, is empty or is not the log of a run; the message names the line.
    """
    try:
        with open_regular(path) as file:
            content = file.read()
        # Incremental: a killed run may have written half a character.
        *rows, rest = codecs.getincrementaldecoder("utf-8")().decode(content).split("\n")
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text ({error.reason} at byte {error.start})"
        raise InputError(f"cannot read the log {shown(path)}: {why}; {_REMEDY}") from None
    except OSError as error:
        raise InputError(f"cannot read the log {shown(path)}: {error.strerror or error}; {_REMEDY}") from None
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            raw = parse_json(row)
        except ValueError:
            raise _not_a_log(path, f"line {number} is not JSON") from None
        if not isinstance(raw, dict) or "what" not in raw:
            raise _not_a_log(path, f'line {number} has no "what"')
        if isinstance(raw["what"], str) and raw["what"] in schema.KINDS:
            try:
                lines.append(schema.LINE.validate_python(raw))
            except ValidationError as error:
                fault = error.errors()[0]
                raise _not_a_log(path, f"line {number}: {fault['loc'][-1]}: {fault['msg'].lower()}") from None
    if not lines or not isinstance(lines[0], schema.RunLine):
        raise _not_a_log(path, 'its first line is not {"what": "run", ...}' if lines else "it is empty")
    return _record(path, lines, bool(rest))


def _not_a_log(path: Path, why: str) -> InputError:
    return InputError(f"{path} is not the log of a training: {why}; {_REMEDY}")


def _record(path: Path, lines: list[schema.Line], is_cut: bool) -> RunRecord:
    latest: dict[type[schema.Line], Any] = {}
    steps: dict[int, tuple[schema.StepLine, float | None, float]] = {}
    tests: dict[int, schema.EvaluationLine] = {}
    epochs: dict[int, schema.EpochLine] = {}
    utilization: dict[int, schema.UtilizationLine] = {}
    system: dict[int, schema.SystemLine] = {}
    plans: list[InForce] = []
    prediction: schema.PredictionLine | None = None
    start, start_s = 0, 0.0
    last_s: float | None = None
    for line in lines:
        latest[type(line)] = line
        match line:
            case schema.RunLine():
                start, last_s, prediction = line.from_step, None, None
                latest.pop(schema.EndLine, None)
                latest.pop(schema.MembersLine, None)
                steps = {n: row for n, row in steps.items() if n < start}
                tests = {n: row for n, row in tests.items() if n <= start}
                system = {n: row for n, row in system.items() if n <= start}
                plans = [each for each in plans if each.step < start]
                start_s = max((time_s for _, _, time_s in steps.values()), default=0.0)
            case schema.MembersLine():
                start, last_s, prediction = line.step, None, None
                latest.pop(schema.FleetLine, None)
                utilization, plans = {}, []
                # Only lines with ids show which devices their values belong to; old logs have none.
                system = {n: row for n, row in system.items() if n <= start and row.ids}
            case schema.PredictionLine():
                prediction = prediction if line.shares_only else line
                if plans:
                    plans[-1] = replace(plans[-1], prediction=line)
            case schema.StepLine():
                step_s = None if last_s is None or line.s - last_s <= MIN_STEP_S else line.s - last_s
                steps[line.step] = line, step_s, start_s + line.s
                last_s = line.s
            case schema.EvaluationLine():
                tests[line.step], last_s = line, None
            case schema.EpochLine():
                epochs[line.epoch], last_s = line, None
            case schema.UtilizationLine():
                utilization[line.epoch] = line
            case schema.SystemLine():
                system[line.step] = line
            case schema.PlanLine():
                plans.append(InForce(start, line))
            case schema.ReshardLine():
                plans.append(InForce(line.step + 1, line))
    done = [steps[number] for number in sorted(steps)]
    return RunRecord(
        path, latest[schema.RunLine], latest.get(schema.FleetLine), latest.get(schema.PlanLine), prediction,
        tuple(line for line, _, _ in done), tuple(s for _, s, _ in done), tuple(time_s for _, _, time_s in done),
        tuple(tests.values()), tuple(epochs[n] for n in sorted(epochs)),
        tuple(utilization[n] for n in sorted(utilization)), tuple(system[n] for n in sorted(system)), tuple(plans),
        latest.get(schema.EndLine), is_cut, latest[schema.MembersLine].devices if schema.MembersLine in latest else (),
    )  # fmt: skip
