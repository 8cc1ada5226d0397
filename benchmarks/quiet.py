"""Measure the processor time that other programs used during a benchmark."""

import json
import os

from convoy.comm.group import Group
from convoy.measure.device_info import Reading, read_usage


def others_share(group: Group, begin: Reading) -> float:
    """Return the fraction of this machine that others used since `begin`: 0.1 is a tenth of all cores.

    What the kernel does for the network outside of any process counts as others. All devices call it, and all must be on
    one machine.
    """
    now = read_usage()
    own_s = sum(json.loads(text) for text in group.agree("processor time", json.dumps(now.own_s - begin.own_s)))
    return share(now.busy_s - begin.busy_s, own_s, now.wall_s - begin.wall_s, os.cpu_count() or 1)


def share(busy_s: float, own_s: float, wall_s: float, cores: int) -> float:
    """Return the remaining busy seconds as a fraction of all seconds."""
    return max(0.0, busy_s - own_s) / (wall_s * cores)
