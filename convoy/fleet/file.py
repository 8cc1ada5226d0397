"""A fleet as values: devices, hosts, NICs and links; reading and writing its file."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import tomlkit
from pydantic import BeforeValidator, ConfigDict, Strict, StringConstraints, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from convoy.errors import InputError, shown, unknown_name
from convoy.files import parse_toml, read_text
from convoy.fleet.catalogue import DeviceClass, device_class
from convoy.fleet.units import Dimension, quantity

KINDS = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu")  # types of torch; others are accepted unless misspelt

Text = Annotated[str, Strict()]
Truth = Annotated[bool, Strict()]
_Number = Annotated[float, Strict()]
_Whole = Annotated[int, Strict()]
CLOSED = ConfigDict(extra="forbid")

LEAST, MOST = 1e-12, 1e21  # range of a fleet's numbers, in SI units, so that sums and quotients cannot overflow
MAX_SLOWDOWN = 10_000.0  # a slower device would not finish its first step
MAX_LATENCY_S = 1e6
MOST_LINES = 20  # maximum number of errors shown for one file


def _in(dimension: Dimension, *, whole: bool = False) -> BeforeValidator:
    """Return a pydantic validator that converts a number or a text with a unit to SI units."""

    def read(value: object) -> float | int:
        if whole and isinstance(value, int) and not isinstance(value, bool):
            return value  # a float would lose bits beyond the 53rd
        try:
            number = quantity(value, dimension)
        except InputError as error:
            raise PydanticCustomError("unit", "{why}", {"why": str(error)}) from None
        return int(number) if whole else number

    return BeforeValidator(read)


_BytesPerS = Annotated[float, _in("bytes_per_s")]
_FlopPerS = Annotated[float, _in("flop_per_s")]
_Seconds = Annotated[float, _in("s")]
_Mac = Annotated[str, Strict(), StringConstraints(pattern=r"^[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}$")]
_Watts = Annotated[float, _in("W")]
_Bytes = Annotated[int, _in("bytes", whole=True)]


def _plain_name(name: str, owner: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        rule = "a name is 1 to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit"
        raise InputError(f"name = {shown(name)} of {owner}: {rule}; rename it")


def _in_range(owner: str, row: object, *names: str, least: float = LEAST, most: float = MOST) -> None:
    for name in names:
        value = getattr(row, name)
        if value is not None and not least <= value <= most:
            rule = f"must be a finite number, at least {least:g} and at most {most:g}"
            raise InputError(f"{name} = {shown(value)} of {owner}: {rule}; correct it")


@dataclass(frozen=True)
class Nic:
    """The network interface of a host, shared by all its transfers in one direction, with its one-way latency."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    send_bytes_per_s: _BytesPerS
    receive_bytes_per_s: _BytesPerS
    latency_s: _Seconds

    def __post_init__(self) -> None:
        _in_range("a NIC", self, "send_bytes_per_s", "receive_bytes_per_s")
        _in_range("a NIC", self, "latency_s", least=0, most=MAX_LATENCY_S)


#: Assumed between devices of one host if no link was measured: round numbers for memory and loopback.
WITHIN_HOST = Nic(send_bytes_per_s=2e9, receive_bytes_per_s=2e9, latency_s=2e-5)


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        address: a host name, an IP address, or a Host of ~/.ssh/config.
        card: its NIC; None: the fleet's `network`.
        python: path of the host's Python with Convoy; None: the same path as here.
        folder: working folder of commands, relative to the user's home; None: the same path as the current folder.
        mac: hardware address of its NIC, to wake it (Wake-on-LAN).
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    name: Text
    address: Text | None = None
    card: Nic | None = None
    user: Text | None = None
    ssh_port: _Whole | None = None
    python: Text | None = None
    folder: Text | None = None
    mac: _Mac | None = None

    def __post_init__(self) -> None:
        _plain_name(self.name, "a host")
        owner = f"host {self.name!r}"
        for field in ("address", "user"):
            word = getattr(self, field)
            # A leading dash would make it an option of ssh.
            if word is not None and not re.fullmatch(r"(?!-)[!-~]+", word):
                raise InputError(
                    f"{field} = {shown(word)} of {owner}: it must not contain blanks or start with a dash; correct it"
                )
        _in_range(owner, self, "ssh_port", least=1, most=65535)
        for field in ("python", "folder"):
            path = getattr(self, field)
            if path is not None and not (path and path.isprintable()):
                raise InputError(f"{field} = {shown(path)} of {owner}: give a path, or leave the line out")


