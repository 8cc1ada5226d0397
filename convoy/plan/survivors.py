"""A plan for the devices that are left, and for those that come: the same strategies, shares in the same proportions."""

from collections.abc import Sequence
from dataclasses import replace

from convoy.layout.shares import Shares, apportion
from convoy.model.graph import Graph
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Channel, Filter, InShares, One, Strategy


def plan_for(plan: Plan, graph: Graph, devices: Sequence[int | None], speeds: Sequence[float] | None = None) -> Plan:
    """A plan by which other devices go on with what one has begun.

    Args:
        devices: of each new device its index in the old plan; None for one that is new.
        speeds: of the new devices: one that is new gets a share by it. None: it gets a mean share.

    Returns:
        a plan that fits. Where nobody is left who had a part, all get one.
    """
    kept = [i for i, old in enumerate(devices) if old is not None]
    by = (1.0,) * len(devices) if speeds is None else speeds

    def unit(old: Shares) -> float:
        """What those that are left have for each unit of their speed."""
        return sum(old[devices[i] or 0] for i in kept) / sum(by[i] for i in kept) if kept else 1.0

    def shares(old: Shares, quantum: int = 1) -> Shares:
        weights = [unit(old) * by[i] if d is None else float(old[d]) for i, d in enumerate(devices)]
        return apportion(sum(old), weights if any(weights) else [1.0] * len(devices), quantum=quantum)

    rates = shares(plan.otherwise.shares) if isinstance(plan.otherwise, Batch) else (1,) * len(devices)

    def of(name: str, strategy: Strategy) -> Strategy:
        match strategy:
            case One(device):
                return One(devices.index(device) if device in devices else rates.index(max(rates)))
            case Filter(old):
                layer = graph[name]
                grouped = layer.weighted and layer.groups > 1
                return Filter(shares(old, layer.channels_out // layer.groups if grouped else 1))
            case Channel(old):
                return Channel(shares(old))
            case Batch(old):
                return Batch(shares(old))

    otherwise = of("", plan.otherwise)
    assert isinstance(otherwise, Batch | One)
    made = replace(
        plan, devices=len(devices), otherwise=otherwise, layers={name: of(name, s) for name, s in plan.layers.items()},
        in_shares={name: InShares(shares(each.shares), each.form) for name, each in plan.in_shares.items()},
    )  # fmt: skip
    made.check(graph, len(devices))
    return made
