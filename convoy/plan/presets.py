"""Build plans by name: those of earlier publications, and those that experts use.

`data`           PyTorch's DistributedDataParallel: the batch in even shares.
`data-by-speed`  the batch in shares by measured speed, as experts tune them by hand.
`sharded`        as `data-by-speed`, with weights and optimizer state sharded by speed (ZeRO and FSDP use even shards).
`master`         Marques, Falcao, Alexandre 2018: only convolutions are distributed, filters by measured speed; everything else
                 runs on the fastest device.
`model`          model parallelism of Castello et al. 2021: every weighted layer by filter, evenly.
`spatial`        images split along their first axis by speed, as far as convolutions and pooling allow; the rest by batch.
`hybrid`         Jin et al. 2018, Krizhevsky 2014: convolutions by batch, fully connected layers by filter, butterfly sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from convoy.errors import PlanError, unknown_name
from convoy.layout.collectives import SUMS, Reduce
from convoy.layout.shares import apportion, even
from convoy.model.graph import Graph, Layer
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Filter, One, Sharding, Spatial, Strategy, can_shard

AUTO = "auto"
"""Name of the planner's plan. It needs measured times, so `PLANS` does not contain it."""

PLANS = ("data", "data-by-speed", "sharded", "master", "model", "hybrid", "spatial")

SHARE_UNITS = 1000
"""Sum of the proportions of a sharding or of a spatial split."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of all devices; larger is faster.

    Attributes:
        devices: samples/s of each device on the whole model.
        layers: by name of a measured layer, samples/s of each device on that layer.
        measured: whether these are measured speeds; False: only their proportions have a meaning.
    """

    devices: tuple[float, ...]
    layers: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    measured: bool = field(default=True, compare=False)

    @property
    def fastest(self) -> int:
        return self.devices.index(max(self.devices))


def named_plan(name: str, graph: Graph, batch: int, speeds: Speeds, reduce: Reduce | None = None) -> Plan:
    """Return one of `PLANS` for a global batch of `batch` samples.

    Args:
        speeds: speeds of the devices; plans with even shares use only the number of devices.
        reduce: algorithm that sums gradients; default: butterfly for `hybrid`, ring for the others.

    Raises:
        InputError: unknown name or reduce.
        PlanError: a batch below 1.
    """
    if name not in PLANS:
        raise unknown_name("plan", name, PLANS)
    if reduce is not None and reduce not in SUMS:
        raise unknown_name("reduce", reduce, SUMS)
    if batch < 1:
        raise PlanError(f"a batch of {batch}: a batch has at least one sample; give --batch 1 or more")
    by_speed = Batch(apportion(batch, speeds.devices))
    otherwise: Batch | One = Batch(even(batch, len(speeds.devices))) if name in ("data", "model") else by_speed
    layers: dict[str, Strategy] = {}
    if name == "master":
        otherwise = One(speeds.fastest)
    for layer in graph.layers.values():
        if name == "master" and layer.weighted and layer.kind != "linear" and not layer.shared:
            layers[layer.name] = _by_filter(layer, speeds)
        elif name == "master" and layer.kind not in ("input", "parameter", "pick") and layer.batched:
            layers[layer.name] = otherwise
        elif name == "model" and layer.weighted and not layer.shared:
            layers[layer.name] = _by_filter(layer, Speeds((1.0,) * len(speeds.devices)))
        elif name == "spatial" and layer.windows and layer.weighted:
            layers[layer.name] = Spatial(apportion(SHARE_UNITS, speeds.devices))
        elif name == "hybrid" and layer.weighted:
            splits = layer.kind == "linear" and not layer.shared
            layers[layer.name] = _by_filter(layer, speeds) if splits else by_speed
    sum_: Reduce = reduce or ("butterfly" if name == "hybrid" else "ring")
    sharded: dict[str, Sharding] = {}
    if name == "sharded" and len(speeds.devices) > 1:
        how = Sharding(apportion(SHARE_UNITS, speeds.devices))
        sharded = {layer.name: how for layer in graph.layers.values() if can_shard(layer)}
    plan = Plan(name, graph.fingerprint, len(speeds.devices), batch, layers, otherwise, sum_, sharded=sharded)
    plan.check(graph)
    return plan


def _by_filter(layer: Layer, speeds: Speeds) -> Filter:
    """Split K filters by speed: K_i = K * s_i / sum(s), in whole groups of filters."""
    quantum = layer.channels_out // layer.groups if layer.groups > 1 else 1
    return Filter(apportion(layer.channels_out, speeds.layers.get(layer.name, speeds.devices), quantum=quantum))