@dataclass(frozen=True)
class Device:
    """A compute device, used by one process.

    Attributes:
        host: name of its host.
        kind: its device type in torch, such as those in `KINDS`.
        cores: processor cores that it may use: a quota in emulation, otherwise threads. None: no limit.
        slowdown: factor by which its process slows it down (1: not at all).
        memory_bytes: memory that plans may use.
        peak_flop_per_s, memory_bytes_per_s: float32 peak and memory bandwidth, for devices that were not measured.
        class_name: its class in the catalogue, which supplies missing figures; the key is `class` in a file.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    name: Text
    host: Text
    kind: Text
    cores: _Number | None = None
    slowdown: _Number = 1.0
    memory_bytes: _Bytes | None = None
    peak_flop_per_s: _FlopPerS | None = None
    memory_bytes_per_s: _BytesPerS | None = None
    idle_w: _Watts | None = None
    busy_w: _Watts | None = None
    class_name: Text | None = None

    def __post_init__(self) -> None:
        _plain_name(self.name, "a device")
        owner = f"device {self.name!r}"
        plain = re.fullmatch("[a-z]{2,16}", self.kind) is not None
        if self.kind not in KINDS and (not plain or get_close_matches(self.kind, KINDS)):
            raise InputError(f"kind = {shown(self.kind)} of {owner}: {unknown_name('kind', self.kind, KINDS)}")
        _in_range(owner, self, "cores", "memory_bytes", "peak_flop_per_s", "memory_bytes_per_s")
        _in_range(owner, self, "slowdown", least=1, most=MAX_SLOWDOWN)
        _in_range(owner, self, "idle_w", least=0)
        _in_range(owner, self, "busy_w", least=self.idle_w or 0)

    @classmethod
    def of_class(cls, known: DeviceClass, name: str, host: str) -> Self:
        """Return a device with the figures of its class."""
        return cls(name=name, host=host, kind=known.kind, class_name=known.name, **_figures(known))


@dataclass(frozen=True)
class Link:
    """The path from one host to another, when no other message uses it. Source and target may be the same host."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    source: Text
    target: Text
    bandwidth_bytes_per_s: _BytesPerS
    latency_s: _Seconds

    def __post_init__(self) -> None:
        owner = f"the link {shown(self.source)} to {shown(self.target)}"
        _in_range(owner, self, "bandwidth_bytes_per_s")
        _in_range(owner, self, "latency_s", least=0, most=MAX_LATENCY_S)


