"""Defines the planner's input (`PlanRequest`) and its options."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self, TypedDict

from convoy.errors import PlanError
from convoy.layout.collectives import Reduce
from convoy.layout.comm_dtype import CommDtype
from convoy.model.graph import Graph
from convoy.plan.device_program import whole_size
from convoy.plan.lower import trains
from convoy.plan.plan import OutputPlace, Plan
from convoy.plan.presets import AUTO, Speeds, named_plan
from convoy.plan.steps import Phase
from convoy.planner.knowledge import FleetKnowledge
from convoy.simulate.costs import Costs
from convoy.simulate.memory import MemoryLimits, optimizer_named


class PlanOptions(TypedDict, total=False):
    """Keyword arguments of `make_plan` and `prepare`.

    Attributes:
        speeds: one number per device; None: first every device times the model's layers, which takes seconds.
        reduce: "ring", "butterfly", "direct" or "star"; None: the plan's default.
        wire: "exact" (or None), or "inexact-bf16": activations and gradients are sent as bfloat16, in half the bytes.
        outputs: "everywhere" (default; None: the plan's own): the model returns all outputs on every device;
            "where-computed": each device returns the outputs of its samples, for `convoy.loss`, and sends none.
        precision: number format of the layers, as for `distribute`, also used for timing.
        slowdown: emulate a device that is slower by this factor.
        budget_s: for "auto", the approximate seconds for measuring.
        fleet: for "auto", a file written by `convoy measure` for this model, used instead of measuring. Only device 0 reads it.
    """

    speeds: Sequence[float] | None
    reduce: Reduce | None
    wire: CommDtype | None
    outputs: OutputPlace | None
    precision: str
    slowdown: float
    budget_s: float
    fleet: Path | None


@dataclass(frozen=True)  # without slots, because properties are cached
class PlanRequest:
    """A model and a batch to plan for, the known devices, and the options of all plans.

    Attributes:
        batch: samples of a micro-batch, over all devices.
        name: the requested plan: "auto" or one of `PLANS`; None for a plan given by the user.
        optimizer: one of `convoy.simulate.memory.OPTIMIZERS`.
        wire: number format of messages.
        reduce: how gradients are summed; None: each named plan's default, or the planner's choice.
        outputs: where the model's outputs are returned.
        micro_batches: micro-batches per step. The last one updates the weights; predictions are means over all.

    Raises:
        InputError: the optimizer is unknown.
    """

    graph: Graph
    batch: int
    fleet: FleetKnowledge
    name: str | None = AUTO
    optimizer: str = "sgd-momentum"
    wire: CommDtype = "exact"
    reduce: Reduce | None = None
    outputs: OutputPlace = "everywhere"
    micro_batches: int = 1

    def __post_init__(self) -> None:
        optimizer_named(self.optimizer)

    @cached_property
    def costs(self) -> Costs:
        return self.fleet.costs(self.graph, self.optimizer)

    @cached_property
    def names(self) -> tuple[str, ...]:
        fleet = self.fleet.fleet
        if fleet is None:
            return tuple(f"device {d}" for d in range(len(self.costs.network.host)))
        return tuple(device.name for device in fleet.devices)

    @cached_property
    def limits(self) -> MemoryLimits:
        if self.fleet.fleet is None:
            return MemoryLimits((None,) * len(self.names), self.names, self.costs.process_bytes)
        return MemoryLimits.of(self.fleet.fleet, self.costs.process_bytes)

    @cached_property
    def speeds(self) -> Speeds:
        """Predicted samples/s of each device training alone with the global batch."""
        known: dict[object, float] = {}
        result = []
        for device in range(len(self.costs.network.host)):
            key = (self.costs.times.alike(device), self.costs.update_s(device), self.costs.overhead(device))
            if key not in known:
                known[key] = self.batch / (self.alone_s(device) or 1.0)  # a model that runs live has no layers
            result.append(known[key])
        return Speeds(tuple(result))

    def alone_s(self, device: int) -> float:
        """Return the seconds of a micro-batch on one device alone, where all layers form one segment."""
        graph, costs, trained_layers = self.graph, self.costs, trains(self.graph)
        trained = {p.key: p.entries for layer in graph.layers.values() for p in layer.trainable}
        overhead = costs.overhead(device)
        device_s = sum(trained.values()) * costs.update_s(device) / self.micro_batches
        host_s = overhead.layer_s + len(trained) * overhead.update_s_per_tensor / self.micro_batches + overhead.step_s
        for layer in (each for each in graph.layers.values() if each.kind != "input"):
            phases: tuple[Phase, ...] = ("forward", "backward") if layer.name in trained_layers else ("forward",)
            size = whole_size(layer, self.batch)
            device_s += sum(costs.times.seconds(device, layer, phase, size) for phase in phases)
            host_s += len(phases) * overhead.queue_s
        ends = [graph[name] for name in graph.outputs if name in trained_layers and graph[name].batched]
        device_s += overhead.loss_s([self.batch * math.prod(e.shape) for e in ends], costs.itemsize, self.batch)
        return overhead.joined_s(device_s, host_s)

    def named(self, name: str) -> Plan:
        """Return a plan by name, with the request's options."""
        plan = named_plan(name, self.graph, self.batch, self.speeds, self.reduce)
        return replace(plan, wire=self.wire, outputs=self.outputs)

    def split(self, count: int) -> Self:
        """Return the request for one of `count` equal parts of the batch.

        Raises:
            PlanError: the batch cannot be divided equally.
        """
        if count < 1 or self.batch % count:
            raise PlanError(
                f"a step of {self.batch} samples in {count} micro-batches: they must be equal; give a number that divides "
                f"{self.batch}"
            )
        fleet = replace(self.fleet, given=self.costs)  # read a measurement's tables only once
        return replace(self, fleet=fleet, batch=self.batch // count, micro_batches=self.micro_batches * count)
