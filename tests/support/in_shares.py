"""Plans with sharded parameters."""

from dataclasses import replace

from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Form, Sharding, can_shard
from tests.support.one_device import graph_of


def in_shares(plan: Plan, net: str, shares: tuple[int, ...], form: Form = "keep") -> Plan:
    """Return the plan with the parameters of every layer sharded unless its strategy forbids it."""
    free = [
        layer.name
        for layer in graph_of(net).layers.values()
        if can_shard(layer) and isinstance(plan.layers.get(layer.name, Batch(())), Batch)
    ]
    return replace(plan, sharded=dict.fromkeys(free, Sharding(shares, form)))
