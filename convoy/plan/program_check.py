"""Checks the programs of all devices together, before the first step, and refuses programs that cannot run.

The check runs through the programs as the devices would, without tensors. A round is complete when both ends of each of its
messages have started.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from convoy.errors import PlanError
from convoy.plan.device_program import (
    Add,
    BeginSum,
    Compute,
    Copy,
    DeviceProgram,
    EndSum,
    ExchangeRound,
    FinishSums,
    Fused,
    Make,
    Operation,
    Part,
    PlannedMessage,
    TakeSum,
    WaitRound,
    WaitSum,
    message_text,
    operation_line,
    output_gradient,
    reads_of,
    writes_of,
)

MAIN, SUMS = 0, 1

_Round = tuple[int, int]
"""A round: its step and its number."""


def check_programs(programs: Sequence[DeviceProgram]) -> None:
    """Refuse programs that cannot run together.

    Raises:
        PlanError: a message that nobody sends or receives, or in another order or size than the other end expects; a circle of
            waits; a buffer that is read before it is written, or written while it travels. The device and the operation are
            named.
    """
    _check_messages(programs)
    _Walk(programs).run()


def _check_messages(programs: Sequence[DeviceProgram]) -> None:
    """Check that the two ends of a pair start the messages between them in one order, lane by lane."""
    sent: dict[tuple[int, int, int], list[tuple[ExchangeRound, PlannedMessage]]] = {}
    received: dict[tuple[int, int, int], list[tuple[ExchangeRound, PlannedMessage]]] = {}
    for program in programs:
        for lane, operations in _lanes(program):
            for op in operations:
                if isinstance(op, ExchangeRound):
                    for message in op.sends:
                        sent.setdefault((program.device, message.peer, lane), []).append((op, message))
                    for message in op.receives:
                        received.setdefault((message.peer, program.device, lane), []).append((op, message))
    for pair in sorted({*sent, *received}):
        sender, receiver, lane = pair
        for out, into in zip_longest(sent.get(pair, ()), received.get(pair, ())):
            leaves = "" if out is None else f"{message_text('to', out[1])} ({_round_of(out[0])})"
            arrives = "" if into is None else f"{message_text('from', into[1])} ({_round_of(into[0])})"
            if out is None or into is None:
                at, verb = (receiver, "sends") if out is None else (sender, "receives")
                raise PlanError(
                    f"device program {at}: nobody {verb} the other end of {leaves or arrives} (devices {sender} to "
                    f"{receiver}, lane {lane})"
                )
            ends = [(op.step, op.number, message.size, message.narrow) for op, message in (out, into)]
            if ends[0] != ends[1]:
                raise PlanError(
                    f"device program {sender}: {leaves} meets {arrives} of device {receiver}: the two ends of a message must "
                    "be of one round, one size and one width, and come in one order"
                )


def _round_of(operation: ExchangeRound) -> str:
    return f"round {operation.number} of step {operation.step}"


def _lanes(program: DeviceProgram) -> Iterator[tuple[int, list[Operation]]]:
    yield MAIN, [*program.forward, *program.backward]
    yield SUMS, list(program.sums)


@dataclass
class _Device:
    """The state of one device in the check.

    Attributes:
        empty: buffers that were made, but hold nothing yet.
        filled: buffers that hold numbers.
        travelling: by round, the parts that are being sent and received (True).
        begun, ended: gradient sums, by step.
    """

    program: DeviceProgram
    lanes: list[list[Operation]]
    at: list[int] = field(default_factory=lambda: [0, 0])
    empty: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    travelling: dict[_Round, list[tuple[Part, bool]]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


class _Walk:
    def __init__(self, programs: Sequence[DeviceProgram]) -> None:
        self.devices = {p.device: _Device(p, [row for _, row in _lanes(p)]) for p in programs}
        self.begun: set[tuple[_Round, int, int]] = set()  # round, device, peer: that end has started
        self.rounds: dict[tuple[int, _Round], set[int]] = {}  # a device's round -> its peers
        for device in self.devices.values():
            device.filled |= {*device.program.inputs, *map(output_gradient, device.program.output_gradients)}

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for device in self.devices.values():
                moved |= self._go(device, MAIN) | self._go(device, SUMS)
        waiting = [
            f"device {number}: {operation_line(device.lanes[lane][device.at[lane]])}"
            for number, device in self.devices.items()
            for lane in (MAIN, SUMS)
            if device.at[lane] < len(device.lanes[lane])
        ]
        if waiting:
            raise PlanError(f"device programs wait for each other for ever: {'; '.join(waiting[:4])}")
        for number, device in self.devices.items():
            if left := [each for each, parts in device.travelling.items() if any(arrives for _, arrives in parts)]:
                raise PlanError(f"device program {number}: nobody waits for round {left[0][1]} of step {left[0][0]}")

    def _go(self, device: _Device, lane: int) -> bool:
        """Walk a lane as far as it goes; whether it moved."""
        start = device.at[lane]
        operations = device.lanes[lane]
        while device.at[lane] < len(operations):
            operation = operations[device.at[lane]]
            if not self._can_go_on(device, operation):
                break
            self._do(device, operation)
            device.at[lane] += 1
        return device.at[lane] > start

    def _can_go_on(self, device: _Device, operation: Operation) -> bool:
        match operation:
            case TakeSum(step=step):
                return step in device.begun
            case WaitSum(sum=step):
                return step in device.ended
            case FinishSums(sums=sums):
                return device.ended.issuperset(sums)
            case WaitRound(begun=step, number=number):
                me = device.program.device
                peers = self.rounds.get((me, (step, number)))
                if peers is None:
                    raise PlanError(
                        f"device program {me}: a wait for round {number} of step {step}, which this device has not begun"
                    )
                return all(((step, number), peer, me) in self.begun for peer in peers)
        return True

    def _do(self, device: _Device, operation: Operation) -> None:
        for name in reads_of(operation):
            if name not in device.filled:
                what = "before anything is written to it" if name in device.empty else "before it is made"
                me = device.program.device
                raise PlanError(f"device program {me}: {name!r} is read {what}: {operation_line(operation)}")
            if not isinstance(operation, Copy | Add | ExchangeRound):  # these name the part that they read
                rows = operation.rows if isinstance(operation, Compute) else None
                self._still(device, operation, Part(name, (rows,) if rows else None), writing=False)
        match operation:
            case ExchangeRound(sends=sends, receives=receives):
                for message, arrives in [*((m, False) for m in sends), *((m, True) for m in receives)]:
                    self._begin(device, operation, message, arrives=arrives)
                return
            case WaitRound(begun=step, number=number):
                for part, arrives in device.travelling.pop((step, number), ()):
                    device.filled |= {part.buffer} if arrives else set()
                return
            case BeginSum(step=step):
                device.begun.add(step)
                return
            case EndSum(step=step):
                device.ended.add(step)
                return
            case Copy(source=source, target=target) | Add(source=source, target=target):
                self._still(device, operation, source, writing=False)
                self._still(device, operation, target, writing=True)
            case Make(buffer=buffer):
                self._still(device, operation, Part(buffer), writing=True)
            case Fused():
                for inner in operation.operations:
                    if not hasattr(inner, "layer"):
                        self._do(device, inner)
        hollow = isinstance(operation, Make) and not operation.zeros
        (device.empty if hollow else device.filled).update(writes_of(operation))
        if hollow:
            device.filled -= set(writes_of(operation))

    def _begin(self, device: _Device, operation: ExchangeRound, message: PlannedMessage, *, arrives: bool) -> None:
        me, key, part = device.program.device, (operation.step, operation.number), message.part
        if part.buffer not in device.filled | device.empty:
            raise PlanError(
                f"device program {me}: {part.buffer!r} is not there to receive into: {operation_line(operation)}"
            )
        self._still(device, operation, part, writing=arrives)
        device.travelling.setdefault(key, []).append((part, arrives))
        self.begun.add((key, me, message.peer))
        self.rounds.setdefault((me, key), set()).add(message.peer)

    def _still(self, device: _Device, operation: Operation, part: Part, *, writing: bool) -> None:
        """Refuse to write what is being sent, and to use what is still arriving."""
        for (step, number), parts in device.travelling.items():
            for other, arrives in parts:
                if (writing or arrives) and _overlap(part, other):
                    raise PlanError(
                        f"device program {device.program.device}: {operation_line(operation)} uses {part.buffer!r} while round "
                        f"{number} of step {step} travels: wait for it first"
                    )


def _overlap(a: Part, b: Part) -> bool:
    if a.buffer != b.buffer:
        return False
    if a.box is None or b.box is None:
        return True
    return all(lo < hi2 and lo2 < hi for (lo, hi), (lo2, hi2) in zip(a.box, b.box, strict=False))
