"""What a fleet was measured to do: seconds of every layer on every device, its links, its optimizer. A value, and its file.

The file is a fleet file with one more table, written by `convoy measure` and readable by a person::

    [[host]] ... [[device]] ... [[link]] ...      # as in fleet/file.py, cards and links as measured

    [measured]
    format = 2
    net = "two-conv:50:500"
    fingerprint = "c0ffee..."                     # of the model's graph: times of one model say nothing of another
    batch = 64
    precision = "float32"
    device = [ { device = "attic-cpu", send_s_per_byte = 4e-10, ... }, ... ]
    layer = [ { device = "attic-cpu", layer = "conv1", samples = 4, outputs = 50, inputs = 3, forward_s = ... }, ... ]

Seconds are wall-clock seconds of the device as it is allowed to run, its slow-down included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import tomlkit
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError

from convoy.errors import InputError, MismatchError, shown, unknown_name
from convoy.files import parse_toml, read_text
from convoy.fleet import Fleet
from convoy.fleet.file import CLOSED, MOST, Text, Truth, explain, first_of
from convoy.model.graph import Graph
from convoy.plan.device_program import LocalSize
from convoy.simulate.compute import ComputeTimes, Correction, Grid, LayerTimes, MeasuredTimes
from convoy.simulate.costs import Costs
from convoy.simulate.interval import Errors, of_repeats, together
from convoy.simulate.network import network_of
from convoy.simulate.noise import QuotaNoise
from convoy.simulate.overhead import Overheads

FORMAT = 2
"""2: batch norms with shared statistics, and what a step costs beside its layers. Without these a prediction is too low, so
files of format 1 are refused."""

Seconds = Annotated[float, Strict(), Field(ge=0, le=1e9)]
Spread = Seconds
"""(slowest - fastest) / typical of the repetitions."""
Count = Annotated[int, Strict(), Field(ge=1, le=2**40)]


@dataclass(frozen=True, slots=True)
class LayerPoint:
    """One layer on one device at one size.

    Attributes:
        samples, outputs, inputs: the size, as in `convoy.plan.device_program.LocalSize`.
        forward_s, backward_s: seconds of one call; backward is 0 where no gradient passes.
        spread: of forward and backward together.
        shared: of a batch norm that shares its statistics with other devices.
        beside: no point of the grids, but a size that a plan has.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    device: Text
    layer: Text
    samples: Count
    outputs: Count
    inputs: Count
    forward_s: Seconds
    backward_s: Seconds
    spread: Spread
    shared: Truth = False
    beside: Truth = False


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """What else a device's processor was measured to take.

    Attributes:
        send_s_per_byte, receive_s_per_byte: seconds of this device's processor for each byte of its traffic. Where a
            quota leaves it a fifth of a core, these are five times the seconds of a whole core.
        update_s_per_entry: of SGD with momentum, per entry of the parameters it holds.
        step_s, layer_s, round_s, message_s, copy_s_per_byte, add_s_per_byte, fresh_s_per_byte, update_s_per_tensor,
            loss_s_per_byte, queue_s: see `convoy.simulate.overhead.Overheads`; the last two are 0 in files without them.
        jitter_s: see `convoy.simulate.network.Network`.
        noise: the noise model of a device under a CPU quota; None for every other device.
        other_load: how much longer its work took because of other programs, at most: 0.5 is half as long again.
        flop_per_s, memory_bytes_per_s: what it reached at the weighted layers of this net, and at all others; 0: not known.
        process_bytes: resident memory of the process beside the model, before anything is trained; 0: not known, as of
            accelerators, and in files from before it was measured.
        measured_w: while its layers were timed; None where `measured_by` says why: what measured, or why nothing did.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    device: Text
    send_s_per_byte: Seconds
    receive_s_per_byte: Seconds
    update_s_per_entry: Seconds
    step_s: Seconds
    layer_s: Seconds
    round_s: Seconds
    message_s: Seconds
    copy_s_per_byte: Seconds
    add_s_per_byte: Seconds
    fresh_s_per_byte: Seconds
    update_s_per_tensor: Seconds
    jitter_s: Seconds = 0.0
    traffic_spread: Spread = 0.0
    update_spread: Spread = 0.0
    other_load: Spread = 0.0
    flop_per_s: Annotated[float, Strict(), Field(ge=0, le=MOST)] = 0.0
    memory_bytes_per_s: Annotated[float, Strict(), Field(ge=0, le=MOST)] = 0.0
    measured_w: Annotated[float, Strict(), Field(ge=0, le=MOST)] | None = None
    measured_by: Text = ""
    loss_s_per_byte: Seconds = 0.0
    queue_s: Seconds = 0.0
    process_bytes: Annotated[int, Strict(), Field(ge=0, le=2**50)] = 0
    noise: QuotaNoise | None = None

    @property
    def overheads(self) -> Overheads:
        return Overheads(**{field.name: getattr(self, field.name) for field in fields(Overheads)})

    @property
    def processor_s_per_byte(self) -> float:
        """The one number that `convoy.simulate.network.Network` charges either end of a message with."""
        return (self.send_s_per_byte + self.receive_s_per_byte) / 2


@dataclass(frozen=True, slots=True)
class LinkSpread:
    """How far the repetitions of a link's measurement lie apart."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    source: Text
    target: Text
    latency_spread: Spread
    bandwidth_spread: Spread