@dataclass(frozen=True)
class NetworkSegment:
    """Hosts on one switch, and the cable that connects this switch to all other hosts.

    Attributes:
        hosts: their names. Hosts in no segment are on the central switch, which connects the segments.
        uplink: rates out of the segment and into it, shared by all messages that cross it, and its additional latency.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    name: Text
    hosts: tuple[Text, ...]
    uplink: Nic

    def __post_init__(self) -> None:
        _plain_name(self.name, "a segment")
        if not self.hosts:
            raise InputError(f"segment {self.name!r} has no hosts: name at least one, or remove the section")


@dataclass(frozen=True)
class Fleet:
    """Devices, hosts and the network between them. The order of the devices is their index in plans and shares.

    Attributes:
        network: the NIC of every host without a `card`; None if all have one.
        links: measured paths between hosts; other paths are computed from the NICs.
        segments: groups of hosts that share a cable to all others; empty if all hosts are on one switch.
    """

    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    network: Nic | None = None
    links: tuple[Link, ...] = ()
    segments: tuple[NetworkSegment, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError("0 devices: a fleet has at least one; add a [[device]] section")
        _unique("host", [host.name for host in self.hosts])
        _unique("device", [device.name for device in self.devices])
        _unique("link", [f"{link.source} to {link.target}" for link in self.links])
        _unique("segment", [segment.name for segment in self.segments])
        _check_hosts(self)

    @classmethod
    def from_toml(cls, text: str, source: str = "fleet.toml") -> "Fleet":
        """Parse a fleet file. InputError names `source` and the field, such as `device[2].cores`."""
        return cls.from_sections(parse_toml(text, source), source)

    @classmethod
    def from_sections(cls, sections: Mapping[str, Any], source: str) -> "Fleet":
        """Read the sections of a parsed file."""
        # `convoy.simulate.table` reads the section of `convoy measure`.
        own = {name: value for name, value in sections.items() if name != "measured"}
        if isinstance(rows := own.get("device"), list):
            own["device"] = [_device_as_now(row, f"device[{index}]") for index, row in enumerate(rows)]
        try:
            file = _FILE.validate_python(own)
            return cls(file.host, file.device, file.network, file.link, file.segment)
        except ValidationError as error:
            remedy = "write such a value, or leave out the line if it may be absent"
            lines = [explain(each, _File, _SECTIONS, remedy) for each in error.errors()]
            raise InputError(first_of(lines, source)) from error
        except InputError as error:
            raise InputError(f"{source}: {error}") from error

    def to_toml(self) -> str:
        """Return the text of this fleet's file."""
        document = tomlkit.document()
        if self.network is not None:
            document.add("network", _table(self.network))
        sections: Mapping[str, Sequence[Host | NetworkSegment | Device | Link]]
        sections = {"host": self.hosts, "segment": self.segments, "device": self.devices, "link": self.links}
        for section, values in sections.items():
            if values:
                tables = tomlkit.aot()
                for value in values:
                    tables.append(_table(value))
                document.add(section, tables)
        return tomlkit.dumps(document)

    def nic(self, host: str) -> Nic:
        """Return the NIC of a host: its own, or the fleet's. InputError if the host is unknown or has none."""
        nic = self._host(host).card or self.network
        if nic is None:
            raise InputError(f"host {host!r} has no NIC: add a [network] section or a `card` to the host")
        return nic

    def path(self, source: str, target: str) -> Link:
        """Return the measured path between two hosts. If it was not measured, its rate is the lowest of NICs and uplinks,
        and its latency the higher one of both NICs plus those of the uplinks."""
        self._host(source), self._host(target)
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        sender, receiver = (WITHIN_HOST,) * 2 if source == target else (self.nic(source), self.nic(target))
        out, into = self.uplinks(source, target)
        rates = [each.send_bytes_per_s for each in (sender, *out)]
        rates += [each.receive_bytes_per_s for each in (receiver, *into)]
        late_s = max(sender.latency_s, receiver.latency_s) + sum(uplink.latency_s for uplink in (*out, *into))
        return Link(source, target, bandwidth_bytes_per_s=min(rates), latency_s=late_s)

    def uplinks(self, source: str, target: str) -> tuple[tuple[Nic, ...], tuple[Nic, ...]]:
        """Return the uplinks that messages cross: those out of the source's segment, and those into the target's."""
        sender, receiver = self.segment_of(source), self.segment_of(target)
        if sender == receiver:
            return (), ()
        return (sender.uplink,) if sender else (), (receiver.uplink,) if receiver else ()

    def segment_of(self, host: str) -> NetworkSegment | None:
        return next((segment for segment in self.segments if host in segment.hosts), None)

    def with_only(self, devices: Collection[int]) -> "Fleet":
        """Return this fleet with only the devices of these indices, without unused hosts and links."""
        kept = tuple(device for index, device in enumerate(self.devices) if index in devices)
        used = {device.host for device in kept}
        hosts = tuple(host for host in self.hosts if host.name in used)
        links = tuple(link for link in self.links if {link.source, link.target} <= used)
        parts = [(segment, tuple(host for host in segment.hosts if host in used)) for segment in self.segments]
        segments = tuple(replace(segment, hosts=left) for segment, left in parts if left)
        return replace(self, hosts=hosts, devices=kept, links=links, segments=segments)

    def devices_on(self, host: str) -> tuple[int, ...]:
        """Return the indices of the devices of a host, in order."""
        return tuple(index for index, device in enumerate(self.devices) if device.host == self._host(host).name)

    def _host(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise unknown_name("host", name, (host.name for host in self.hosts))


def read_fleet(path: Path) -> Fleet:
    return Fleet.from_toml(read_text(path, "the fleet", "give the path of a TOML file"), source=str(path))


def _figures(known: DeviceClass) -> dict[str, Any]:
    """Return the figures of a class as fields of `Device`."""
    names = ("peak_flop_per_s", "memory_bytes_per_s", "idle_w", "busy_w")
    return {"memory_bytes": int(known.memory_bytes.value), **{name: getattr(known, name).value for name in names}}


def _device_as_now(row: Any, place: str) -> Any:
    """Return a device's section with the figures of its class added."""
    if not isinstance(row, dict):
        return row
    name, row = row.get("class"), {key: value for key, value in row.items() if key != "class"}
    if not isinstance(name, str):
        return row if name is None else row | {"class_name": name}
    try:
        known = device_class(name)
    except InputError as error:
        raise InputError(f"{place}.class: {error}") from None
    cores = row.get("cores")
    if isinstance(cores, int | float) and cores > 0:
        known = known.with_cores(cores)
    return {"kind": known.kind, **_figures(known), **row, "class_name": known.name}


@dataclass(frozen=True)
class _File:
    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    host: tuple[Host, ...]
    device: tuple[Device, ...]
    network: Nic | None = None
    link: tuple[Link, ...] = ()
    segment: tuple[NetworkSegment, ...] = ()


_FILE = TypeAdapter(_File)
_SECTIONS: Mapping[str, type[Any]] = {
    "host": Host, "device": Device, "network": Nic, "card": Nic, "link": Link, "segment": NetworkSegment, "uplink": Nic,
}  # fmt: skip


def first_of(lines: Sequence[str], source: str) -> str:
    """Join the first `MOST_LINES` errors of a file, one per line, and add the number of further ones."""
    more = [f"and {len(lines) - MOST_LINES} more like these"] * (len(lines) > MOST_LINES)
    return "\n".join(f"{source}: {line}" for line in [*lines[:MOST_LINES], *more])


def explain(
    error: ErrorDetails, top: type[Any], sections: Mapping[str, type[Any]], remedy: str, prefix: str = ""
) -> str:
    """Return a line for one pydantic error in a file of class `top`, with `sections`: path, value, rule, remedy."""
    place = prefix + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error["type"] == "value_error":  # our own checks name the field, the rule and the remedy
        return f"{place}.{error['ctx']['error']}" if error["loc"] else str(error["ctx"]["error"])
    parents = [part for part in error["loc"][:-1] if isinstance(part, str)]
    known = ", ".join(_key(field.name) for field in fields(sections[parents[-1]] if parents else top))
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):  # the name differs between versions
        return f"{place} = {shown(error['input'])}: unknown key; the keys known here are {known}"
    if error["type"] == "missing":
        return f"{place} is missing: add it; the keys known here are {known}"
    return f"{place} = {shown(error['input'])}: {error['msg']}; {remedy}"


