"""What a fleet was measured to do: seconds of every layer on every device, its links, its optimizer.

The file is a fleet file with one more table, written by `convoy measure` and readable by a person::

    [[host]] ... [[device]] ... [[link]] ...      # as in fleet.py, cards and links as measured

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

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tomlkit
from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from convoy.cost.compute import MeasuredTimes
from convoy.cost.costs import Costs
from convoy.cost.network import network_of
from convoy.cost.table import DeviceCosts, HostRates, LayerPoint, LinkSpread, layer_times
from convoy.errors import InputError, MismatchError, unknown_name
from convoy.fleet import Fleet
from convoy.model.graph import Graph

FORMAT = 2
"""2: batch norms with shared statistics, and what a step costs beside its layers. Without these a prediction is too low, so
files of format 1 are refused."""

_Text = Annotated[str, Strict()]
_Whole = Annotated[int, Strict()]
_CLOSED = ConfigDict(extra="forbid")


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
        link, host: spreads and common rates, where there was a network to measure.
        precision: what the layers computed in; see `convoy.runtime.precision`.

    Raises:
        InputError: a device, host or layer is missing, unknown or there twice; points that fill no rectangle.
    """

    fleet: Fleet
    net: str
    fingerprint: str
    batch: int
    convoy: str
    torch: str
    date: str
    device: tuple[DeviceCosts, ...]
    layer: tuple[LayerPoint, ...]
    link: tuple[LinkSpread, ...] = ()
    host: tuple[HostRates, ...] = ()
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InputError(f"measured.batch = {self.batch}: a batch holds one sample at least; measure again")
        _check_names(self)
        tables = [self.points_of(device.name) for device in self.fleet.devices]
        for device, table in zip(self.fleet.devices, tables, strict=True):
            if missing := sorted(set(tables[0]) ^ set(table)):
                raise InputError(
                    f"layer {missing[0]!r} is measured on some devices, but not on all (see {device.name!r}): measure again"
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
        """The tables that a replay interpolates."""
        return MeasuredTimes(
            tuple(
                {layer: layer_times(points) for layer, points in self.points_of(device.name).items()}
                for device in self.fleet.devices
            )
        )

    def costs(self, graph: Graph, itemsize: int = 4) -> Costs:
        """Everything that a replay of this model on this fleet needs.

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
        return Costs(
            times=self.times(),
            network=network_of(
                self.fleet,
                [costs.processor_s_per_byte for costs in self.device],
                [costs.jitter_s for costs in self.device],
            ),
            itemsize=itemsize,
            update_s_per_entry=tuple(costs.update_s_per_entry for costs in self.device),
            overheads=tuple(costs.overheads for costs in self.device),
        )

    @classmethod
    def from_toml(cls, text: str, source: str = "fleet.toml") -> "Measurement":
        """The measurement in a file's text. `source` names the file in errors.

        Raises:
            InputError: not TOML, no [measured] table, another format, unknown keys, wrong types, missing points. The
                message gives the path of the field, such as `measured.layer[2].samples`.
        """
        fleet, measured = _split(text, source)
        if measured is None:
            raise InputError(f"{source}: no [measured] table: this is a fleet as described; run convoy measure on it")
        if measured.get("format") != FORMAT:
            raise InputError(
                f"{source}: measured.format = {measured.get('format')!r}: this version reads {FORMAT}; measure again"
            )
        try:
            file = _FILE.validate_python(measured)
            contents = {field.name: getattr(file, field.name) for field in fields(_File) if field.name != "format"}
            return cls(fleet=fleet, **contents)
        except ValidationError as error:
            raise InputError("\n".join(f"{source}: {_explain(each)}" for each in error.errors())) from error
        except InputError as error:
            raise InputError(f"{source}: {error}") from error

    def to_toml(self) -> str:
        """The text of the file; `Measurement.from_toml` gives an equal measurement back."""
        lines = [self.fleet.to_toml(), "[measured]", f"format = {FORMAT}"]
        for name in ("net", "fingerprint", "batch", "precision", "convoy", "torch", "date"):
            lines.append(f"{name} = {_literal(getattr(self, name))}")
        for name in ("device", "host", "link", "layer"):
            rows = [f"  {{ {_row(value)} }}," for value in getattr(self, name)]
            if rows or name in ("device", "layer"):
                lines += [f"{name} = [", *rows, "]"]
        return "\n".join(lines) + "\n"


def read_fleet_file(path: Path) -> tuple[Fleet, Measurement | None]:
    """The fleet in a file, and what was measured of it if that stands there too.

    Raises:
        InputError: the file cannot be read or used; see `Fleet.from_toml` and `Measurement.from_toml`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a fleet ({error}): give the path of a UTF-8 TOML file") from error
    fleet, measured = _split(text, str(path))
    return fleet, None if measured is None else Measurement.from_toml(text, str(path))


# --- the file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """The [measured] table under the names that stand in it."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED
    format: _Whole
    net: _Text
    fingerprint: _Text
    batch: _Whole
    convoy: _Text
    torch: _Text
    date: _Text
    device: tuple[DeviceCosts, ...]
    layer: tuple[LayerPoint, ...]
    link: tuple[LinkSpread, ...] = ()
    host: tuple[HostRates, ...] = ()
    precision: _Text = "float32"


_FILE = TypeAdapter(_File)
_SECTIONS: Mapping[str, type[Any]] = {
    "device": DeviceCosts, "layer": LayerPoint, "link": LinkSpread, "host": HostRates
}  # fmt: skip


def _split(text: str, source: str) -> tuple[Fleet, dict[str, Any] | None]:
    """The fleet's own sections, and the [measured] table if there is one."""
    try:
        sections = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}; correct that line") from error
    measured = sections.pop("measured", None)
    if measured is not None and not isinstance(measured, dict):
        raise InputError(f"{source}: measured = {measured!r}: it is a table; measure again")
    return Fleet.from_toml(tomlkit.dumps(sections), source), measured


