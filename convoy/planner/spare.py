"""What it costs to keep the state for the loss of a device, and how often that is worth it.

After a kept step each device copies its part of weights and optimizer state in its memory, and all tell each other that they
have; what only one device has travels to the next one while steps compute. Kept every k steps, each of these costs is shared by
k of them, and after a loss at most k steps are repeated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from convoy.layout.layout import held_entries, single
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.steps import Compute, StepList
from convoy.planner.predict import PlanningContext, PlanPrediction
from convoy.simulate.costs import Costs
from convoy.simulate.memory import optimizer_named

MOST_PART = 0.02
"""Of the time of a step, keeping may cost so much."""

MOST_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class SparePrice:
    """What keeping the state costs.

    Attributes:
        every: steps from one kept state to the next.
        part: by how much steps are longer in the mean, of their time.
        sent_bytes: per step in the mean, over all devices.
        memory_bytes: of each device.
        overfull: devices that have no room for it beside the plan, in words.
    """

    every: int
    part: float
    sent_bytes: int
    memory_bytes: tuple[int, ...]
    overfull: tuple[str, ...] = ()


def spare_price(row: PlanPrediction, context: PlanningContext, every: int | None = None) -> SparePrice:
    """The price for a plan as it was predicted.

    Args:
        every: steps from one kept state to the next; None: as few as cost at most `MOST_PART`.
    """
    if len(context.names) == 1:
        return SparePrice(1, 0.0, 0, (0,))  # nobody goes on without it
    steps = lower(row.plan, context.graph)
    state = kept_bytes(steps, context.graph, context.room.optimizer, context.costs.itemsize)
    step_s = row.step_s * context.passes
    parts = ((k, _kept_s(state, row, context, k, step_s) / (k * step_s)) for k in _steps(every))
    chosen, part = next((k, part) for k, part in parts if every or part <= MOST_PART or k == MOST_STEPS)
    before = [state[d - 1][1] for d in range(len(state))]
    memory = tuple(2 * (own + copied) for (own, _), copied in zip(state, before, strict=True))
    needs = [each.total_bytes + more for each, more in zip(row.memory, memory, strict=True)]
    sent = round(sum(alone for _, alone in state) / chosen)
    return SparePrice(chosen, part, sent, memory, tuple(context.room.overfull(needs)))


def kept_bytes(steps: StepList, graph: Graph, optimizer: str, itemsize: int = 4) -> list[tuple[int, int]]:
    """Of each device, the bytes of its part of the state, and of what of it no other device has."""
    numbers = 1 + optimizer_named(optimizer).state
    found = {}
    for step in steps.phase("forward"):
        if isinstance(step, Compute):
            for name, layout in step.parameters.items():
                parameter = graph[step.layer].parameters[name]
                found[parameter.key] = (layout, parameter.shape, itemsize * (numbers if parameter.trainable else 1))
    rows = []
    for device in range(steps.devices):
        sizes = [(held_entries(layout, device, shape) * size, single(layout)) for layout, shape, size in found.values()]
        rows.append((sum(n for n, _ in sizes), sum(n for n, alone in sizes if alone)))
    return rows


def _steps(every: int | None) -> Iterator[int]:
    return iter([every]) if every else count(1)


def _kept_s(
    state: Sequence[tuple[int, int]], row: PlanPrediction, context: PlanningContext, every: int, step_s: float
) -> float:
    """Seconds that keeping the state once adds to `every` steps, on the device that it holds up longest."""
    costs, devices = context.costs, len(state)
    longest_s = 0.0
    for device, (own, alone) in enumerate(state):
        arrives = state[device - 1][1]
        handled_s = own * costs.overhead(device).copy_s_per_byte
        handled_s += (alone + arrives) * costs.network.processor_s_per_byte[device]
        # What travels does so beside the messages of the steps, as long as their card has time for it.
        free_s = max(0.0, step_s - _card_s(row, context, device))
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


def _card_s(row: PlanPrediction, context: PlanningContext, device: int) -> float:
    """Seconds of a step in which the card of a device's host is busy with messages of the step."""
    network = context.costs.network
    own = [d for d, host in enumerate(network.host) if host == network.host[device]]
    sent, received = (sum(sizes[d] for d in own) for sizes in (row.sent_bytes, row.received_bytes))
    host = network.host[device]
    return context.passes * max(sent / network.send_bytes_per_s[host], received / network.receive_bytes_per_s[host])
