"""Device programs of a single exchange: what a device copies around its messages, and all-reduces run on a group."""

from collections import defaultdict

from torch import Tensor

from convoy.comm.group import Group
from convoy.layout.collectives import Schedule
from convoy.layout.comm_dtype import CommDtype
from convoy.model.graph import Graph, Layer
from convoy.plan.compile import compile_device
from convoy.plan.device_program import Add, Copy, DeviceProgram, ExchangeRound, Make, Operation, Pack, Unpack, WaitRound
from convoy.plan.exchange_program import sum_operations
from convoy.plan.steps import Exchange, StepList
from convoy.runtime.exchange import Lane, Slots
from convoy.simulate.costs import NOTHING, Handling, handling_of

_GRAPH = Graph("One", {"work": Layer("work", "elementwise", (), (1,))}, ("work",))


def program_of(step: Exchange, device: int, devices: int = 4) -> DeviceProgram:
    """Return the program of a step list with one exchange."""
    return compile_device(StepList(1, devices, (), (), (step,)), _GRAPH, device)


def run_rounds(
    group: Group,
    schedule: Schedule,
    flat: Tensor,
    lane: int = 0,
    wire: CommDtype = "exact",
    landing: Slots | None = None,
) -> None:
    """All-reduce a flat buffer in place by the rounds of a schedule."""
    operations = sum_operations(0, schedule, group.device, "sum 0", wire, lane)
    Lane(group, lane, landing or Slots()).run(operations, {"sum 0": flat}, flat.dtype)


def messages(step: Exchange, device: int) -> list[int]:
    """Count the messages a device sends and receives in each round."""
    counts: dict[int, int] = defaultdict(int)
    for operation in program_of(step, device).operations():
        if isinstance(operation, ExchangeRound):
            counts[operation.number] += len(operation.sends) + len(operation.receives)
    return [counts[n] for n in range(len(step.schedule.rounds))]


def handled(step: Exchange, device: int) -> list[tuple[Handling, Handling]]:
    """Return what a device copies, adds and allocates before and after the messages of each round.

    What the result is made of, and where messages land, counts as after them, wherever it stands in the program.
    """
    program = program_of(step, device)
    operations = [*program.forward, *program.backward, *program.sums]
    arrives = any(isinstance(op, ExchangeRound) and op.receives for op in operations)
    around = [[NOTHING, NOTHING] for _ in step.schedule.rounds]
    number, landed = 0, False
    for place, operation in enumerate(operations):
        if isinstance(operation, WaitRound):
            number, landed = operation.number, True
        elif isinstance(operation, ExchangeRound):
            number, landed = operation.number, False
        found = handling_of(operation)
        if found is None or found == NOTHING or isinstance(operation, Unpack):
            continue
        after = _is_after(operation, arrives)
        at = number if after and landed else _next_round(operations[place:], number)
        around[at][after] = around[at][after] + found
    return [(before, after) for before, after in around]


def _next_round(operations: list[Operation], number: int) -> int:
    return next((op.number for op in operations if isinstance(op, ExchangeRound)), number)


def _is_after(operation: Operation, arrives: bool) -> bool:
    match operation:
        case Pack():
            return False
        case Make(buffer=buffer, result=result):
            return (result and arrives) or "<" in buffer or buffer.startswith("slot")
        case Copy(source=source, target=target) | Add(source=source, target=target):
            into_result = not target.buffer.startswith(("message", "sum")) and arrives
            return into_result or "<" in source.buffer or source.buffer.startswith("slot")
    return False
