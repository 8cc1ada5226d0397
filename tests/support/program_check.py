"""Check the programs of all devices together by running them without tensors.

A round is complete when both ends of each of its messages have started.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from convoy.errors import PlanError
from convoy.plan import compile as compiler
from convoy.plan import device_program as ops
from convoy.plan.device_program import (
    DeviceProgram,
    ExchangeRound,
    Operation,
    Part,
    PlannedMessage,
    operation_line,
    reads_of,
    writes_of,
)

MAIN, SUMS = 0, 1

_Round = tuple[int, int]
"""A round: its step and its number."""


def check_programs(programs: Sequence[DeviceProgram]) -> None:
    """Refuse programs that cannot run together.

    Raises:
        PlanError: as `convoy.plan.compile.check_programs`; a circle of waits; a buffer that is read before it is written, or
            written while it is sent. The device and the operation are named.
    """
    compiler.check_programs(programs)
    _Walk(programs).run()


@dataclass
class _Device:
    """The state of one device in the check.

    Attributes:
        at: the next operation of each lane.
        empty: buffers that were made, but hold nothing yet; filled: buffers that hold numbers.
        exchanged: by round, the parts that are being sent (False) and received (True).
        begun, ended: gradient sums, by step.
    """

    number: int
    lanes: list[list[Operation]]
    filled: set[str]
    at: list[int] = field(default_factory=lambda: [0, 0])
    empty: set[str] = field(default_factory=set)
    exchanged: dict[_Round, list[tuple[Part, bool]]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


class _Walk:
    def __init__(self, programs: Sequence[DeviceProgram]) -> None:
        self.devices = [
            _Device(
                p.device,
                [[*p.forward, *p.backward], list(p.sums)],
                {*p.inputs, *map(ops.output_gradient, p.output_gradients)},
            )
            for p in programs
        ]
        self.begun: set[tuple[_Round, int, int]] = set()  # round, device, peer: that end has started
        self.peers: dict[tuple[int, _Round], set[int]] = {}  # of a device's round

    def run(self) -> None:
        while any(self._go(device, lane) for device in self.devices for lane in (MAIN, SUMS)):
            pass
        if waiting := list(self._waiting()):
            raise PlanError(f"device programs wait for each other for ever: {'; '.join(waiting[:4])}")
        for device in self.devices:
            if left := [each for each, parts in device.exchanged.items() if any(arrives for _, arrives in parts)]:
                raise PlanError(
                    f"device program {device.number}: nobody waits for round {left[0][1]} of step {left[0][0]}"
                )

    def _waiting(self) -> Iterator[str]:
        for device in self.devices:
            for at, operations in zip(device.at, device.lanes, strict=True):
                if at < len(operations):
                    yield f"device {device.number}: {operation_line(operations[at])}"

    def _go(self, device: _Device, lane: int) -> bool:
        """Advance a lane until it has to wait. Return whether it moved."""
        start, operations = device.at[lane], device.lanes[lane]
        while device.at[lane] < len(operations) and self._is_ready(device, operations[device.at[lane]]):
            self._do(device, operations[device.at[lane]])
            device.at[lane] += 1
        return device.at[lane] > start

    def _is_ready(self, device: _Device, operation: Operation) -> bool:
        match operation:
            case ops.TakeSum(step=step):
                return step in device.begun
            case ops.WaitSum(sum=step):
                return step in device.ended
            case ops.FinishSums(sums=sums):
                return device.ended.issuperset(sums)
            case ops.WaitRound(begun=step, number=number):
                peers = self.peers.get((device.number, (step, number)))
                if peers is None:
                    raise PlanError(
                        f"device program {device.number}: a wait for round {number} of step {step}, which this device has "
                        "not begun"
                    )
                return all(((step, number), peer, device.number) in self.begun for peer in peers)
        return True

    def _do(self, device: _Device, operation: Operation) -> None:
        for name in reads_of(operation):
            if name not in device.filled:
                why = "before anything is written to it" if name in device.empty else "before it is made"
                raise PlanError(f"device program {device.number}: {name!r} is read {why}: {operation_line(operation)}")
            if not isinstance(operation, ops.Copy | ops.Add | ExchangeRound):  # these name the part that they read
                rows = operation.rows if isinstance(operation, ops.Compute) else None
                self._check_free(device, operation, Part(name, (rows,) if rows else None), writing=False)
        match operation:
            case ExchangeRound(sends=sends, receives=receives):
                for message, arrives in [*((m, False) for m in sends), *((m, True) for m in receives)]:
                    self._begin(device, operation, message, arrives=arrives)
                return
            case ops.WaitRound(begun=step, number=number):
                parts = device.exchanged.pop((step, number), ())
                device.filled.update(part.buffer for part, arrives in parts if arrives)
            case ops.BeginSum(step=step):
                device.begun.add(step)
            case ops.EndSum(step=step):
                device.ended.add(step)
            case ops.Copy(source=source, target=target) | ops.Add(source=source, target=target):
                self._check_free(device, operation, source, writing=False)
                self._check_free(device, operation, target, writing=True)
            case ops.Make(buffer=buffer):
                self._check_free(device, operation, Part(buffer), writing=True)
            case ops.Fused():
                for inner in operation.operations:
                    if not isinstance(inner, ops.Compute):
                        self._do(device, inner)
        written = set(writes_of(operation))
        if isinstance(operation, ops.Make) and not operation.zeros:
            device.empty |= written
            device.filled -= written
        else:
            device.filled |= written

    def _begin(self, device: _Device, operation: ExchangeRound, message: PlannedMessage, *, arrives: bool) -> None:
        key, part = (operation.step, operation.number), message.part
        if part.buffer not in device.filled | device.empty:
            raise PlanError(
                f"device program {device.number}: {part.buffer!r} is not there to receive into: {operation_line(operation)}"
            )
        self._check_free(device, operation, part, writing=arrives)
        device.exchanged.setdefault(key, []).append((part, arrives))
        self.begun.add((key, device.number, message.peer))
        self.peers.setdefault((device.number, key), set()).add(message.peer)

    def _check_free(self, device: _Device, operation: Operation, part: Part, *, writing: bool) -> None:
        """Refuse to write data that is being sent, and to use data that is still arriving."""
        for (step, number), parts in device.exchanged.items():
            for other, arrives in parts:
                if (writing or arrives) and part.buffer == other.buffer and _overlap(part, other):
                    raise PlanError(
                        f"device program {device.number}: {operation_line(operation)} uses {part.buffer!r} during round "
                        f"{number} of step {step}: wait for it first"
                    )


def _overlap(a: Part, b: Part) -> bool:
    if a.box is None or b.box is None:
        return True
    return all(lo < hi2 and lo2 < hi for (lo, hi), (lo2, hi2) in zip(a.box, b.box, strict=False))
