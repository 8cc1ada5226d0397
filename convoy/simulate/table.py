"""Holds the measurement of a fleet (layer times, links, optimizer, overheads), and reads and writes its file.

The file is a fleet file with one more table, written by `convoy measure`::

    [[host]] ... [[device]] ... [[link]] ...      # as in fleet/file.py, NICs and links as measured

    [measured]
    format = 2
    net = "two-conv:50:500"
    fingerprint = "c0ffee..."                     # of the model's graph: times are valid for one model only
    batch = 64
    precision = "float32"
    device = [ { device = "attic-cpu", send_s_per_byte = 4e-10, ... }, ... ]
    layer = [ { device = "attic-cpu", layer = "conv1", samples = 4, outputs = 50, inputs = 3, forward_s = ... }, ... ]

All seconds are wall-clock seconds, and include the device's slowdown and CPU quota.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import tomlkit
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError

from convoy.errors import InputError, MismatchError, shown, unknown_name
from convoy.files import parse_toml, read_text
from convoy.fleet import Fleet, Nic
from convoy.fleet.file import CLOSED, Text, Truth, explain, first_of
from convoy.model.graph import Graph
from convoy.plan.device_program import LocalSize
from convoy.simulate.compute import Correction, Grid, LayerTimes, MeasuredTimes
from convoy.simulate.costs import Costs, Overheads
from convoy.simulate.interval import Errors, of_repeats, together
from convoy.simulate.network import network_of

FORMAT = 2
"""The file format's version. Format 1 is refused: it lacks overheads and shared statistics, so predictions were too low."""

GIGABIT = Nic(send_bytes_per_s=118e6, receive_bytes_per_s=118e6, latency_s=1e-4)
"""The assumed NIC of unmeasured hosts: the rates that messages reach on Gigabit Ethernet."""

Seconds = Annotated[float, Strict(), Field(ge=0, le=1e9)]
Spread = Seconds  # (slowest - fastest) / typical of the repetitions
Count = Annotated[int, Strict(), Field(ge=1, le=2**40)]


@dataclass(frozen=True, slots=True)
class LayerPoint:
    """The measured times of one layer on one device at one size.

    Attributes:
        samples, outputs, inputs, tile: the size, as in `convoy.plan.device_program.LocalSize`; None: whole images.
        forward_s, backward_s: seconds of one call; backward is 0 without a gradient.
        spread: spread of forward + backward over the repetitions.
        shared: whether this is a batch norm that shares its statistics with other devices.
        beside: whether this is a plan's size outside the grids.
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
    tile: Annotated[float, Strict(), Field(gt=0, lt=1)] | None = None

    @property
    def images(self) -> float:
        return self.samples * (self.tile or 1)


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """The measured costs of a device other than its layers. For fields not listed here see `Overheads` and `Network`.

    Attributes:
        send_s_per_byte, receive_s_per_byte: processor seconds per byte of traffic. Under a quota of a fifth of a core,
            they are five times those of a whole core.
        update_s_per_entry: seconds of SGD with momentum per parameter entry.
        other_load: the most extra time caused by other programs, as a fraction: 0.5 is 50 % longer.
        process_bytes: resident memory of the process before training, without the model; 0: unknown.
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
    other_load: Spread = 0.0
    loss_s_per_byte: Seconds = 0.0
    queue_s: Seconds = 0.0
    live_s_per_sample: Seconds = 0.0
    live_bytes: Annotated[int, Strict(), Field(ge=0, le=2**50)] = 0
    process_bytes: Annotated[int, Strict(), Field(ge=0, le=2**50)] = 0

    @property
    def processor_s_per_byte(self) -> float:
        """The mean of both directions. The network model charges it to sender and receiver."""
        return (self.send_s_per_byte + self.receive_s_per_byte) / 2


