"""What was measured, row by row, and the grids that rows make."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Strict

from convoy.cost.compute import Correction, Grid, LayerTimes
from convoy.cost.overhead import Overheads
from convoy.errors import InputError
from convoy.plan.size import LocalSize

_Text = Annotated[str, Strict()]
_Number = Annotated[float, Strict()]
_Whole = Annotated[int, Strict()]
_Truth = Annotated[bool, Strict()]
_CLOSED = ConfigDict(extra="forbid")


def _in_range(owner: str, least: float, above: bool = False, **values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value) or value < least or (above and value == least):
            rule = f"above {least:g}" if above else f"at least {least:g}"
            raise InputError(f"{name} = {value!r} of {owner}: must be a finite number, {rule}; measure again")


@dataclass(frozen=True, slots=True)
class LayerPoint:
    """One layer on one device at one size.

    Attributes:
        samples, outputs, inputs: the size, as in `convoy.plan.size.LocalSize`.
        forward_s, backward_s: seconds of one call; backward is 0 where no gradient passes.
        spread: (slowest - fastest) / typical of the repetitions, forward and backward together.
        shared: of a batch norm that shares its statistics with other devices.
        beside: no point of the grids, but a size that a plan has.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    device: _Text
    layer: _Text
    samples: _Whole
    outputs: _Whole
    inputs: _Whole
    forward_s: _Number
    backward_s: _Number
    spread: _Number
    shared: _Truth = False
    beside: _Truth = False

    def __post_init__(self) -> None:
        owner = f"layer {self.layer!r} on device {self.device!r}"
        _in_range(owner, 1, samples=self.samples, outputs=self.outputs, inputs=self.inputs)
        _in_range(owner, 0, forward_s=self.forward_s, backward_s=self.backward_s, spread=self.spread)


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """What else a device's processor was measured to take.

    Attributes:
        send_s_per_byte, receive_s_per_byte: seconds of this device's processor for each byte of its traffic. Where a
            quota leaves it a fifth of a core, these are five times the seconds of a whole core.
        update_s_per_entry: of SGD with momentum, per entry of the parameters it holds.
        step_s, layer_s, round_s, message_s, copy_s_per_byte, add_s_per_byte, fresh_s_per_byte, update_s_per_tensor:
            see `convoy.cost.overhead.Overheads`.
        jitter_s: see `convoy.cost.network.Network`.
        traffic_spread, update_spread: (most - least) / typical of the repetitions.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    device: _Text
    send_s_per_byte: _Number
    receive_s_per_byte: _Number
    update_s_per_entry: _Number
    step_s: _Number
    layer_s: _Number
    round_s: _Number
    message_s: _Number
    copy_s_per_byte: _Number
    add_s_per_byte: _Number
    fresh_s_per_byte: _Number
    update_s_per_tensor: _Number
    jitter_s: _Number = 0.0
    traffic_spread: _Number = 0.0
    update_spread: _Number = 0.0

    def __post_init__(self) -> None:
        owner = f"device {self.device!r}"
        _in_range(owner, 0, send_s_per_byte=self.send_s_per_byte, receive_s_per_byte=self.receive_s_per_byte)
        _in_range(owner, 0, update_s_per_entry=self.update_s_per_entry, **asdict(self.overheads))
        _in_range(
            owner, 0, jitter_s=self.jitter_s, traffic_spread=self.traffic_spread, update_spread=self.update_spread
        )

    @property
    def overheads(self) -> Overheads:
        return Overheads(**{field.name: getattr(self, field.name) for field in fields(Overheads)})

    @property
    def processor_s_per_byte(self) -> float:
        """The one number that `convoy.cost.network.Network` charges either end of a message with."""
        return (self.send_s_per_byte + self.receive_s_per_byte) / 2


@dataclass(frozen=True, slots=True)
class LinkSpread:
    """How far the repetitions of a link's measurement lie apart: (slowest - fastest) / typical."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    source: _Text
    target: _Text
    latency_spread: _Number
    bandwidth_spread: _Number

    def __post_init__(self) -> None:
        owner = f"the link {self.source!r} to {self.target!r}"
        _in_range(owner, 0, latency_spread=self.latency_spread, bandwidth_spread=self.bandwidth_spread)


@dataclass(frozen=True, slots=True)
class HostRates:
    """A host's card while all hosts send at once.

    Attributes:
        ring_bytes_per_s: what it sends while every host sends to the next one and receives from the one before. Less
            than its card's rates: its directions share something (half duplex, the processor, the switch).
        send_spread, receive_spread: of the card's rates.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    host: _Text
    ring_bytes_per_s: _Number
    send_spread: _Number
    receive_spread: _Number

    def __post_init__(self) -> None:
        _in_range(f"host {self.host!r}", 0, above=True, ring_bytes_per_s=self.ring_bytes_per_s)
        _in_range(f"host {self.host!r}", 0, send_spread=self.send_spread, receive_spread=self.receive_spread)


def layer_times(points: Sequence[LayerPoint]) -> LayerTimes:
    """The times of one layer on one device: grids, and what corrects them.

    Raises:
        InputError: the points of the grids fill no rectangles.
    """
    times = _grid_times([point for point in points if not point.beside] or points)
    return replace(times, corrections=tuple(_correction(point) for point in points if point.beside))


def _correction(point: LayerPoint) -> Correction:
    return Correction(LocalSize(point.samples, point.outputs, point.inputs), point.forward_s, point.backward_s)


def _grid_times(points: Sequence[LayerPoint]) -> LayerTimes:
    """The grids of one layer on one device.

    Raises:
        InputError: the points fill no rectangles.
    """
    shared = {(point.samples, point.outputs): point for point in points if point.shared}
    times = _local_times([point for point in points if not point.shared] or points)
    if not shared:
        return times
    forward, backward = _grids(shared, points[0])
    return replace(times, forward_shared=forward, backward_shared=backward)


def _local_times(points: Sequence[LayerPoint]) -> LayerTimes:
    inputs = max(point.inputs for point in points)
    by_size = {(point.samples, point.outputs): point for point in points if point.inputs == inputs}
    forward, backward = _grids(by_size, points[0])
    fewer = [point for point in points if point.inputs < inputs]
    if not fewer:
        return LayerTimes(forward, backward)
    outputs = max(point.outputs for point in fewer)
    by_inputs = {(point.samples, point.inputs): point for point in fewer if point.outputs == outputs}
    if len(by_inputs) != len(fewer):
        raise InputError(f"{_place(points[0])}: points with fewer inputs have all outputs; measure again")
    samples = {point.samples for point in fewer}
    whole = {(s, inputs): by_size[s, outputs] for s in samples if (s, outputs) in by_size}
    if len(whole) == len(samples):
        by_inputs |= whole
    return LayerTimes(forward, backward, *_grids(by_inputs, points[0]))


def _grids(points: Mapping[tuple[int, int], LayerPoint], any_point: LayerPoint) -> tuple[Grid, Grid]:
    samples, others = (tuple(sorted({key[axis] for key in points})) for axis in (0, 1))
    for key in ((s, o) for s in samples for o in others):
        if key not in points:
            raise InputError(
                f"{_place(any_point)}: no point at {key[0]} samples and {key[1]} filters or inputs; measure again"
            )
    rows = [[points[s, o] for o in others] for s in samples]
    return (
        Grid(samples, others, tuple(tuple(point.forward_s for point in row) for row in rows)),
        Grid(samples, others, tuple(tuple(point.backward_s for point in row) for row in rows)),
    )


def _place(point: LayerPoint) -> str:
    return f"layer {point.layer!r} on device {point.device!r}"
