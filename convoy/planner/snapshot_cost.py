"""Computes the cost of snapshots for recovery from a lost device, and their best interval.

For a snapshot, each device copies its shards of weights and optimizer state in memory, and all devices confirm it. State
that only one device holds is sent to the next one during later steps. A snapshot every k steps divides these costs by k,
and after a lost device at most k steps are repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.layout.layout import held_entries, single
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.steps import ComputeStep, StepList
from convoy.planner.prediction import PlanPrediction
from convoy.planner.request import PlanRequest
from convoy.simulate.memory import optimizer_named

MOST_PART = 0.02
"""Snapshots may take this fraction of the time of a step."""

MOST_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class SparePrice:
    """The cost of snapshots.

    Attributes:
        every: steps from one snapshot to the next.
        part: extra time per step on average, as a fraction.
        sent_bytes: per step on average, over all devices.
        memory_bytes: by device.
        overfull: descriptions of devices whose memory does not hold plan and snapshots.
    """

    every: int
    part: float
    sent_bytes: int
    memory_bytes: tuple[int, ...]
    overfull: tuple[str, ...] = ()


def spare_price(row: PlanPrediction, request: PlanRequest, every: int | None = None) -> SparePrice:
    """Return the cost of snapshots for a predicted plan.

    Args:
        every: steps from one snapshot to the next; None: the fewest that cost at most `MOST_PART`.
    """
    if len(request.names) == 1:
        return SparePrice(1, 0.0, 0, (0,))  # no other device could continue
    state = kept_bytes(lower(row.plan, request.graph), request.graph, request.optimizer, request.costs.itemsize)
    step_s = row.step_s * request.micro_batches
    rates = [every] if every else range(1, MOST_STEPS + 1)
    parts = ((k, _snapshot_s(state, row, request, k) / (k * step_s)) for k in rates)
    chosen, part = next((k, part) for k, part in parts if every or part <= MOST_PART or k == MOST_STEPS)
    memory = tuple(2 * (own + state[d - 1][1]) for d, (own, _) in enumerate(state))
    needs = [each.total_bytes + more for each, more in zip(row.memory, memory, strict=True)]
    sent = round(sum(alone for _, alone in state) / chosen)
    return SparePrice(chosen, part, sent, memory, tuple(request.limits.overfull(needs)))


def kept_bytes(steps: StepList, graph: Graph, optimizer: str, itemsize: int = 4) -> list[tuple[int, int]]:
    """For each device, return the bytes of its state, and of its state that no other device holds."""
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


def _snapshot_s(state: Sequence[tuple[int, int]], row: PlanPrediction, request: PlanRequest, every: int) -> float:
    """Return the seconds that one snapshot adds to `every` steps on the most delayed device."""
    costs, network, devices = request.costs, request.costs.network, len(state)
    longest_s = 0.0
    for device, (own, alone) in enumerate(state):
        received, receiver = state[device - 1][1], (device + 1) % devices
        handled_s = own * costs.overhead(device).copy_s_per_byte
        handled_s += (alone + received) * network.processor_s_per_byte[device]
        a, b = network.host[device], network.host[receiver]
        rates = (
            [network.send_bytes_per_s[a], network.receive_bytes_per_s[b]] if a != b else [network.within_bytes_per_s[a]]
        )
        sending_s = alone / min(network.pair_bytes_per_s[device][receiver], *rates)
        # The NIC sends the state while it is not busy with messages of steps.
        on_host = [d for d, host in enumerate(network.host) if host == a]
        sends_s = sum(row.sent_bytes[d] for d in on_host) / network.send_bytes_per_s[a]
        receives_s = sum(row.received_bytes[d] for d in on_host) / network.receive_bytes_per_s[a]
        free_s = max(0.0, request.micro_batches * (row.step_s - max(sends_s, receives_s)))
        longest_s = max(longest_s, handled_s + max(0.0, sending_s - every * free_s))
    confirming_s = max(costs.overhead(d).calls_s(2 * (devices - 1)) for d in range(devices))
    return longest_s + confirming_s + network.largest_latency_s
