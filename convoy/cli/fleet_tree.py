"""Draws a fleet as a tree of text: hosts, devices, links."""

from rich.markup import escape
from rich.tree import Tree

from convoy.fleet import Device, Fleet, Host, Nic


def tree_of(fleet: Fleet) -> Tree:
    """Return the fleet as a tree for rich to print."""
    count = len(fleet.devices)
    tree = Tree(f"{count} device{'s' * (count > 1)} on {len(fleet.hosts)} host{'s' * (len(fleet.hosts) > 1)}")
    for host in fleet.hosts:
        branch = tree.add(escape(_host(fleet, host)))
        for index in fleet.devices_on(host.name):
            branch.add(escape(f"{index}: {_device(fleet.devices[index])}"))
    for segment in fleet.segments:
        tree.add(escape(f"{segment.name}: {', '.join(segment.hosts)}; to all others {_card(segment.uplink)}"))
    if fleet.links:
        links = tree.add("measured links")
        for link in fleet.links:
            speed = f"{_rate(link.bandwidth_bytes_per_s)}, {link.latency_s * 1e3:.3g} ms"
            links.add(escape(f"{link.source} to {link.target}: {speed}"))
    return tree


def _host(fleet: Fleet, host: Host) -> str:
    words = [host.name]
    if host.address is not None:
        user = "" if host.user is None else f"{host.user}@"
        port = "" if host.ssh_port is None else f":{host.ssh_port}"
        words.append(f"({user}{host.address}{port})")
    card = host.card or fleet.network
    if card is not None:
        words.append(_card(card))
    return "  ".join(words)


def _card(card: Nic) -> str:
    out, into = card.send_bytes_per_s, card.receive_bytes_per_s
    speed = _rate(out) if out == into else f"{_rate(out)} out, {_rate(into)} in"
    return f"{speed}, {card.latency_s * 1e3:.3g} ms"


def _device(device: Device) -> str:
    words = [device.name, device.kind if device.class_name is None else f"{device.class_name} ({device.kind})"]
    if device.cores is not None:
        words.append(f"{device.cores:g} cores")
    if device.memory_bytes is not None:
        words.append(f"{device.memory_bytes / 1e9:.3g} GB")
    if device.peak_flop_per_s is not None:
        words.append(f"{device.peak_flop_per_s / 1e12:.3g} TFLOP/s at most")
    if device.slowdown != 1:
        words.append(f"made {device.slowdown:g} times slower")
    return ", ".join(words)


def _rate(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