@dataclass(frozen=True, slots=True)
class LinkSpread:
    """The spread of a link's repeated measurements."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    source: Text
    target: Text
    latency_spread: Spread
    bandwidth_spread: Spread


@dataclass(frozen=True)
class Measurement:
    """A measurement of a fleet with a model.

    Attributes:
        fleet: the fleet with measured NICs and links.
        net, fingerprint, batch: the model's name and `Graph.fingerprint`, and the largest batch that was timed.
        convoy, torch, date: versions, and the time of the measurement (ISO 8601).
        device: costs of each device, in the fleet's order.
        layer: points of every layer on every device. Those with all inputs fill a rectangle of samples x outputs;
            those with fewer inputs fill a rectangle of samples x inputs, with all outputs.
        precision: number format of the layers; see `convoy.runtime.precision`.

    Raises:
        InputError: a device or layer is missing, unknown or duplicate; the points fill no rectangle.
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
        names = [device.name for device in self.fleet.devices]
        sections: Mapping[str, Sequence[DeviceCosts | LayerPoint]] = {"device": self.device, "layer": self.layer}
        for section, rows in sections.items():
            for i, row in enumerate(rows):
                if row.device not in names:
                    raise InputError(f"measured.{section}[{i}].device: {unknown_name('device', row.device, names)}")
        if [costs.device for costs in self.device] != names:
            raise InputError(
                f"measured.device has rows for {', '.join(c.device for c in self.device) or 'no device'}: it needs one row "
                f"for each device of the fleet, in this order ({', '.join(names)}); measure again"
            )
        tables = [self.points_of(name) for name in names]
        for name, table in zip(names, tables, strict=True):
            if missing := sorted(set(tables[0]) ^ set(table)):
                raise InputError(
                    f"layer {missing[0]!r} is measured on some devices, but not on all (see {name!r}): measure again"
                )
            for points in table.values():
                layer_times(points)

    def points_of(self, device: str) -> dict[str, list[LayerPoint]]:
        """Return the points of one device by layer."""
        table: dict[str, list[LayerPoint]] = {}
        for point in self.layer:
            if point.device == device:
                table.setdefault(point.layer, []).append(point)
        return table

    # --- costs -------------------------------------------------------------------------------------------------------

    def costs(self, graph: Graph, itemsize: int = 4) -> Costs:
        """Return the costs of the measured model.

        Raises:
            MismatchError: `graph` is another model.
        """
        if graph.fingerprint != self.fingerprint:
            raise MismatchError(
                f"these times are of {self.net} ({self.fingerprint}), not of this {graph.model} ({graph.fingerprint}): "
                "measure this model on this fleet first"
            )
        tables = (self.points_of(device.name) for device in self.fleet.devices)
        rows, names = self.device, [field.name for field in fields(Overheads)]
        network = network_of(self.fleet, [row.processor_s_per_byte for row in rows], [row.jitter_s for row in rows])
        return Costs(
            times=MeasuredTimes(
                tuple({name: layer_times(points) for name, points in table.items()} for table in tables)
            ),
            network=network,
            itemsize=itemsize,
            update_s_per_entry=tuple(row.update_s_per_entry for row in rows),
            overheads=tuple(Overheads(**{name: getattr(row, name) for name in names}) for row in rows),
            errors=self.errors,
            process_bytes=tuple(row.process_bytes for row in rows),
        )

    @property
    def errors(self) -> Errors:
        """The error factors of times and links, from the spread of repetitions and the load by other programs."""
        devices = []
        for costs in self.device:
            largest = [
                max(points, key=lambda p: (p.images, p.outputs, p.inputs, not p.shared))
                for points in self.points_of(costs.device).values()
            ]
            repeats = of_repeats((point.forward_s + point.backward_s, point.spread) for point in largest)
            devices.append(together([repeats, 1.0 + costs.other_load]))
        load = max((costs.other_load for costs in self.device), default=0.0)
        wires = [of_repeats([(1.0, link.bandwidth_spread)]) for link in self.link]
        return Errors("measured", tuple(devices), together([max(wires, default=1.0), 1.0 + load]))

    # --- other devices -----------------------------------------------------------------------------------------------

    def of_devices(self, indices: Sequence[int]) -> Self:
        """Return the measurement restricted to these devices, in this order."""
        devices = tuple(self.fleet.devices[i] for i in indices)
        names, hosts = {device.name for device in devices}, {device.host for device in devices}
        return replace(
            self,
            fleet=replace(self.fleet.with_only(set(indices)), devices=devices),
            device=tuple(self.device[i] for i in indices),
            layer=tuple(point for point in self.layer if point.device in names),
            link=tuple(link for link in self.link if {link.source, link.target} <= hosts),
        )

    def with_device(self, joining: "Measurement", nic: Nic = GIGABIT) -> Self:
        """Return this measurement plus a device that was measured alone.

        Args:
            joining: the measurement of that device. A duplicate name gets a number.
            nic: the assumed NIC of unmeasured hosts.

        Raises:
            MismatchError: the device was measured with another model or precision.
        """
        for field in ("fingerprint", "precision"):
            ours, theirs = getattr(self, field), getattr(joining, field)
            if ours != theirs:
                raise MismatchError(
                    f"the joining device was measured with {field} {theirs}, the others with {ours}: measure it with the "
                    "model that they train"
                )
        fleet, device = self.fleet, joining.fleet.devices[0]
        taken = {each.name for each in fleet.devices}
        name = next(
            n for i in range(len(taken) + 1) if (n := f"{device.name[:56]}-{i + 1}" if i else device.name) not in taken
        )
        hosts = fleet.hosts
        if device.host not in {host.name for host in hosts}:
            host = joining.fleet.hosts[0]
            hosts = (*hosts, replace(host, card=host.card or joining.fleet.network or nic))
        if len(hosts) > 1 and fleet.network is None:
            hosts = tuple(replace(host, card=host.card or nic) for host in hosts)
        return replace(
            self,
            fleet=replace(fleet, hosts=hosts, devices=(*fleet.devices, replace(device, name=name))),
            device=(*self.device, replace(joining.device[0], device=name)),
            layer=(*self.layer, *(replace(p, device=name) for p in joining.layer if p.device == device.name)),
        )

    # --- the file ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_toml(cls, text: str, source: str = "fleet.toml") -> Self:
        """Read a measurement. `source` names the file in errors.

        Raises:
            InputError: no TOML, no [measured] table, another format, unknown keys, wrong types, missing points.
        """
        _, measured = cls._from_sections(parse_toml(text, source), source)
        if measured is None:
            raise InputError(f"{source}: no [measured] table, only a description: run convoy measure on it")
        return measured

    @classmethod
    def _from_sections(cls, sections: Mapping[str, Any], source: str) -> tuple[Fleet, Self | None]:
        fleet = Fleet.from_sections(sections, source)
        if "measured" not in sections:
            return fleet, None
        measured = sections["measured"]
        if not isinstance(measured, dict):
            raise InputError(f"{source}: measured = {shown(measured)}: it is a table; measure again")
        if (number := measured.get("format")) != FORMAT:
            raise InputError(f"{source}: measured.format = {shown(number)}: this version reads {FORMAT}; measure again")
        rows = {name: value for name, value in measured.items() if name != "format"}
        try:
            return fleet, TypeAdapter(cls).validate_python(rows | {"fleet": fleet})
        except ValidationError as error:
            lines = [explain(each, cls, _SECTIONS, "measure again", "measured.") for each in error.errors()]
            raise InputError(first_of(lines, source)) from error

    def to_toml(self) -> str:
        """Return the text of the file; `Measurement.from_toml` returns an equal measurement."""
        lines = [self.fleet.to_toml(), "[measured]", f"format = {FORMAT}"]
        for name in ("net", "fingerprint", "batch", "precision", "convoy", "torch", "date"):
            lines.append(f"{name} = {_literal(getattr(self, name))}")
        for name in ("device", "link", "layer"):
            rows = [f"  {{ {_row(value)} }}," for value in getattr(self, name)]
            if rows or name in ("device", "layer"):
                lines += [f"{name} = [", *rows, "]"]
        return "\n".join(lines) + "\n"


