"""What one device has to do with each step of a list. Worked out once for a list: it does not change from step to step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from convoy.model.graph import Graph
from convoy.plan.fusion import Run, runs
from convoy.plan.steps import Compute, Move, ReturnGradient, ShareStatistics, Step, StepList, SumGradients, Value
from convoy.sharding.layout import box, holders


@dataclass(frozen=True, slots=True)
class Line:
    """A step as one device sees it.

    Attributes:
        takes_part: it computes, sends, receives or keeps something.
        samples: of the value that a computation writes, on this device.
        forgets: keys of the values that nobody reads afterwards.
    """

    step: Step
    takes_part: bool
    samples: int = 0
    forgets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run of layers that this device computes alone.

    Attributes:
        after: ids of the steps that must have finished.
        samples: by step of the run, of the value that it writes.
    """

    run: Run
    after: tuple[int, ...]
    samples: tuple[int, ...] = ()
    forgets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Script:
    """A step list for one device, both phases in order."""

    steps: StepList
    forward: tuple[Line | RunLine, ...]
    backward: tuple[Line | RunLine, ...]


def script(steps: StepList, graph: Graph, device: int, *, in_runs: bool = True) -> Script:
    """The script of a device.

    Args:
        in_runs: False: every layer by itself.
    """
    own = [run for run in runs(steps, graph) if run.device == device] if in_runs else []
    forward = _lines(steps.phase("forward"), {run.steps[0].id: run for run in own}, _ids(r.steps for r in own), device)
    backward = _lines(
        steps.phase("backward"), {run.back[0].id: run for run in own if run.back}, _ids(r.back for r in own), device
    )
    return Script(steps, _forgetful(forward, steps), tuple(backward))


def _ids(rows: Iterable[tuple[Compute, ...]]) -> set[int]:
    return {step.id for row in rows for step in row}


def _lines(steps: tuple[Step, ...], first: Mapping[int, Run], inside: set[int], device: int) -> list[Line | RunLine]:
    lines: list[Line | RunLine] = []
    for step in steps:
        if step.id in first:
            run = first[step.id]
            row = run.steps if step.phase == "forward" else run.back
            after = sorted({a for each in row for a in each.after} - {each.id for each in row})
            lines.append(RunLine(run, tuple(after), tuple(_samples(each.writes, device) for each in row)))
        elif step.id not in inside:
            samples = _samples(step.writes, device) if isinstance(step, Compute) else 0
            lines.append(Line(step, _takes_part(step, device), samples))
    return lines


def _takes_part(step: Step, device: int) -> bool:
    match step:
        case Compute():
            return device in holders(step.writes.layout)
        case Move():
            return any(device in (t.sender, t.receiver) for r in step.schedule.rounds for t in r)
        case ShareStatistics():
            return device in step.members
        case ReturnGradient() | SumGradients():
            return False  # what it waits for has landed with the phase before, or is no move


def _samples(value: Value, device: int) -> int:
    """How many samples of a value with a batch axis lie on a device."""
    here = box(value.layout, device, value.shape)
    return here[0][1] - here[0][0] if here else 0


def _forgetful(lines: list[Line | RunLine], steps: StepList) -> tuple[Line | RunLine, ...]:
    """The lines, each with what it is the last to read. The caller reads the outputs after all."""
    last: dict[str, int] = {}
    for number, line in enumerate(lines):
        for key in _reads(line):
            last[key] = number
    for value in steps.outputs:
        last.pop(value.key, None)
    forgets: dict[int, list[str]] = {}
    for key, number in last.items():
        forgets.setdefault(number, []).append(key)
    return tuple(_with(line, tuple(forgets.get(number, ()))) for number, line in enumerate(lines))


def _with(line: Line | RunLine, forgets: tuple[str, ...]) -> Line | RunLine:
    if isinstance(line, RunLine):
        return RunLine(line.run, line.after, line.samples, forgets)
    return Line(line.step, line.takes_part, line.samples, forgets)


def _reads(line: Line | RunLine) -> Iterable[str]:
    if isinstance(line, RunLine):
        return line.run.reads
    match line.step:
        case Compute(reads=reads):
            return [value.key for value in reads]
        case Move(reads=value):
            return [value.key]
    return []
