"""The transports between test processes; all must behave the same."""

import socket

import psutil
import pytest

from convoy.comm.environment import is_loopback


def _card() -> str | None:
    """Return a network interface of this machine with an IPv4 address."""
    for name, entries in psutil.net_if_addrs().items():
        addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
        if addresses and not is_loopback(addresses[0]) and psutil.net_if_stats()[name].isup:
            return name
    return None


_CARD = _card()
_NO_CARD = pytest.mark.skipif(_CARD is None, reason="this machine has no network card with an address")

ENCRYPTED = pytest.param({"GLOO_SOCKET_IFNAME": str(_CARD)}, id="encrypted", marks=_NO_CARD)
"""Doors at the address of a card: tensors go to it and back encrypted, as between machines."""

ONE_MACHINE = pytest.param({}, id="one machine")
TRUSTED = pytest.param({"CONVOY_TRUST_NETWORK": "1"}, id="trusted network")

on_each_network = pytest.mark.parametrize("network", [ONE_MACHINE, ENCRYPTED, TRUSTED])
"""Runs a test three times, its argument `network` being further variables of the processes."""

on_each_network_slowly = pytest.mark.parametrize(
    "network",
    [
        ONE_MACHINE,
        *(pytest.param(*row.values, id=row.id, marks=[*row.marks, pytest.mark.slow]) for row in (ENCRYPTED, TRUSTED)),
    ],
)
"""The same for a test that waits for limits, seconds each time, and is not about how bytes travel: one network every day."""
