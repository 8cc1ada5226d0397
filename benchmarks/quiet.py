"""How quiet the machine was: processor time that other programs took while the benchmark ran."""

import json
import os

from convoy.comm.group import Group
from convoy.measure.other_load import Reading, read_usage


def others_share(group: Group, begin: Reading) -> float:
    """The part of this machine that others took since `begin`: 0.1 is a tenth of all its cores.

    What the kernel does for the network outside of any process counts as others. All devices call it, and all must be on
    one machine.
    """
    now = read_usage()
    own_s = sum(json.loads(text) for text in group.agree("processor time", json.dumps(now.own_s - begin.own_s)))
    return share(now.busy_s - begin.busy_s, own_s, now.wall_s - begin.wall_s, os.cpu_count() or 1)


def share(busy_s: float, own_s: float, wall_s: float, cores: int) -> float:
    """What is left of the busy seconds, as a part of all seconds there were."""
    return max(0.0, busy_s - own_s) / (wall_s * cores)