def _key(field: str) -> str:
    return "class" if field == "class_name" else field


def _table(value: Nic | Host | NetworkSegment | Device | Link) -> tomlkit.items.Table:
    table = tomlkit.table()
    for field in fields(value):
        content = getattr(value, field.name)
        if isinstance(content, Nic):
            inline = tomlkit.inline_table()
            inline.update({each.name: getattr(content, each.name) for each in fields(content)})
            table.add(field.name, inline)
        elif field.default is MISSING or content != field.default:
            table.add(_key(field.name), content)
    return table


def _unique(section: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InputError(f"{section}[{index}] {name!r} exists twice: each {section} needs its own name; rename one")


def _check_hosts(fleet: Fleet) -> None:
    names = [host.name for host in fleet.hosts]
    used = {
        **{f"device[{n}].host": device.host for n, device in enumerate(fleet.devices)},
        **{f"link[{n}].source": link.source for n, link in enumerate(fleet.links)},
        **{f"link[{n}].target": link.target for n, link in enumerate(fleet.links)},
        **{f"segment[{n}].hosts[{k}]": h for n, each in enumerate(fleet.segments) for k, h in enumerate(each.hosts)},
    }
    for place, name in used.items():
        if name not in names:
            raise InputError(f"{place}: {unknown_name('host', name, names)}, or add a [[host]]")
    of_segment: dict[str, int] = {}
    for index, segment in enumerate(fleet.segments):
        for name in segment.hosts:
            if name in of_segment:
                where = f"segment[{index}].hosts: {name!r} is also in segment[{of_segment[name]}]"
                raise InputError(f"{where}: a host is in at most one segment; remove it from one")
            of_segment[name] = index
    with_device = {device.host for device in fleet.devices}
    for index, host in enumerate(fleet.hosts):
        if host.name not in with_device:
            raise InputError(f"host[{index}] {host.name!r} has no device: add a [[device]] to it, or remove the host")
        if len(fleet.hosts) > 1 and fleet.network is None and host.card is None:
            rule = f"with {len(fleet.hosts)} hosts each needs one; add a [network] section, or a `card` here"
            raise InputError(f"host[{index}] {host.name!r} has no NIC: {rule}")