def read_fleet_file(path: Path) -> tuple[Fleet, Measurement | None]:
    """Return the fleet in a file, and its measurement if there is one.

    Raises:
        InputError: the file cannot be read or used; see `Fleet.from_toml` and `Measurement.from_toml`.
    """
    text = read_text(path, "the fleet", "give the path of a TOML file")
    return Measurement._from_sections(parse_toml(text, str(path)), str(path))


_SECTIONS: Mapping[str, type[Any]] = {"device": DeviceCosts, "layer": LayerPoint, "link": LinkSpread}


def _row(value: DeviceCosts | LinkSpread | LayerPoint) -> str:
    # Omit False and None: they are defaults, and frequent.
    named = [(field.name, getattr(value, field.name)) for field in fields(value)]
    return ", ".join(f"{name} = {_literal(each)}" for name, each in named if each is not False and each is not None)


def _literal(value: str | int | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # tomlkit takes seconds to write a document of thousands of rows.
    return tomlkit.item(value).as_string() if isinstance(value, str) else repr(value)


# --- grids -----------------------------------------------------------------------------------------------------------


def layer_times(points: Sequence[LayerPoint]) -> LayerTimes:
    """Return the times of one layer on one device: grids and corrections.

    Raises:
        InputError: the points of the grids fill no rectangles, or a point is duplicate.
    """
    on_grid = [point for point in points if not point.beside] or list(points)
    alone = [point for point in on_grid if not point.shared] or on_grid
    inputs = max(point.inputs for point in alone)
    forward, backward = _grids([p for p in alone if p.inputs == inputs], "outputs")
    times = LayerTimes(forward, backward)
    if fewer := [point for point in alone if point.inputs < inputs]:
        outputs, samples = max(point.outputs for point in fewer), {point.images for point in fewer}
        if any(point.outputs != outputs for point in fewer):
            raise InputError(f"{_name(points[0])}: points with fewer inputs have all outputs; measure again")
        whole = [p for p in alone if (p.inputs, p.outputs) == (inputs, outputs) and p.images in samples]
        forward, backward = _grids(fewer + whole * (len(whole) == len(samples)), "inputs")
        times = replace(times, forward_inputs=forward, backward_inputs=backward)
    if shared := [point for point in on_grid if point.shared]:
        forward, backward = _grids(shared, "outputs")
        times = replace(times, forward_shared=forward, backward_shared=backward)
    corrections = (
        Correction(LocalSize(point.samples, point.outputs, point.inputs), point.forward_s, point.backward_s)
        for point in points
        if point.beside
    )
    return replace(times, corrections=tuple(corrections))


def _grids(points: Sequence[LayerPoint], axis: Literal["outputs", "inputs"]) -> tuple[Grid, Grid]:
    table = {(point.images, getattr(point, axis)): point for point in points}
    if len(table) < len(points):
        raise InputError(f"{_name(points[0])}: a size is there twice; remove one")
    samples, others = (tuple(sorted({key[i] for key in table})) for i in (0, 1))
    for s, o in ((s, o) for s in samples for o in others):
        if (s, o) not in table:
            raise InputError(f"{_name(points[0])}: no point at {s} samples and {o} {axis}; measure again")
    forward, backward = (
        Grid(samples, others, tuple(tuple(float(getattr(table[s, o], phase)) for o in others) for s in samples), axis)
        for phase in ("forward_s", "backward_s")
    )
    return forward, backward


def _name(point: LayerPoint) -> str:
    return f"layer {point.layer!r} on device {point.device!r}"
