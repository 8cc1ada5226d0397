"""The plans by name: each of the works Convoy grew from, and what an expert does by hand, as a plan.

`data`           PyTorch's DistributedDataParallel: the batch in even shares.
`data-by-speed`  the batch in shares by measured speed: what is tuned by hand today.
`master`         Marques, Falcao, Alexandre 2018: only convolutions are distributed, filters by measured speed;
                 everything else on one device, the fastest.
`model`          model parallelism as Castello et al. 2021 study it: every weighted layer by filter, evenly.
`sharded`        as `data-by-speed`, with weights and optimizer state in shares by speed (ZeRO and FSDP keep even ones).
`hybrid`         Jin et al. 2018, Krizhevsky 2014: convolutions by batch, fully connected layers by filter, butterfly sums.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from convoy.errors import PlanError, unknown_name
from convoy.layout.redistribute import SUMS, Sum
from convoy.layout.shares import Shares, apportion, even
from convoy.model.graph import Graph, Layer
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Filter, One, Sharding, Strategy, can_shard


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds, the larger the faster.

    Attributes:
        devices: samples/s of each device on the whole model.
        layers: samples/s of each device on one layer, by layer name, where measured.
        measured: False: only their proportions count.
    """

    devices: tuple[float, ...]
    layers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    measured: bool = field(default=True, compare=False)

    def of(self, layer: Layer) -> tuple[float, ...]:
        return self.layers.get(layer.name, self.devices)

    @property
    def fastest(self) -> int:
        return self.devices.index(max(self.devices))


def named_plan(name: str, graph: Graph, batch: int, speeds: Speeds, reduce: Sum | None = None) -> Plan:
    """One of the plans by name.

    Args:
        name: one of `PLANS`.
        batch: global batch, in samples.
        speeds: of each device; even shares take only their number.
        reduce: how sums are made; default: butterfly for `hybrid`, ring for the others.

    Raises:
        InputError: unknown name or reduce; the choices are listed.
        PlanError: a batch below 1.
    """
    if name not in PLANS:
        raise unknown_name("plan", name, PLANS)
    if reduce is not None and reduce not in SUMS:
        raise unknown_name("reduce", reduce, SUMS)
    if batch < 1:
        raise PlanError(f"a batch of {batch}: a batch holds one sample at least; give --batch 1 or more")
    layers, otherwise = PLANS[name](graph, batch, speeds)
    default: Sum = "butterfly" if name == "hybrid" else "ring"
    plan = Plan(name, graph.fingerprint, len(speeds.devices), batch, layers, otherwise, reduce or default)
    if name == "sharded" and len(speeds.devices) > 1 and not plan.mixes:
        plan = replace(plan, sharded=_in_shares(graph, speeds))
    plan.check(graph)
    return plan


SHARE_UNITS = 1000
"""Weights are shared out to a thousandth."""

_Parts = tuple[Mapping[str, Strategy], Batch | One]


def _data(_graph: Graph, batch: int, speeds: Speeds) -> _Parts:
    return {}, Batch(even(batch, len(speeds.devices)))


def _data_by_speed(_graph: Graph, batch: int, speeds: Speeds) -> _Parts:
    return {}, Batch(apportion(batch, speeds.devices))


def _in_shares(graph: Graph, speeds: Speeds) -> Mapping[str, Sharding]:
    how = Sharding(apportion(SHARE_UNITS, speeds.devices))
    return {layer.name: how for layer in graph.layers.values() if can_shard(layer)}


def _master(graph: Graph, _batch: int, speeds: Speeds) -> _Parts:
    layers: dict[str, Strategy] = {}
    for layer in graph.layers.values():
        if layer.weighted and layer.kind != "linear" and not layer.shared:
            layers[layer.name] = Filter(_filters(layer, speeds.of(layer)))
        elif layer.kind not in ("input", "parameter", "pick") and layer.batched:
            layers[layer.name] = One(speeds.fastest)
    return layers, One(speeds.fastest)


def _model(graph: Graph, batch: int, speeds: Speeds) -> _Parts:
    count = len(speeds.devices)
    layers = {layer.name: Filter(_filters(layer, (1.0,) * count)) for layer in graph.weighted if not layer.shared}
    return layers, Batch(even(batch, count))


def _hybrid(graph: Graph, batch: int, speeds: Speeds) -> _Parts:
    by_speed = Batch(apportion(batch, speeds.devices))
    layers: dict[str, Strategy] = {}
    for layer in graph.weighted:
        if layer.kind == "linear" and not layer.shared:
            layers[layer.name] = Filter(_filters(layer, speeds.of(layer)))
        else:
            layers[layer.name] = by_speed
    return layers, by_speed


def _filters(layer: Layer, speeds: tuple[float, ...]) -> Shares:
    """K_i = K * s_i / sum(s), whole, and whole groups."""
    quantum = layer.channels_out // layer.groups if layer.groups > 1 else 1
    return apportion(layer.channels_out, speeds, quantum=quantum)


AUTO = "auto"
"""The name of the plan that the planner chooses: it needs measured times, so it is not one of `PLANS`."""

PLANS: Mapping[str, Callable[[Graph, int, Speeds], _Parts]] = {
    "data": _data,
    "data-by-speed": _data_by_speed,
    "sharded": _data_by_speed,
    "master": _master,
    "model": _model,
    "hybrid": _hybrid,
}
