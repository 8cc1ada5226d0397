"""Reads the log of a run, also of a killed one, and computes the values that reports show."""

import codecs
import os
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from convoy.errors import InputError, shown
from convoy.files import open_regular, parse_json
from convoy.measure.energy_meter import ABSENT
from convoy.runlog import schema

LOG_NAME = "log.jsonl"

MIN_STEP_S = 1e-9  # shorter steps are ignored: the clock was set back, or the log was edited
MIN_STEPS = 5  # with the current shares, for a median of only these

_REMEDY = "give the folder of a run, or the log that it wrote"


@dataclass(frozen=True, slots=True)
class ActivePlan:
    """The plan or shares used from `step` on, and their prediction."""

    step: int
    line: schema.PlanLine | schema.ReshardLine
    prediction: schema.PredictionLine | None = None


@dataclass(slots=True)
class RunRecord:
    """A run as recorded in its log, including its resumes. If a step was repeated, its last line counts.

    Attributes:
        prediction: of the last plan that the planner chose.
        seconds: duration of each step; None for the first step, and for the first after an evaluation.
        plans: the first plan, and one for each change.
        end: None while the run continues, or if it was killed.
        is_cut: the last line is incomplete.
        ids: of the devices that train at the end; empty if no device left or joined.
    """

    path: Path
    run: schema.RunLine
    is_cut: bool
    fleet: schema.FleetLine | None = None
    plan: schema.PlanLine | None = None
    prediction: schema.PredictionLine | None = None
    steps: list[schema.StepLine] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)
    evaluations: list[schema.EvaluationLine] = field(default_factory=list)
    epochs: list[schema.EpochLine] = field(default_factory=list)
    utilization: list[schema.UtilizationLine] = field(default_factory=list)
    system: list[schema.SystemLine] = field(default_factory=list)
    plans: list[ActivePlan] = field(default_factory=list)
    end: schema.EndLine | None = None
    ids: tuple[int, ...] = ()

    def id_of(self, place: int) -> int:
        """Return the id of a device, given its position in the last fleet of the log."""
        return self.ids[place] if place < len(self.ids) else place

    @property
    def reshards(self) -> list[schema.ReshardLine]:
        return [each.line for each in self.plans if isinstance(each.line, schema.ReshardLine)]

    @property
    def span(self) -> tuple[int, int]:
        """The first step in the log, and the last step + 1."""
        return (self.steps[0].step, self.steps[-1].step + 1) if self.steps else (0, 1)

    @property
    def steps_done(self) -> int:
        return self.steps[-1].step + 1 if self.steps else self.run.from_step

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step with a full batch, only of steps with the current shares if there are enough."""
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
    def joules_per_image(self) -> float | None:
        """Measured joules of all devices per training image, including evaluation; None if a device was not measured."""
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

    def time_shares(self, device: int) -> tuple[float, float, float] | None:
        """Return the fractions of a device's time for computing, for exchanging or waiting, and for everything else."""
        wall_s = sum(row.wall_s[device] for row in self.utilization)
        if wall_s <= 0:
            return None
        compute = min(1.0, sum(row.compute_s[device] for row in self.utilization) / wall_s)
        exchange = min(1.0 - compute, sum(row.exchange_s[device] for row in self.utilization) / wall_s)
        return compute, exchange, 1.0 - compute - exchange

    @property
    def rates(self) -> list[tuple[int, float]]:
        """Step and samples/s of every timed step."""
        return [(row.step, row.samples / s) for row, s in zip(self.steps, self.seconds, strict=True) if s]


def log_of(run: Path) -> Path:
    """Return the log of a run, given its folder or the log itself. Raises InputError if the folder has none."""
    if not os.path.isdir(run):
        return run
    if not os.path.exists(run / LOG_NAME):
        raise InputError(f"there is no {LOG_NAME} in {run}: give the folder of a run, or its log")
    return run / LOG_NAME


def newest_run(runs: Path) -> Path:
    """Return the run in this folder whose log changed last. Raises InputError if there is none."""
    logs = [path for path in runs.glob(f"*/{LOG_NAME}") if path.is_file()]
    if not logs:
        raise InputError(f"there is no run in {runs} yet: give the folder of a run, or its log")
    return max(logs, key=lambda path: path.stat().st_mtime_ns).parent


