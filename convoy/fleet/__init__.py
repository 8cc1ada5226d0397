"""The machines of one job as a frozen value: devices, their hosts, the network between the hosts.

A person or a measurement writes its file (TOML); docs/reference/files.md lists all keys. `file.py` has the values and the
file, `catalogue.py` the figures of device classes, `units.py` reads numbers with units. The room `launch` starts fleets.
"""

from convoy.fleet.file import MAX_SLOWDOWN, WITHIN_HOST, Device, Fleet, Host, Link, NetworkSegment, Nic, read_fleet

__all__ = ["MAX_SLOWDOWN", "WITHIN_HOST", "Device", "Fleet", "Host", "Link", "NetworkSegment", "Nic", "read_fleet"]
