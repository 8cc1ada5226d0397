"""Hosts as network namespaces, joined by a bridge that has a namespace of its own.

::

    <run>-<host>          eth0 10.77.0.1/24 ──┐ veth
    <run>-<other host>    eth0 10.77.0.2/24 ──┤
    <run>-_switch                             port1, port2, ... on bridge br0

The machine's own namespace gets no card, no address and no route, so that runs side by side may use the same addresses.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from convoy.emulate.names import RunName
from convoy.emulate.programs import call
from convoy.errors import InputError

NIC = "eth0"
_BRIDGE = "br0"
_NETWORK = "10.77.0"
_MOST_HOSTS = 254


@dataclass(frozen=True)
class Port:
    """One host on the switch.

    Attributes:
        host: its name in the fleet.
        namespace: its network namespace, which holds the card `NIC`.
        address: its IPv4 address.
        plug: the switch's end of the cable, in the switch's namespace.
    """

    host: str
    namespace: str
    address: str
    plug: str


@dataclass(frozen=True)
class Wiring:
    """The switch's namespace and its ports, in the order of the hosts."""

    switch: str
    ports: tuple[Port, ...]

    def port(self, host: str) -> Port:
        return next(port for port in self.ports if port.host == host)


def wire(run: RunName, hosts: Sequence[str]) -> Wiring:
    """Who gets which namespace and address. InputError for more hosts than a /24 has addresses."""
    if len(hosts) > _MOST_HOSTS:
        raise InputError(f"{len(hosts)} hosts: a rehearsal has addresses for {_MOST_HOSTS}; rehearse a smaller fleet")
    ports = (Port(host, run.of(host), f"{_NETWORK}.{n}", f"port{n}") for n, host in enumerate(hosts, start=1))
    return Wiring(switch=run.of("_switch"), ports=tuple(ports))  # no host's name starts with an underscore


@contextmanager
def network(wiring: Wiring) -> Iterator[None]:
    """The namespaces, the bridge and the cables, up and running, for as long as the context lasts."""
    with ExitStack() as stack:
        for namespace in (wiring.switch, *(port.namespace for port in wiring.ports)):
            call("ip", "netns", "add", namespace)
            stack.callback(delete, namespace)
        _in(wiring.switch, "link", "add", _BRIDGE, "type", "bridge")
        _up(wiring.switch, _BRIDGE)
        for port in wiring.ports:
            _plug_in(wiring.switch, port)
        yield


def namespaces() -> list[str]:
    """The names of all network namespaces that have one."""
    listed = call("ip", "-json", "netns", "list")
    return [entry["name"] for entry in json.loads(listed)] if listed.strip() else []


def delete(namespace: str) -> None:
    """Remove a namespace; its cards and cables go with it. Nothing happens if it is gone already."""
    try:
        call("ip", "netns", "delete", namespace)
    except InputError:
        if namespace in namespaces():
            raise


def _plug_in(switch: str, port: Port) -> None:
    _in(switch, "link", "add", port.plug, "type", "veth", "peer", "name", NIC, "netns", port.namespace)
    _in(switch, "link", "set", port.plug, "master", _BRIDGE)
    _in(port.namespace, "address", "add", f"{port.address}/24", "dev", NIC)
    _in(port.namespace, "link", "set", "lo", "up")
    _up(port.namespace, NIC)
    _up(switch, port.plug)


def _up(namespace: str, card: str) -> None:
    # Without a link-local address: libraries that look at a card's addresses find one, and it is IPv4.
    _in(namespace, "link", "set", card, "addrgenmode", "none")
    _in(namespace, "link", "set", card, "up")


def _in(namespace: str, *arguments: str) -> None:
    call("ip", "-netns", namespace, *arguments)