def read_log(path: Path) -> RunRecord:
    """Read a log. Its last line may be incomplete. InputError: it is not the log of a run; the message names the line."""
    try:
        with open_regular(path) as file:
            content = file.read()
        # An incremental decoder ignores the incomplete last character of a killed run.
        *rows, rest = codecs.getincrementaldecoder("utf-8")().decode(content).split("\n")
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text ({error.reason} at byte {error.start})"
        raise InputError(f"cannot read the log {shown(path)}: {why}; {_REMEDY}") from None
    except OSError as error:
        raise InputError(f"cannot read the log {shown(path)}: {error.strerror or error}; {_REMEDY}") from None
    try:
        lines = [line for number, row in enumerate(rows, 1) if (line := _parse(number, row)) is not None]
        if not lines or not isinstance(lines[0], schema.RunLine):
            raise ValueError('its first line is not {"what": "run", ...}' if lines else "it is empty")
    except ValueError as error:
        raise InputError(f"{path} is not the log of a training: {error}; {_REMEDY}") from None
    return _record(RunRecord(path, lines[0], bool(rest)), lines)


def _parse(number: int, text: str) -> schema.Line | None:
    """Parse a line of a log; None if this version does not know its kind. Raises ValueError."""
    try:
        raw = parse_json(text)
    except ValueError:
        raise ValueError(f"line {number} is not JSON") from None
    if not isinstance(raw, dict) or "what" not in raw:
        raise ValueError(f'line {number} has no "what"')
    if not isinstance(raw["what"], str) or raw["what"] not in schema.KINDS:
        return None
    try:
        return schema.LINE.validate_python(raw)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"line {number}: {fault['loc'][-1]}: {fault['msg'].lower()}") from None


def _record(record: RunRecord, lines: list[schema.Line]) -> RunRecord:
    """Add the lines to an empty record. After a resume or regroup, repeated steps replace the earlier ones."""
    steps: dict[int, tuple[schema.StepLine, float | None]] = {}
    tests: dict[int, schema.EvaluationLine] = {}
    epochs: dict[int, schema.EpochLine] = {}
    utilization: dict[int, schema.UtilizationLine] = {}
    system: dict[int, schema.SystemLine] = {}
    start = 0
    last_s: float | None = None
    for line in lines:
        match line:
            case schema.RunLine():
                record.run, record.end, record.ids, record.prediction = line, None, (), None
                start, last_s = line.from_step, None
                steps = {n: row for n, row in steps.items() if n < start}
                tests = {n: row for n, row in tests.items() if n <= start}
                system = {n: row for n, row in system.items() if n <= start}
                record.plans = [each for each in record.plans if each.step < start]
            case schema.MembersLine():
                record.ids, record.fleet, record.prediction, record.plans = line.devices, None, None, []
                start, last_s, utilization = line.step, None, {}
                # Only lines with ids show which devices their values belong to; old logs have none.
                system = {n: row for n, row in system.items() if n <= start and row.ids}
            case schema.FleetLine():
                record.fleet = line
            case schema.PlanLine():
                record.plan = line
                record.plans.append(ActivePlan(start, line))
            case schema.ReshardLine():
                record.plans.append(ActivePlan(line.step + 1, line))
            case schema.PredictionLine():
                record.prediction = record.prediction if line.shares_only else line
                if record.plans:
                    record.plans[-1] = replace(record.plans[-1], prediction=line)
            case schema.StepLine():
                step_s = None if last_s is None or line.s - last_s <= MIN_STEP_S else line.s - last_s
                steps[line.step] = line, step_s
                last_s = line.s
            case schema.EvaluationLine():
                tests[line.step], last_s = line, None
            case schema.EpochLine():
                epochs[line.epoch], last_s = line, None
            case schema.UtilizationLine():
                utilization[line.epoch] = line
            case schema.SystemLine():
                system[line.step] = line
            case schema.EndLine():
                record.end = line
    record.steps = [steps[n][0] for n in sorted(steps)]
    record.seconds = [steps[n][1] for n in sorted(steps)]
    record.evaluations = list(tests.values())
    record.epochs = [epochs[n] for n in sorted(epochs)]
    record.utilization = [utilization[n] for n in sorted(utilization)]
    record.system = [system[n] for n in sorted(system)]
    return record
