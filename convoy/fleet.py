"""The machines of one job: devices, the hosts they sit in, the network between the hosts.

A fleet is a frozen value. Its file is TOML, written by a person or by a measurement::

    [network]                          # the card of every host that names none of its own
    send_bytes_per_s = 125e6
    receive_bytes_per_s = 125e6
    latency_s = 5e-5

    [[host]]
    name = "attic"
    address = "192.168.1.20"           # optional: where ssh finds it, to start the whole fleet from one place
    user = "ann"                       # optional, like the next three; each says what holds without it: the user here
    ssh_port = 2222                    # 22, or as ~/.ssh/config says
    python = "/opt/convoy/bin/python"  # this Python, at the same path
    folder = "/home/ann/cnn"           # the folder that the command is given in, at the same path
    # card = { send_bytes_per_s = 12.5e6, receive_bytes_per_s = 12.5e6, latency_s = 2e-4 }

    [[device]]
    name = "attic-cpu"
    host = "attic"
    kind = "cpu"
    cores = 4

    [[link]]                           # optional: a pair of hosts as it was measured
    source = "attic"
    target = "cellar"
    bandwidth_bytes_per_s = 110e6
    latency_s = 8e-5

Numbers are in SI units, which the names end in. The order of the devices is their index in plans and in shares.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import tomlkit
from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from convoy.errors import InputError, unknown_name

KINDS = ("cpu", "cuda", "mps", "xpu")

Text = Annotated[str, Strict()]
Truth = Annotated[bool, Strict()]
_Number = Annotated[float, Strict()]
_Whole = Annotated[int, Strict()]
CLOSED = ConfigDict(extra="forbid")


def _plain_name(name: str, owner: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InputError(
            f"name = {name!r} of {owner}: a name is 1 to 64 letters, digits, dots, dashes and underscores, "
            "starting with a letter or digit; rename it"
        )


def _above_zero(owner: str, row: object, *names: str) -> None:
    for name in names:
        value = getattr(row, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} = {value!r} of {owner}: must be a finite number above 0; correct it")


def _at_least(least: float, owner: str, row: object, name: str) -> None:
    value = getattr(row, name)
    if value is not None and not (math.isfinite(value) and value >= least):
        raise InputError(f"{name} = {value!r} of {owner}: must be a finite number, at least {least:g}; correct it")


@dataclass(frozen=True)
class Card:
    """The network card of a host: what all its transfers in one direction share.

    Attributes:
        send_bytes_per_s: bytes/s out of the host.
        receive_bytes_per_s: bytes/s into the host.
        latency_s: seconds that the first byte takes to another host, one way.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    send_bytes_per_s: _Number
    receive_bytes_per_s: _Number
    latency_s: _Number

    def __post_init__(self) -> None:
        _above_zero("a card", self, "send_bytes_per_s", "receive_bytes_per_s")
        _at_least(0, "a card", self, "latency_s")


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
                raise InputError(f"{field} = {word!r} of {owner}: {rule}; write one, or leave it out")
        if self.ssh_port is not None and not 1 <= self.ssh_port <= 65535:
            raise InputError(f"ssh_port = {self.ssh_port} of {owner}: a port is from 1 to 65535; correct it")
        for field, path in (("python", self.python), ("folder", self.folder)):
            if path is not None and not (path and path.isprintable()):
                raise InputError(f"{field} = {path!r} of {owner}: give a path, or leave the line out")


@dataclass(frozen=True)
class Device:
    """One compute device; one process each.

    Attributes:
        name: unique in the fleet.
        host: name of the host it sits in.
        kind: one of `KINDS`.
        cores: processor cores it may use; a rehearsal imposes them as a quota. None: no limit.
        slowdown: how many times slower than its kind it is made to run (1: as it is).
        memory_bytes: what plans may fill.
        peak_flop_per_s, memory_bandwidth_bytes_per_s: the roofline, for devices that were not measured.
        idle_w, busy_w: watts, for energy.
    """

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    name: Text
    host: Text
    kind: Text
    cores: _Number | None = None
    slowdown: _Number = 1.0
    memory_bytes: _Whole | None = None
    peak_flop_per_s: _Number | None = None
    memory_bandwidth_bytes_per_s: _Number | None = None
    idle_w: _Number | None = None
    busy_w: _Number | None = None

    def __post_init__(self) -> None:
        _plain_name(self.name, "a device")
        owner = f"device {self.name!r}"
        if self.kind not in KINDS:
            raise InputError(f"kind = {self.kind!r} of {owner}: {unknown_name('kind', self.kind, KINDS)}")
        _above_zero(owner, self, "cores", "memory_bytes", "peak_flop_per_s", "memory_bandwidth_bytes_per_s")
        _at_least(1, owner, self, "slowdown")
        _at_least(0, owner, self, "idle_w")
        _at_least(self.idle_w or 0, owner, self, "busy_w")


