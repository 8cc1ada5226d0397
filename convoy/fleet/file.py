"""A fleet as values: devices, hosts, cards, links; and its file, read and written."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import tomlkit
from pydantic import BeforeValidator, ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from convoy.errors import InputError, shown, unknown_name
from convoy.files import parse_toml, read_text
from convoy.fleet.catalogue import DeviceClass, device_class
from convoy.fleet.units import Dimension, quantity

KINDS = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "npu")
"""What torch calls devices. Others go by torch's name for them, too, unless it looks like a slip in one of these."""

_WORD = re.compile("[a-z]{2,16}")

Text = Annotated[str, Strict()]
Truth = Annotated[bool, Strict()]
_Number = Annotated[float, Strict()]
_Whole = Annotated[int, Strict()]
CLOSED = ConfigDict(extra="forbid")

LEAST, MOST = 1e-12, 1e21
"""What numbers of a fleet may be, in SI units: beyond them sums and quotients of them are no numbers."""

MAX_SLOWDOWN = 10_000.0
"""A device that is slower than this would not end its first step."""

MAX_LATENCY_S = 1e6


def _in(dimension: Dimension, *, whole: bool = False) -> BeforeValidator:
    """Reads a number with or without a unit."""

    def read(value: object) -> float | int:
        if whole and isinstance(value, int) and not isinstance(value, bool):
            return value  # as a float it would lose what is beyond 53 bits
        try:
            number = quantity(value, dimension)
        except InputError as error:
            raise PydanticCustomError("unit", "{why}", {"why": str(error)}) from None
        return int(number) if whole else number

    return BeforeValidator(read)


_BytesPerS = Annotated[float, _in("bytes_per_s")]
_FlopPerS = Annotated[float, _in("flop_per_s")]
_Seconds = Annotated[float, _in("s")]
_Watts = Annotated[float, _in("W")]
_Bytes = Annotated[int, _in("bytes", whole=True)]


