"""A tighter lower bound on the step than `lower_bound.py`, for research: as expensive as planning.

It adds relaxations that count what devices wait for (`bound_wire.py`) and the share of each layer that one device has
(`bound_shares.py`).
"""

from dataclasses import replace

from convoy.layout.comm_dtype import sent_itemsize
from convoy.planner.request import PlanRequest
from lab.bound_shares import shares_s
from lab.bound_wire import Kinds, path_of, wire_s
from lab.lower_bound import MORE, MOST_HOSTS, NICS, LowerBound, lower_bound


def tight_bound(request: PlanRequest) -> LowerBound:
    """Return the largest of the bounds for one micro-batch, on average over those of a step."""
    graph, batch, costs, passes = request.graph, request.batch, request.costs, request.micro_batches
    best, hosts = lower_bound(request), costs.network.host
    path = path_of(graph, batch, costs) if costs.network.devices > 1 and len(hosts) <= MOST_HOSTS else None
    if path is None:
        return best
    kinds, itemsize = Kinds.of(graph, batch, costs, passes), sent_itemsize(request.wire, costs.itemsize)
    alone = kinds.seconds.sum(axis=0)
    single = [d for d in range(len(hosts)) if hosts.count(hosts[d]) == 1]
    for device in sorted(single, key=lambda d: (alone[kinds.of_device[d]], d))[:NICS]:
        found_s = max(
            float(bound_s(graph, batch, costs, path, kinds, device, itemsize, passes)) for bound_s in (wire_s, shares_s)
        )
        if found_s > best.step_s * (1 + MORE):
            best = replace(best, wire_s=found_s, device=device)
    return best
