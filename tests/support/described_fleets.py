"""Fleets given by rates alone, and their measurements: every layer at several sizes, by a roofline."""

from collections.abc import Mapping, Sequence
from typing import Any

from convoy.fleet import Device, Fleet, Host, Nic
from convoy.model.graph import Graph
from convoy.plan.device_program import LocalSize
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.request import PlanRequest
from convoy.simulate.compute import Rate, Roofline
from convoy.simulate.costs import Costs
from convoy.simulate.table import DeviceCosts, LayerPoint, Measurement


def fleet(*rows: tuple[float, int | None], bytes_per_s: float = 125e6) -> Fleet:
    """Return a fleet of one device per host with these FLOP/s and bytes of memory."""
    devices = tuple(
        Device(
            f"d{i}", f"h{i}", "cpu", memory_bytes=memory, peak_flop_per_s=rate, memory_bytes_per_s=rate / 4,
            idle_w=1.0, busy_w=2.0,
        )
        for i, (rate, memory) in enumerate(rows)
    )  # fmt: skip
    return Fleet(tuple(Host(f"h{i}") for i in range(len(rows))), devices, Nic(bytes_per_s, bytes_per_s, 1e-4))


def measured_fleet(
    graph: Graph,
    flop_per_s: Sequence[float],
    batch: int,
    names: Sequence[str] = (),
    memory_bytes: Mapping[str, int] | None = None,
    link_bytes_per_s: float = 1e9,
) -> Measurement:
    """Return a fleet of one device per host at its rate; messages and the rest cost almost nothing.

    Args:
        names: of the devices; else d0, d1, ...
        memory_bytes: by name, where it is limited.
    """
    names = names or [f"d{i}" for i in range(len(flop_per_s))]
    rates = Roofline(tuple(Rate(each, each) for each in flop_per_s))
    points = []
    for device, name in enumerate(names):
        for layer in graph.layers.values():
            if layer.kind == "input":
                continue
            outputs, inputs = layer.extents
            sizes = {(s, o, inputs) for s in (1, batch) for o in (max(1, outputs // 4), outputs)}
            if layer.weighted and layer.groups == 1:
                sizes |= {(s, outputs, max(1, inputs // 4)) for s in (1, batch)}
            for size in sorted(sizes):
                local = LocalSize(*size)
                forward_s, backward_s = (rates.seconds(device, layer, p, local) for p in ("forward", "backward"))
                points.append(LayerPoint(name, layer.name, *size, forward_s, backward_s, 0.0))
    fleet = Fleet(
        tuple(Host(f"host-{name}") for name in names),
        tuple(Device(name, f"host-{name}", "cpu", memory_bytes=(memory_bytes or {}).get(name)) for name in names),
        Nic(link_bytes_per_s, link_bytes_per_s, 1e-6),
    )
    costs = tuple(DeviceCosts(name, 0.0, 0.0, *(1e-9,) * 9) for name in names)
    return Measurement(fleet, "net", graph.fingerprint, batch, "0", "2", "2026-11-23", costs, tuple(points))


def asked(graph: Graph, batch: int, costs: Costs, fleet: Fleet | None = None, **options: Any) -> PlanRequest:
    """Return a request for these costs; without a fleet, memory has no limits."""
    return PlanRequest(graph, batch, FleetKnowledge(fleet, given=costs), **options)
