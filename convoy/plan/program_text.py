"""Device programs as text, a line for each operation, and read back from it."""

import ast
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

from convoy.errors import PlanError
from convoy.plan.device_program import (
    NO_SIZE,
    DeviceProgram,
    Fused,
    Operation,
    Part,
)
from convoy.plan.size import LocalSize

_KINDS: dict[str, type] = {kind.__name__.lower(): kind for kind in get_args(Operation)}
_PHASES = ("forward", "backward", "sums")
_HEAD = ("device", "devices", "batch", "inputs", "outputs", "output_gradients", "input_gradients", "pass_")


def program_lines(program: DeviceProgram) -> list[str]:
    """A program as text. `parse_program` reads it back."""
    head = ", ".join(f"{name}={getattr(program, name)!r}" for name in _HEAD)
    lines = [f"program({head})"]
    for phase in _PHASES:
        lines.append(f"{phase}:")
        for operation in getattr(program, phase):
            lines.append(f"  {operation_line(operation)}")
            if isinstance(operation, Fused):
                lines += [f"    {operation_line(each)}" for each in operation.operations]
    return lines


def operation_line(operation: Operation) -> str:
    values = []
    for each in fields(operation):
        value = getattr(operation, each.name)
        if each.name != "operations" and value != each.default:
            values.append(f"{each.name}={_text(value)}")
    return f"{type(operation).__name__.lower()}({', '.join(values)})"


def _text(value: Any) -> str:
    match value:
        case Part(buffer, box):
            return repr(buffer if box is None else (buffer, ",".join(f"{start}:{stop}" for start, stop in box)))
        case LocalSize():
            shared = (True,) if value.shares_statistics else ()
            return repr((value.samples, value.outputs, value.inputs, *shared))
    return repr(value)


def parse_program(lines: Sequence[str] | str) -> DeviceProgram:
    """The program that `program_lines` printed.

    Raises:
        PlanError: a line that is no operation; it is named.
    """
    rows = [row for row in (lines.splitlines() if isinstance(lines, str) else lines) if row.strip()]
    if not rows:
        raise PlanError("an empty text is no device program: give what program_lines() printed")
    _, head = _call(rows[0], 1)
    phases: dict[str, list[Any]] = {phase: [] for phase in _PHASES}
    current: list[Any] | None = None
    for number, row in enumerate(rows[1:], start=2):
        if row.strip().rstrip(":") in _PHASES:
            current = phases[row.strip().rstrip(":")]
        elif current is None:
            raise PlanError(f"line {number} of a device program stands in no phase: write 'forward:' before it")
        elif row.startswith("    "):
            if not current or not isinstance(current[-1], Fused):
                raise PlanError(f"line {number} of a device program is indented, but follows no fused(...)")
            stretch = current[-1]
            inner: tuple[Any, ...] = (*stretch.operations, _operation(row, number))
            current[-1] = Fused(stretch.step, stretch.phase, stretch.number, stretch.reads, stretch.writes, inner)
        else:
            current.append(_operation(row, number))
    try:
        lanes: dict[str, Any] = {phase: tuple(row) for phase, row in phases.items()}
        return DeviceProgram(**head, **lanes)
    except TypeError as error:
        raise PlanError(f"line 1 of a device program: {error}") from None


def _operation(row: str, number: int) -> Operation:
    name, values = _call(row, number)
    kind = _KINDS.get(name)
    if kind is None:
        raise PlanError(
            f"line {number} of a device program: {name!r} is no operation: use one of {', '.join(sorted(_KINDS))}"
        )
    kinds = {each.name: each.type for each in fields(kind)}
    for key, value in values.items():
        if kinds.get(key) is Part:
            values[key] = _part(value)
        elif kinds.get(key) is LocalSize:
            values[key] = LocalSize(*value) if value else NO_SIZE
    if kind is Fused:
        values["operations"] = ()
    try:
        made: Operation = kind(**values)
    except TypeError as error:
        raise PlanError(f"line {number} of a device program: {error}") from None
    return made


def _call(row: str, number: int) -> tuple[str, dict[str, Any]]:
    """The name and the arguments of a call that holds plain values; nothing is run."""
    try:
        call = ast.parse(row.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("it is no operation(name=value, ...)")
        return call.func.id, {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise PlanError(f"line {number} of a device program cannot be read ({error}): {row.strip()[:80]}") from None


def _part(value: str | tuple[str, str]) -> Part:
    """A buffer's name, or its name and a box as `0:5,2:3`."""
    if isinstance(value, str):
        return Part(value)
    spans = [span.split(":") for span in value[1].split(",") if span]
    return Part(value[0], tuple((int(start), int(stop)) for start, stop in spans))
