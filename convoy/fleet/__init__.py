"""The machines of one job as a frozen value: devices, their hosts, the network between the hosts.

A person or a measurement writes its file (TOML); docs/reference/files.md lists all keys. `file.py` has the values and the
file, `catalogue.py` what classes of devices can do, `units.py` reads numbers with units. Starting a fleet is the room
`launch`, above the trainer; planner, costs and measurements read these values, so they are here, below them.
"""

from convoy.fleet.file import MAX_SLOWDOWN, WITHIN_HOST, Device, Fleet, Host, Link, NetworkSegment, Nic, read_fleet

__all__ = ["MAX_SLOWDOWN", "WITHIN_HOST", "Device", "Fleet", "Host", "Link", "NetworkSegment", "Nic", "read_fleet"]
