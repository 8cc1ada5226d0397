"""The cost of snapshots for recovery from a lost device, and how often they are worth it.

For a snapshot each device copies its shards of weights and optimizer state in memory, and all devices confirm that they have.
State that only one device holds is sent to the next one while later steps compute. A snapshot every k steps divides these costs
by k, and after a loss at most k steps are repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.layout.layout import held_entries, single
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.steps import ComputeStep, StepList
from convoy.planner.predict import PlanPrediction
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import Costs
from convoy.simulate.memory import optimizer_named

MOST_PART = 0.02
"""Snapshots may take this fraction of the time of a step."""

MOST_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class SparePrice:
    """What snapshots cost.

    Attributes:
        every: steps from one snapshot to the next.
        part: the fraction by which steps are longer, on average.
        sent_bytes: per step on average, over all devices.
        memory_bytes: by device.
        overfull: devices without room for snapshots beside the plan, in words.
    """

    every: int
    part: float
    sent_bytes: int
    memory_bytes: tuple[int, ...]
    overfull: tuple[str, ...] = ()


def spare_price(row: PlanPrediction, request: PlanRequest, every: int | None = None) -> SparePrice:
    """Return the cost of snapshots for a predicted plan.

    Args:
        every: steps from one snapshot to the next; None: as few as cost at most `MOST_PART`.
    """
    if len(request.names) == 1:
        return SparePrice(1, 0.0, 0, (0,))  # no other device could continue
    steps = lower(row.plan, request.graph)
    state = kept_bytes(steps, request.graph, request.room.optimizer, request.costs.itemsize)
    step_s = row.step_s * request.micro_batches
    rates = [every] if every else range(1, MOST_STEPS + 1)
    parts = ((k, _kept_s(state, row, request, k, step_s) / (k * step_s)) for k in rates)
    chosen, part = next((k, part) for k, part in parts if every or part <= MOST_PART or k == MOST_STEPS)
    before = [state[d - 1][1] for d in range(len(state))]
    memory = tuple(2 * (own + copied) for (own, _), copied in zip(state, before, strict=True))
    needs = [each.total_bytes + more for each, more in zip(row.memory, memory, strict=True)]
    sent = round(sum(alone for _, alone in state) / chosen)
    return SparePrice(chosen, part, sent, memory, tuple(request.room.overfull(needs)))


def kept_bytes(steps: StepList, graph: Graph, optimizer: str, itemsize: int = 4) -> list[tuple[int, int]]:
    """Return for each device the bytes of its part of the state, and of the part that no other device holds."""
    numbers = 1 + optimizer_named(optimizer).state
    found = {}
    for step in steps.phase("forward"):
        if isinstance(step, ComputeStep):
            for name, layout in step.parameters.items():
                parameter = graph[step.layer].parameters[name]
                found[parameter.key] = (layout, parameter.shape, itemsize * (numbers if parameter.trainable else 1))
    rows = []
    for device in range(steps.devices):
        sizes = [(held_entries(layout, device, shape) * size, single(layout)) for layout, shape, size in found.values()]
        rows.append((sum(n for n, _ in sizes), sum(n for n, alone in sizes if alone)))
    return rows


def _kept_s(
    state: Sequence[tuple[int, int]], row: PlanPrediction, request: PlanRequest, every: int, step_s: float
) -> float:
    """Return the seconds that one snapshot adds to `every` steps, on the device that it delays most."""
    costs, devices = request.costs, len(state)
    longest_s = 0.0
    for device, (own, alone) in enumerate(state):
        arrives = state[device - 1][1]
        handled_s = own * costs.overhead(device).copy_s_per_byte
        handled_s += (alone + arrives) * costs.network.processor_s_per_byte[device]
        # The state is sent beside the messages of the steps, while their NIC has time for it.
        free_s = max(0.0, step_s - _card_s(row, request, device))
        waits_s = max(0.0, _travel_s(costs, device, (device + 1) % devices, alone) - every * free_s)
        longest_s = max(longest_s, handled_s + waits_s)
    told_s = max(costs.overhead(d).calls_s(2 * (devices - 1)) for d in range(devices))
    return longest_s + told_s + costs.network.largest_latency_s


def _travel_s(costs: Costs, sender: int, receiver: int, size: int) -> float:
    network = costs.network
    a, b = network.host[sender], network.host[receiver]
    rates = [network.pair_bytes_per_s[sender][receiver]]
    rates += (
        [network.within_bytes_per_s[a]] if a == b else [network.send_bytes_per_s[a], network.receive_bytes_per_s[b]]
    )
    return size / min(rates)


def _card_s(row: PlanPrediction, request: PlanRequest, device: int) -> float:
    """Return the seconds of a step in which the NIC of a device's host is busy with its messages."""
    network = request.costs.network
    own = [d for d, host in enumerate(network.host) if host == network.host[device]]
    sent, received = (sum(sizes[d] for d in own) for sizes in (row.sent_bytes, row.received_bytes))
    host = network.host[device]
    return request.micro_batches * max(
        sent / network.send_bytes_per_s[host], received / network.receive_bytes_per_s[host]
    )