@dataclass(frozen=True)
class Link:
    """The way from one host to another, one direction, alone in use. Source and target may be the same host."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    source: Text
    target: Text
    bandwidth_bytes_per_s: _Number
    latency_s: _Number

    def __post_init__(self) -> None:
        owner = f"the link {self.source!r} to {self.target!r}"
        _above_zero(owner, self, "bandwidth_bytes_per_s")
        _at_least(0, owner, self, "latency_s")


@dataclass(frozen=True)
class Fleet:
    """Devices, hosts and the network between them.

    Attributes:
        network: the card of every host that has none of its own; may be None where no host needs it.
        links: pairs that were measured; all others follow from the cards.

    Raises:
        InputError: no device, a name twice, a host nobody declared, a host without a device, a host without a card.
    """

    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    network: Card | None = None
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise InputError("0 devices: a fleet has at least one; add a [[device]] section")
        _unique("host", (host.name for host in self.hosts))
        _unique("device", (device.name for device in self.devices))
        _unique("link", (f"{link.source} to {link.target}" for link in self.links))
        _check_hosts(self)

    @classmethod
    def from_toml(cls, text: str, source: str = "fleet.toml") -> "Fleet":
        """The fleet of a file's text. `source` names the file in errors.

        Raises:
            InputError: not TOML, an unknown key, a value of the wrong type or out of range, sections that contradict
                each other. The message gives the path of the field, such as `device[2].cores`.
        """
        try:
            sections = tomllib.loads(text)
            sections.pop("measured", None)  # what `convoy measure` adds for predictions: see convoy.cost.table
            file = _FILE.validate_python(sections)
            return cls(hosts=file.host, devices=file.device, network=file.network, links=file.link)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{source}: not TOML: {error}; correct that line") from error
        except ValidationError as error:
            remedy = "write such a value, or leave out the line if it may be absent"
            lines = (explain(each, _File, _SECTIONS, remedy) for each in error.errors())
            raise InputError("\n".join(f"{source}: {line}" for line in lines)) from error
        except InputError as error:
            raise InputError(f"{source}: {error}") from error

    def to_toml(self) -> str:
        """The text of this fleet's file; `Fleet.from_toml` gives an equal fleet back."""
        document = tomlkit.document()
        if self.network is not None:
            document.add("network", _table(self.network))
        for section, values in (("host", self.hosts), ("device", self.devices), ("link", self.links)):
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
        """The way from host to host: as measured, or the narrower of the two cards and the longer latency."""
        self._host(source), self._host(target)
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        sender, receiver = (WITHIN_HOST,) * 2 if source == target else (self.card(source), self.card(target))
        return Link(
            source,
            target,
            bandwidth_bytes_per_s=min(sender.send_bytes_per_s, receiver.receive_bytes_per_s),
            latency_s=max(sender.latency_s, receiver.latency_s),
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
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as a fleet ({error}): give the path of a UTF-8 TOML file") from error
    return Fleet.from_toml(text, source=str(path))


@dataclass(frozen=True)
class _File:
    """The sections of the file, under the names that stand in it."""

    __pydantic_config__: ClassVar[ConfigDict] = CLOSED
    host: tuple[Host, ...]
    device: tuple[Device, ...]
    network: Card | None = None
    link: tuple[Link, ...] = ()


_FILE = TypeAdapter(_File)
_SECTIONS: Mapping[str, type[Any]] = {"host": Host, "device": Device, "network": Card, "card": Card, "link": Link}


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
    known = ", ".join(field.name for field in fields(sections[parents[-1]] if parents else top))
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):  # the name differs between versions
        return f"{place} = {error['input']!r}: unknown key; the keys known here are {known}"
    if error["type"] == "missing":
        return f"{place} is missing: add it; the keys known here are {known}"
    return f"{place} = {error['input']!r}: {error['msg']}; {remedy}"


def _table(value: Card | Host | Device | Link) -> tomlkit.items.Table:
    table = tomlkit.table()
    for field in fields(value):
        content = getattr(value, field.name)
        if isinstance(content, Card):
            inline = tomlkit.inline_table()
            inline.update({each.name: getattr(content, each.name) for each in fields(content)})
            table.add(field.name, inline)
        elif field.default is MISSING or content != field.default:
            table.add(field.name, content)
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
    used = {device.host for device in fleet.devices}
    for index, host in enumerate(fleet.hosts):
        if host.name not in used:
            raise InputError(f"host[{index}] {host.name!r} has no device: add a [[device]] to it, or remove the host")
        if len(fleet.hosts) > 1 and fleet.network is None and host.card is None:
            raise InputError(
                f"host[{index}] {host.name!r} has no card: with {len(fleet.hosts)} hosts each needs one; "
                "add a [network] section for all, or a card to this host"
            )


def _unique(section: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise InputError(
                f"{section}[{index}] {name!r} is there twice: each {section} has a name of its own; rename"
            )
        seen.add(name)