def _explain(error: ErrorDetails) -> str:
    """One line for one finding of pydantic: path, value, rule, remedy."""
    place = "measured" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    if error["type"] == "value_error":  # our own checks name the field, the rule and the remedy
        return f"{place}.{error['ctx']['error']}"
    parents = [part for part in error["loc"][:-1] if isinstance(part, str)]
    known = ", ".join(field.name for field in fields(_SECTIONS[parents[-1]] if parents else _File))
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):  # the name differs between versions
        return f"{place} = {error['input']!r}: unknown key; the keys known here are {known}"
    if error["type"] == "missing":
        return f"{place} is missing: the keys here are {known}; measure again"
    return f"{place} = {error['input']!r}: {error['msg']}; measure again"


def _row(value: DeviceCosts | HostRates | LinkSpread | LayerPoint) -> str:
    # Few points are shared: the key stands only there.
    named = [(field.name, getattr(value, field.name)) for field in fields(value)]
    return ", ".join(f"{name} = {_literal(each)}" for name, each in named if each is not False)


def _literal(value: str | int | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # By hand, since a document of thousands of rows takes tomlkit seconds.
    return tomlkit.item(value).as_string() if isinstance(value, str) else repr(value)


def _check_names(measured: Measurement) -> None:
    devices = [device.name for device in measured.fleet.devices]
    hosts = [host.name for host in measured.fleet.hosts]
    rows: list[tuple[str, str, tuple[tuple[str, str], ...], list[str], tuple[Any, ...]]] = []
    for i, costs in enumerate(measured.device):
        rows.append(("device", f"device[{i}]", (("device", costs.device),), devices, (costs.device,)))
    for i, p in enumerate(measured.layer):
        size = (p.device, p.layer, p.samples, p.outputs, p.inputs, p.shared)
        rows.append(("device", f"layer[{i}]", (("device", p.device),), devices, size))
    for i, link in enumerate(measured.link):
        ends = (("source", link.source), ("target", link.target))
        rows.append(("host", f"link[{i}]", ends, hosts, (link.source, link.target)))
    for i, rates in enumerate(measured.host):
        rows.append(("host", f"host[{i}]", (("host", rates.host),), hosts, (rates.host,)))
    seen: set[tuple[Any, ...]] = set()
    for what, place, names, known, key in rows:
        for field, name in names:
            if name not in known:
                raise InputError(f"measured.{place}.{field}: {unknown_name(what, name, known)}")
        if (section := (place.partition("[")[0], *key)) in seen:
            raise InputError(f"measured.{place} is there twice: {', '.join(map(str, key))}; remove one")
        seen.add(section)
    if [costs.device for costs in measured.device] != devices:
        raise InputError(
            f"measured.device has rows for {', '.join(c.device for c in measured.device) or 'nobody'}: it has one for each "
            f"device of the fleet, in its order ({', '.join(devices)}); measure again"
        )
