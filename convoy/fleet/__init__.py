"""The machines of one job as a frozen value: devices, hosts, and the network between the hosts.

`file.py` has these values and reads and writes their TOML file (keys: docs/reference/files.md). `catalogue.py` has the figures
of device classes, `units.py` parses numbers with units. The package `launch` starts the devices of a fleet.
"""

from convoy.fleet.file import MAX_SLOWDOWN, WITHIN_HOST, Device, Fleet, Host, Link, NetworkSegment, Nic, read_fleet

__all__ = ["MAX_SLOWDOWN", "WITHIN_HOST", "Device", "Fleet", "Host", "Link", "NetworkSegment", "Nic", "read_fleet"]
