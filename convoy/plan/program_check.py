"""Checks the programs of all devices together, before anything runs: a program that cannot run is refused.

The programs are walked as the devices would walk them, without tensors. A round is done when both ends of each of its messages
have begun them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from convoy.errors import PlanError
from convoy.plan.device_program import (
    Add,
    Compute,
    Copy,
    DeviceProgram,
    Event,
    Fused,
    Make,
    Operation,
    Part,
    Receive,
    Send,
    Signal,
    Wait,
    reads_of,
    writes_of,
)
from convoy.plan.program_text import operation_line

MAIN, SUMS = 0, 1


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
    """The two ends of a pair begin their messages to each other in one order, lane by lane."""
    sent: dict[tuple[int, int, int], list[Send | Receive]] = {}
    received: dict[tuple[int, int, int], list[Send | Receive]] = {}
    for program in programs:
        for lane, operations in _lanes(program):
            for op in operations:
                if isinstance(op, Send):
                    sent.setdefault((program.device, op.peer, lane), []).append(op)
                elif isinstance(op, Receive):
                    received.setdefault((op.peer, program.device, lane), []).append(op)
    for pair in sorted({*sent, *received}):
        sender, receiver, lane = pair
        for out, into in zip_longest(sent.get(pair, ()), received.get(pair, ())):
            if out is None or into is None:
                alone, verb = (into, "sends") if out is None else (out, "receives")
                at = receiver if out is None else sender
                raise PlanError(
                    f"device program {at}: nobody {verb} the other end of {operation_line(alone)} (devices {sender} to "
                    f"{receiver}, lane {lane})"
                )
            if (out.step, out.number, out.size, out.narrow) != (into.step, into.number, into.size, into.narrow):
                raise PlanError(
                    f"device program {sender}: {operation_line(out)} meets {operation_line(into)} of device {receiver}: "
                    "the two ends of a message must be of one round, one size and one width, and come in one order"
                )


def _lanes(program: DeviceProgram) -> Iterator[tuple[int, list[Operation]]]:
    yield MAIN, [*program.forward, *program.backward]
    yield SUMS, list(program.sums)


@dataclass
class _Device:
    """Where a device has come to.

    Attributes:
        empty: buffers that were made, but hold nothing yet.
        filled: buffers that hold numbers.
        travelling: by event, the parts that are being sent and received.
    """

    program: DeviceProgram
    lanes: list[list[Operation]]
    at: list[int] = field(default_factory=lambda: [0, 0])
    empty: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)
    travelling: dict[Event, list[tuple[Part, bool]]] = field(default_factory=dict)
    happened: set[Event] = field(default_factory=set)


class _Walk:
    def __init__(self, programs: Sequence[DeviceProgram]) -> None:
        self.devices = {p.device: _Device(p, [row for _, row in _lanes(p)]) for p in programs}
        self.begun: set[tuple[int, int, int, int]] = set()  # step, round, device, peer: that end has begun
        self.rounds: dict[tuple[int, Event], set[int]] = {}  # a device's round -> its peers
        for device in self.devices.values():
            device.filled |= {*device.program.inputs, *device.program.output_gradients}

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
            if left := [event for event, parts in device.travelling.items() if any(arrives for _, arrives in parts)]:
                raise PlanError(f"device program {number}: nobody waits for round {left[0][2]} of step {left[0][1]}")

    def _go(self, device: _Device, lane: int) -> bool:
        """Walk a lane as far as it goes; whether it moved."""
        start = device.at[lane]
        operations = device.lanes[lane]
        while device.at[lane] < len(operations):
            operation = operations[device.at[lane]]
            if isinstance(operation, Wait) and not all(self._happened(device, event) for event in operation.events):
                break
            self._do(device, operation)
            device.at[lane] += 1
        return device.at[lane] > start

    def _happened(self, device: _Device, event: Event) -> bool:
        if event[0] != "round":
            return event in device.happened
        me, (_, step, number) = device.program.device, event
        peers = self.rounds.get((me, event))
        if peers is None:
            raise PlanError(
                f"device program {me}: a wait for round {number} of step {step}, which this device has not begun"
            )
        return all((step, number, peer, me) in self.begun for peer in peers)

    def _do(self, device: _Device, operation: Operation) -> None:
        for name in reads_of(operation):
            if name not in device.filled:
                what = "before anything is written to it" if name in device.empty else "before it is made"
                me = device.program.device
                raise PlanError(f"device program {me}: {name!r} is read {what}: {operation_line(operation)}")
            if not isinstance(operation, Copy | Add | Send):  # these name the part that they read
                rows = operation.rows if isinstance(operation, Compute) else None
                self._still(device, operation, Part(name, (rows,) if rows else None), writing=False)
        match operation:
            case Send() | Receive():
                self._begin(device, operation)
                return
            case Wait(events=events):
                for event in events:
                    for part, arrives in device.travelling.pop(event, ()):
                        device.filled |= {part.buffer} if arrives else set()
                return
            case Signal(event=event):
                device.happened.add(event)
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

    def _begin(self, device: _Device, operation: Send | Receive) -> None:
        me, event = device.program.device, ("round", operation.step, operation.number)
        part = operation.part
        if part.buffer not in device.filled | device.empty:
            raise PlanError(
                f"device program {me}: {part.buffer!r} is not there to receive into: {operation_line(operation)}"
            )
        self._still(device, operation, part, writing=isinstance(operation, Receive))
        device.travelling.setdefault(event, []).append((part, isinstance(operation, Receive)))
        self.begun.add((operation.step, operation.number, me, operation.peer))
        self.rounds.setdefault((me, event), set()).add(operation.peer)

    def _still(self, device: _Device, operation: Operation, part: Part, *, writing: bool) -> None:
        """Refuse to write what travels, and to read what still arrives."""
        for event, parts in device.travelling.items():
            for other, arrives in parts:
                if (writing or arrives) and _overlap(part, other):
                    raise PlanError(
                        f"device program {device.program.device}: {operation_line(operation)} uses {part.buffer!r} while round "
                        f"{event[2]} of step {event[1]} travels: wait for it first"
                    )


def _overlap(a: Part, b: Part) -> bool:
    if a.buffer != b.buffer:
        return False
    if a.box is None or b.box is None:
        return True
    return all(lo < hi2 and lo2 < hi for (lo, hi), (lo2, hi2) in zip(a.box, b.box, strict=False))