def _plain_name(name: str, owner: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InputError(
            f"name = {shown(name)} of {owner}: a name is 1 to 64 letters, digits, dots, dashes and underscores, "
            "starting with a letter or digit; rename it"
        )


def _above_zero(owner: str, row: object, *names: str) -> None:
    for name in names:
        value = getattr(row, name)
        if value is not None and not LEAST <= value <= MOST:
            raise InputError(
                f"{name} = {shown(value)} of {owner}: must be a finite number above 0, from {LEAST:g} to {MOST:g}; correct it"
            )


def _at_least(least: float, owner: str, row: object, name: str, most: float = MOST) -> None:
    value = getattr(row, name)
    if value is not None and not least <= value <= most:
        raise InputError(
            f"{name} = {shown(value)} of {owner}: must be a finite number, at least {least:g} and at most {most:g}; correct it"
        )


@dataclass(frozen=True)
class Card:
    """The network card of a host: what all its transfers in one direction share.

    Attributes:
        send_bytes_per_s: bytes/s out of the host.
        receive_bytes_per_s: bytes/s into the host.
        latency_s: seconds that the first byte takes to another host, one way.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    send_bytes_per_s: _BytesPerS
    receive_bytes_per_s: _BytesPerS
    latency_s: _Seconds

    def __post_init__(self) -> None:
        _above_zero("a card", self, "send_bytes_per_s", "receive_bytes_per_s")
        _at_least(0, "a card", self, "latency_s", MAX_LATENCY_S)


#: Between two devices of one host, where no link was measured: a stated round figure for memory and loopback.
WITHIN_HOST = Card(send_bytes_per_s=2e9, receive_bytes_per_s=2e9, latency_s=2e-5)


@dataclass(frozen=True)
class Host:
    """A machine.

    Attributes:
        address: the name or number that ssh reaches it by: a host name, an IP address, or a Host of ~/.ssh/config.
        card: overrides the fleet's network.
        user, ssh_port: for ssh. None: as ssh chooses.
        python: the Python there that has Convoy. None: the path of the Python that starts the fleet.
        folder: where commands run there; one without a leading / begins at the user's home. None: the folder in which the
            fleet is started.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    name: Text
    address: Text | None = None
    card: Card | None = None
    user: Text | None = None
    ssh_port: _Whole | None = None
    python: Text | None = None
    folder: Text | None = None

    def __post_init__(self) -> None:
        _plain_name(self.name, "a host")
        owner = f"host {self.name!r}"
        for field, word, rule in (
            ("address", self.address, "an address is a host name or an IP address without blanks"),
            ("user", self.user, "a user's name has no blanks"),
        ):
            # What begins with a dash would be an option of ssh.
            if word is not None and not re.fullmatch(r"(?!-)[!-~]+", word):
                raise InputError(f"{field} = {shown(word)} of {owner}: {rule}; write one, or leave it out")
        if self.ssh_port is not None and not 1 <= self.ssh_port <= 65535:
            raise InputError(f"ssh_port = {shown(self.ssh_port)} of {owner}: a port is from 1 to 65535; correct it")
        for field, path in (("python", self.python), ("folder", self.folder)):
            if path is not None and not (path and path.isprintable()):
                raise InputError(f"{field} = {shown(path)} of {owner}: give a path, or leave the line out")


@dataclass(frozen=True)
class Device:
    """One compute device; one process each.

    Attributes:
        name: unique in the fleet.
        host: name of the host it sits in.
        kind: what torch calls it, such as one of `KINDS`.
        cores: processor cores it may use; a rehearsal imposes them as a quota. None: no limit.
        slowdown: how many times slower than its kind it is made to run (1: as it is).
        memory_bytes: what plans may fill.
        peak_flop_per_s, memory_bytes_per_s: float32 arithmetic and memory bandwidth at most, where nothing was measured.
        idle_w, busy_w: watts, for energy.
        class_name: of the catalogue; `class` in a file, where it gives what does not stand beside it.
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
        if self.kind not in KINDS and (not _WORD.fullmatch(self.kind) or get_close_matches(self.kind, KINDS)):
            raise InputError(f"kind = {shown(self.kind)} of {owner}: {unknown_name('kind', self.kind, KINDS)}")
        _above_zero(owner, self, "cores", "memory_bytes", "peak_flop_per_s", "memory_bytes_per_s")
        _at_least(1, owner, self, "slowdown", MAX_SLOWDOWN)
        _at_least(0, owner, self, "idle_w")
        _at_least(self.idle_w or 0, owner, self, "busy_w")

    @classmethod
    def of_class(cls, known: DeviceClass, name: str, host: str) -> Self:
        """A device with the figures of its class."""
        return cls(name=name, host=host, kind=known.kind, class_name=known.name, **_figures(known))


@dataclass(frozen=True)
class Link:
    """The way from one host to another, one direction, alone in use. Source and target may be the same host."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    source: Text
    target: Text
    bandwidth_bytes_per_s: _BytesPerS
    latency_s: _Seconds

    def __post_init__(self) -> None:
        owner = f"the link {shown(self.source)} to {shown(self.target)}"
        _above_zero(owner, self, "bandwidth_bytes_per_s")
        _at_least(0, owner, self, "latency_s", MAX_LATENCY_S)


@dataclass(frozen=True)
class Segment:
    """Hosts on one switch, and the cable that leads from it to all other hosts.

    Attributes:
        hosts: their names. A host that is in no segment sits where the cables of all segments meet.
        uplink: the cable's rates out of the segment and into it, shared by all messages that cross it, and what it adds to
            their latency.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    name: Text
    hosts: tuple[Text, ...]
    uplink: Card

    def __post_init__(self) -> None:
        _plain_name(self.name, "a segment")
        if not self.hosts:
            raise InputError(f"segment {self.name!r} has no hosts: name at least one, or remove the section")


@dataclass(frozen=True)
class Fleet:
    """Devices, hosts and the network between them.

    Attributes:
        network: the card of every host that has none of its own; may be None where no host needs it.
        links: pairs that were measured; all others follow from the cards.
        segments: hosts whose messages to all others share a cable; none where all sit on one switch.

    Raises:
        InputError: no device, a name twice, a host nobody declared, a host without a device, a host without a card, a host in
            two segments.
    """

    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    network: Card | None = None
    links: tuple[Link, ...] = ()
    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError("0 devices: a fleet has at least one; add a [[device]] section")
        _unique("host", (host.name for host in self.hosts))
        _unique("device", (device.name for device in self.devices))
        _unique("link", (f"{link.source} to {link.target}" for link in self.links))
        _unique("segment", (segment.name for segment in self.segments))
        _check_hosts(self)

    @classmethod
    def from_toml(cls, text: str, source: str = "fleet.toml") -> "Fleet":
        """The fleet of a file's text. `source` names the file in errors.

        Raises:
            InputError: not TOML, an unknown key, a value of the wrong type or out of range, sections that contradict
                each other. The message gives the path of the field, such as `device[2].cores`.
        """
        return cls.from_sections(parse_toml(text, source), source)

    @classmethod
    def from_sections(cls, sections: Mapping[str, Any], source: str) -> "Fleet":
        """The fleet of a file that has been parsed. InputError as in `from_toml`."""
        # What `convoy measure` adds for predictions is left to convoy.cost.table.
        own = {name: value for name, value in sections.items() if name != "measured"}
        try:
            file = _FILE.validate_python(_as_now(own))
            return cls(
                hosts=file.host, devices=file.device, network=file.network, links=file.link, segments=file.segment
            )
        except ValidationError as error:
            remedy = "write such a value, or leave out the line if it may be absent"
            lines = [explain(each, _File, _SECTIONS, remedy) for each in error.errors()]
            raise InputError(first_of(lines, source)) from error
        except InputError as error:
            raise InputError(f"{source}: {error}") from error

    def to_toml(self) -> str:
        """The text of this fleet's file; `Fleet.from_toml` gives an equal fleet back."""
        document = tomlkit.document()
        if self.network is not None:
            document.add("network", _table(self.network))
        sections: tuple[tuple[str, tuple[Host, ...] | tuple[Segment, ...] | tuple[Device, ...] | tuple[Link, ...]], ...]
        sections = (("host", self.hosts), ("segment", self.segments), ("device", self.devices), ("link", self.links))
        for section, values in sections:
            if values:
                tables = tomlkit.aot()
                for value in values:
                    tables.append(_table(value))
                document.add(section, tables)
        return tomlkit.dumps(document)

    def card(self, host: str) -> Card:
        """The card of a host: its own, or the fleet's. InputError if the host is unknown or has none."""
        card = self._host(host).card or self.network
        if card is None:
            raise InputError(f"host {host!r} has no card: add a [network] section or a card to the host")
        return card

    def path(self, source: str, target: str) -> Link:
        """The way from host to host: as measured, or the narrowest of the cards and uplinks, the longer latency and theirs."""
        self._host(source), self._host(target)
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        sender, receiver = (WITHIN_HOST,) * 2 if source == target else (self.card(source), self.card(target))
        out, into = self.uplinks(source, target)
        return Link(
            source,
            target,
            bandwidth_bytes_per_s=min(
                sender.send_bytes_per_s,
                *(uplink.send_bytes_per_s for uplink in out),
                *(uplink.receive_bytes_per_s for uplink in into),
                receiver.receive_bytes_per_s,
            ),
            latency_s=max(sender.latency_s, receiver.latency_s) + sum(uplink.latency_s for uplink in (*out, *into)),
        )

    def uplinks(self, source: str, target: str) -> tuple[tuple[Card, ...], tuple[Card, ...]]:
        """The uplinks that messages between two hosts cross: out of one's segment, and into the other's; none within one."""
        sender, receiver = self.segment_of(source), self.segment_of(target)
        if sender == receiver:
            return (), ()
        return tuple(s.uplink for s in (sender,) if s), tuple(s.uplink for s in (receiver,) if s)

    def segment_of(self, host: str) -> Segment | None:
        """The segment that a host is in."""
        return next((segment for segment in self.segments if host in segment.hosts), None)

    def with_only(self, devices: Collection[int]) -> "Fleet":
        """This fleet with some of its devices, by index; hosts without any are gone, and so are their links."""
        kept = tuple(device for index, device in enumerate(self.devices) if index in devices)
        used = {device.host for device in kept}
        hosts = tuple(host for host in self.hosts if host.name in used)
        segments = (
            replace(s, hosts=tuple(host for host in s.hosts if host in used))
            for s in self.segments
            if {*s.hosts} & used
        )
        return replace(
            self,
            hosts=hosts,
            devices=kept,
            links=tuple(e for e in self.links if {e.source, e.target} <= used),
            segments=tuple(segments),
        )

    def devices_on(self, host: str) -> tuple[int, ...]:
        """Indices of the devices that sit in a host, in order."""
        return tuple(index for index, device in enumerate(self.devices) if device.host == self._host(host).name)

    def _host(self, name: str) -> Host:
        for host in self.hosts:
            if host.name == name:
                return host
        raise unknown_name("host", name, (host.name for host in self.hosts))


def read_fleet(path: Path) -> Fleet:
    """The fleet in a TOML file. InputError if the file cannot be read or used; see `Fleet.from_toml`."""
    return Fleet.from_toml(read_text(path, "the fleet", "give the path of a TOML file"), source=str(path))


def _figures(known: DeviceClass) -> dict[str, Any]:
    """What a class says of a device, under the names of its fields."""
    return {
        "memory_bytes": int(known.memory_bytes.value),
        **{name: getattr(known, name).value for name in ("peak_flop_per_s", "memory_bytes_per_s", "idle_w", "busy_w")},
    }


def _as_now(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sections of a file with the keys of today, and with what the catalogue says of devices that name a class."""
    rows = sections.get("device")
    if not isinstance(rows, list):
        return sections
    now = [_device_as_now(row, f"device[{i}]") if isinstance(row, dict) else row for i, row in enumerate(rows)]
    return {**sections, "device": now}


def _device_as_now(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    # Older files have the longer name; where both stand there, the old one is an unknown key.
    if "memory_bytes_per_s" in row:
        row = dict(row)
    else:
        row = {"memory_bytes_per_s" if k == "memory_bandwidth_bytes_per_s" else k: v for k, v in row.items()}
    name = row.pop("class", None)
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
    """The sections of the file, under the names that stand in it."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    host: tuple[Host, ...]
    device: tuple[Device, ...]
    network: Card | None = None
    link: tuple[Link, ...] = ()
    segment: tuple[Segment, ...] = ()


_FILE = TypeAdapter(_File)
_SECTIONS: Mapping[str, type[Any]] = {
    "host": Host, "device": Device, "network": Card, "card": Card, "link": Link, "segment": Segment, "uplink": Card,
}  # fmt: skip


MOST_LINES = 20
"""Of what is wrong in a file so many are told."""


def first_of(lines: Sequence[str], source: str) -> str:
    """What is wrong in a file, a line for each, and how much more there is."""
    more = [f"and {len(lines) - MOST_LINES} more like these"] * (len(lines) > MOST_LINES)
    return "\n".join(f"{source}: {line}" for line in [*lines[:MOST_LINES], *more])


def explain(
    error: ErrorDetails, top: type[Any], sections: Mapping[str, type[Any]], remedy: str, prefix: str = ""
) -> str:
    """One line for one finding of pydantic in a file: path, value, rule, remedy.

    Args:
        top: the class of the whole file.
        sections: classes of its sections, by name.
    """
    place = prefix + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error["type"] == "value_error":  # our own checks name the field, the rule and the remedy
        return f"{place}.{error['ctx']['error']}" if error["loc"] else str(error["ctx"]["error"])
    parents = [part for part in error["loc"][:-1] if isinstance(part, str)]
    keys = (_key(field.name) for field in fields(sections[parents[-1]] if parents else top))
    known = ", ".join(keys)
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):  # the name differs between versions
        return f"{place} = {shown(error['input'])}: unknown key; the keys known here are {known}"
    if error["type"] == "missing":
        return f"{place} is missing: add it; the keys known here are {known}"
    return f"{place} = {shown(error['input'])}: {error['msg']}; {remedy}"


def _key(field: str) -> str:
    """How a field is called in a file."""
    return "class" if field == "class_name" else field


def _table(value: Card | Host | Segment | Device | Link) -> tomlkit.items.Table:
    table = tomlkit.table()
    for field in fields(value):
        content = getattr(value, field.name)
        if isinstance(content, Card):
            inline = tomlkit.inline_table()
            inline.update({each.name: getattr(content, each.name) for each in fields(content)})
            table.add(field.name, inline)
        elif field.default is MISSING or content != field.default:
            table.add(_key(field.name), content)
    return table


def _check_hosts(fleet: Fleet) -> None:
    names = [host.name for host in fleet.hosts]
    for index, device in enumerate(fleet.devices):
        if device.host not in names:
            raise InputError(f"device[{index}].host: {unknown_name('host', device.host, names)}, or add a [[host]]")
    for index, link in enumerate(fleet.links):
        for field, name in (("source", link.source), ("target", link.target)):
            if name not in names:
                raise InputError(f"link[{index}].{field}: {unknown_name('host', name, names)}, or add a [[host]]")
    _check_segments(fleet.segments, names)
    used = {device.host for device in fleet.devices}
    for index, host in enumerate(fleet.hosts):
        if host.name not in used:
            raise InputError(f"host[{index}] {host.name!r} has no device: add a [[device]] to it, or remove the host")
        if len(fleet.hosts) > 1 and fleet.network is None and host.card is None:
            raise InputError(
                f"host[{index}] {host.name!r} has no card: with {len(fleet.hosts)} hosts each needs one; "
                "add a [network] section for all, or a card to this host"
            )


def _check_segments(segments: Sequence[Segment], hosts: Sequence[str]) -> None:
    place: dict[str, int] = {}
    for index, segment in enumerate(segments):
        for name in segment.hosts:
            if name not in hosts:
                raise InputError(f"segment[{index}].hosts: {unknown_name('host', name, hosts)}, or add a [[host]]")
            if name in place:
                raise InputError(
                    f"segment[{index}].hosts: {name!r} is in segment[{place[name]}], too: a host is in one segment at most; "
                    "take it out of one of them"
                )
            place[name] = index


def _unique(section: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise InputError(
                f"{section}[{index}] {name!r} is there twice: each {section} has a name of its own; rename"
            )
        seen.add(name)