@dataclass(frozen=True)
class Measurement:
    """One measuring of a fleet with a model.

    Attributes:
        fleet: with cards and links as measured.
        net, fingerprint, batch: the model by name and by `Graph.fingerprint`, and the largest batch that was timed.
        convoy, torch, date: versions, and when (ISO 8601).
        device: one per device of the fleet, in its order.
        layer: points of every layer on every device. Those with all inputs fill a rectangle of samples x outputs;
            those with fewer inputs fill a rectangle of samples x inputs, with all outputs.
        link: spreads, where there was a network to measure.
        precision: what the layers computed in; see `convoy.runtime.precision`.

    Raises:
        InputError: a device, host or layer is missing, unknown or there twice; points that fill no rectangle.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    fleet: Fleet
    net: Text
    fingerprint: Text
    batch: Count
    convoy: Text
    torch: Text
    date: Text
    device: tuple[DeviceCosts, ...]
    layer: tuple[LayerPoint, ...]
    link: tuple[LinkSpread, ...] = ()
    precision: Text = "float32"

    def __post_init__(self) -> None:
        devices = [device.name for device in self.fleet.devices]
        hosts = [host.name for host in self.fleet.hosts]
        _check_rows("device", self.device, {"device": devices})
        _check_rows("layer", self.layer, {"device": devices}, "layer", "samples", "outputs", "inputs", "shared")
        _check_rows("link", self.link, {"source": hosts, "target": hosts})
        if [costs.device for costs in self.device] != devices:
            raise InputError(
                f"measured.device has rows for {', '.join(c.device for c in self.device) or 'nobody'}: it has one for each "
                f"device of the fleet, in its order ({', '.join(devices)}); measure again"
            )
        tables = [self.points_of(device) for device in devices]
        for device, table in zip(devices, tables, strict=True):
            if missing := sorted(set(tables[0]) ^ set(table)):
                raise InputError(
                    f"layer {missing[0]!r} is measured on some devices, but not on all (see {device!r}): measure again"
                )
            for points in table.values():
                layer_times(points)

    def points_of(self, device: str) -> dict[str, list[LayerPoint]]:
        """The points of one device by layer."""
        table: dict[str, list[LayerPoint]] = {}
        for point in self.layer:
            if point.device == device:
                table.setdefault(point.layer, []).append(point)
        return table

    def times(self) -> MeasuredTimes:
        """The tables that a simulation interpolates."""
        return MeasuredTimes(
            tuple(
                {layer: layer_times(points) for layer, points in self.points_of(device.name).items()}
                for device in self.fleet.devices
            )
        )

    def costs(self, graph: Graph, itemsize: int = 4) -> Costs:
        """Everything that a simulation of this model on this fleet needs.

        Args:
            graph: the model, as it was measured.
            itemsize: bytes of one number.

        Raises:
            MismatchError: measured with another model.
        """
        if graph.fingerprint != self.fingerprint:
            raise MismatchError(
                f"these times are of {self.net} ({self.fingerprint}), not of this {graph.model} ({graph.fingerprint}): "
                "measure this model on this fleet first"
            )
        return self.costs_with(self.times(), itemsize)

    def costs_with(self, times: ComputeTimes, itemsize: int = 4) -> Costs:
        """The costs with other times of layers: wire, optimizer and the rest of a step as they were measured."""
        return Costs(
            times=times,
            network=replace(
                network_of(
                    self.fleet,
                    [costs.processor_s_per_byte for costs in self.device],
                    [costs.jitter_s for costs in self.device],
                ),
                noise=tuple(costs.noise for costs in self.device) if any(costs.noise for costs in self.device) else (),
            ),
            itemsize=itemsize,
            update_s_per_entry=tuple(costs.update_s_per_entry for costs in self.device),
            overheads=tuple(costs.overheads for costs in self.device),
            errors=self.errors(),
            process_bytes=tuple(costs.process_bytes for costs in self.device),
        )

    def errors(self) -> Errors:
        """Return how far times and rates may err, by how their repetitions differed and by other load."""
        devices = []
        for costs in self.device:
            largest = [_largest(points) for points in self.points_of(costs.device).values()]
            repeats = of_repeats((point.forward_s + point.backward_s, point.spread) for point in largest)
            devices.append(together([repeats, 1.0 + costs.other_load]))
        load = max((costs.other_load for costs in self.device), default=0.0)
        wires = [of_repeats([(1.0, link.bandwidth_spread)]) for link in self.link]
        return Errors("measured", tuple(devices), together([max(wires, default=1.0), 1.0 + load]))

    @classmethod
    def from_toml(cls, text: str, source: str = "fleet.toml") -> Self:
        """The measurement in a file's text. `source` names the file in errors.

        Raises:
            InputError: not TOML, no [measured] table, another format, unknown keys, wrong types, missing points. The
                message gives the path of the field, such as `measured.layer[2].samples`.
        """
        sections = parse_toml(text, source)
        fleet = Fleet.from_sections(sections, source)
        if "measured" not in sections:
            raise InputError(f"{source}: no [measured] table: this is a fleet as described; run convoy measure on it")
        return cls._from_sections(sections, fleet, source)

    @classmethod
    def _from_sections(cls, sections: Mapping[str, Any], fleet: Fleet, source: str) -> Self:
        measured = sections["measured"]
        if not isinstance(measured, dict):
            raise InputError(f"{source}: measured = {shown(measured)}: it is a table; measure again")
        if (number := measured.get("format")) != FORMAT:
            raise InputError(f"{source}: measured.format = {shown(number)}: this version reads {FORMAT}; measure again")
        rows = {
            name: value for name, value in measured.items() if name not in ("format", "host")
        }  # "host": older files
        if isinstance(devices := rows.get("device"), list):
            rows["device"] = [_with_noise(row) for row in devices]
        try:
            return TypeAdapter(cls).validate_python(rows | {"fleet": fleet})
        except ValidationError as error:
            lines = [explain(each, cls, _SECTIONS, "measure again", "measured.") for each in error.errors()]
            raise InputError(first_of(lines, source)) from error

    def to_toml(self) -> str:
        """The text of the file; `Measurement.from_toml` gives an equal measurement back."""
        lines = [self.fleet.to_toml(), "[measured]", f"format = {FORMAT}"]
        for name in ("net", "fingerprint", "batch", "precision", "convoy", "torch", "date"):
            lines.append(f"{name} = {_literal(getattr(self, name))}")
        for name in ("device", "link", "layer"):
            rows = [f"  {{ {_row(value)} }}," for value in getattr(self, name)]
            if rows or name in ("device", "layer"):
                lines += [f"{name} = [", *rows, "]"]
        return "\n".join(lines) + "\n"


_SECTIONS: Mapping[str, type[Any]] = {
    "device": DeviceCosts, "layer": LayerPoint, "link": LinkSpread, "noise": QuotaNoise
}  # fmt: skip
_OLD_NOISE = {"beside_s": "overlap_delay_s", "rested_s": "rested_s", "burst": "burst"}
"""Keys of a device in files from before the noise model was a table of its own, and their names there."""


def _with_noise(row: Any) -> Any:
    """Return the row of a device with the keys of an older file moved into its noise model; none if they say nothing."""
    if not isinstance(row, dict) or not row.keys() & _OLD_NOISE.keys():
        return row
    noise = {new: row[old] for old, new in _OLD_NOISE.items() if old in row}
    kept = {name: value for name, value in row.items() if name not in _OLD_NOISE}
    return kept if QuotaNoise(**noise) == QuotaNoise() else kept | {"noise": noise}


def read_fleet_file(path: Path) -> tuple[Fleet, Measurement | None]:
    """The fleet in a file, and what was measured of it if that stands there too.

    Raises:
        InputError: the file cannot be read or used; see `Fleet.from_toml` and `Measurement.from_toml`.
    """
    source = str(path)
    sections = parse_toml(read_text(path, "the fleet", "give the path of a TOML file"), source)
    fleet = Fleet.from_sections(sections, source)
    return fleet, Measurement._from_sections(sections, fleet, source) if "measured" in sections else None


def _row(value: DeviceCosts | LinkSpread | LayerPoint | QuotaNoise) -> str:
    # Few points are shared, few devices have a quota: the key stands only there.
    named = [(field.name, getattr(value, field.name)) for field in fields(value)]
    return ", ".join(f"{name} = {_literal(each)}" for name, each in named if each is not False and each is not None)


def _literal(value: str | int | float | QuotaNoise) -> str:
    if isinstance(value, QuotaNoise):
        return f"{{ {_row(value)} }}"
    if isinstance(value, bool):
        return str(value).lower()
    # By hand, since a document of thousands of rows takes tomlkit seconds.
    return tomlkit.item(value).as_string() if isinstance(value, str) else repr(value)


def _check_rows(section: str, rows: Sequence[Any], names: Mapping[str, Sequence[str]], *more: str) -> None:
    """Refuse rows of unknown devices or hosts, and rows that are there twice.

    Args:
        names: by field, the devices or hosts that it may name.
        more: fields by which rows differ, beside these.
    """
    seen: set[tuple[Any, ...]] = set()
    for i, row in enumerate(rows):
        for field, known in names.items():
            if (name := getattr(row, field)) not in known:
                kind = "device" if field == "device" else "host"
                raise InputError(f"measured.{section}[{i}].{field}: {unknown_name(kind, name, known)}")
        key = tuple(getattr(row, field) for field in (*names, *more))
        if key in seen:
            raise InputError(f"measured.{section}[{i}] is there twice: {', '.join(map(str, key))}; remove one")
        seen.add(key)


# --- grids -----------------------------------------------------------------------------------------------------------


def layer_times(points: Sequence[LayerPoint]) -> LayerTimes:
    """The times of one layer on one device: grids, and what corrects them.

    Raises:
        InputError: the points of the grids fill no rectangles.
    """
    on_grid = [point for point in points if not point.beside] or points
    times = _local_times([point for point in on_grid if not point.shared] or on_grid)
    if shared := {(point.samples, point.outputs): point for point in on_grid if point.shared}:
        forward, backward = _grids(shared, points[0])
        times = replace(times, forward_shared=forward, backward_shared=backward)
    corrections = (
        Correction(LocalSize(point.samples, point.outputs, point.inputs), point.forward_s, point.backward_s)
        for point in points
        if point.beside
    )
    return replace(times, corrections=tuple(corrections))


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
        raise InputError(f"{_name(points[0])}: points with fewer inputs have all outputs; measure again")
    samples = {point.samples for point in fewer}
    whole = {(s, inputs): by_size[s, outputs] for s in samples if (s, outputs) in by_size}
    if len(whole) == len(samples):
        by_inputs |= whole
    return LayerTimes(forward, backward, *_grids(by_inputs, points[0]))


def _grids(points: Mapping[tuple[int, int], LayerPoint], any_point: LayerPoint) -> tuple[Grid, Grid]:
    """Forward and backward over (samples, filters or inputs)."""
    samples, others = (tuple(sorted({key[axis] for key in points})) for axis in (0, 1))
    for s, o in ((s, o) for s in samples for o in others):
        if (s, o) not in points:
            raise InputError(f"{_name(any_point)}: no point at {s} samples and {o} filters or inputs; measure again")
    forward, backward = (
        Grid(samples, others, tuple(tuple(float(getattr(points[s, o], phase)) for o in others) for s in samples))
        for phase in ("forward_s", "backward_s")
    )
    return forward, backward


def _largest(points: Sequence[LayerPoint]) -> LayerPoint:
    return max(points, key=lambda point: (point.samples, point.outputs, point.inputs, not point.shared))


def _name(point: LayerPoint) -> str:
    return f"layer {point.layer!r} on device {point.device!r}"
