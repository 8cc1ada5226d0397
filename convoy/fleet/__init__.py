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
    memory_bytes = "16 GB"             # numbers in SI units, or with a unit: "1 Gbit/s", "450 ms", "64 GiB"

    [[device]]
    name = "attic-gpu"
    host = "attic"
    class = "rtx3060"                  # kind, peaks, memory and watts of the catalogue, where they do not stand here

    [[link]]                           # optional: a pair of hosts as it was measured
    source = "attic"
    target = "cellar"
    bandwidth_bytes_per_s = 110e6
    latency_s = 8e-5

    [[segment]]                        # optional: hosts on a switch of their own, and the cable from there to all others
    name = "house"
    hosts = ["attic", "cellar"]
    uplink = { send_bytes_per_s = 12.5e6, receive_bytes_per_s = 12.5e6, latency_s = 5e-5 }

Numbers are in SI units, which the names end in, or texts with a unit. The order of the devices is their index in plans and in
shares.

`file.py` has these values and reads the file; `catalogue.py` has what kinds of devices can do; `units.py` reads numbers with
units.
"""

from convoy.fleet.file import MAX_SLOWDOWN, WITHIN_HOST, Card, Device, Fleet, Host, Link, Segment, read_fleet

__all__ = ["MAX_SLOWDOWN", "WITHIN_HOST", "Card", "Device", "Fleet", "Host", "Link", "Segment", "read_fleet"]
