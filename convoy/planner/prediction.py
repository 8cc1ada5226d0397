"""Predicts plans on a fleet, chooses a plan by its prediction, and predicts the cost of snapshots."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from convoy.errors import PlanError
from convoy.layout.layout import held_entries, holders, single
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS
from convoy.plan.steps import ComputeStep, StepList, micro_batches
from convoy.planner.planner import candidates
from convoy.planner.request import PlanRequest
from convoy.planner.search import Candidate
from convoy.simulate.events import Timeline
from convoy.simulate.interval import Within, around
from convoy.simulate.memory import (
    DeviceMemory,
    MemoryLimits,
    fewest_micro_batches,
    memory_of,
    micro_batch_words,
    optimizer_named,
    parameters_of,
)
from convoy.simulate.simulator import simulate


@dataclass(frozen=True, slots=True)
class PlanPrediction:
    """The prediction of one plan on one fleet, as a mean over a step's micro-batches.

    Attributes:
        step_s: predicted seconds per micro-batch.
        spread: a factor: nine of ten measured times lie between step_s / spread and step_s * spread.
        gain_spread: the same factor for the speedup over the fastest device alone.
        efficiency: samples/s divided by the sum of solo speeds.
        sent_bytes, received_bytes: bytes on the wire, by device.
        overfull: descriptions of the devices whose memory is too small for the plan.
        image_j: joules per sample; None if the fleet does not give watts.
        timeline: the simulated events of the last micro-batch.
        bound: the busiest resource, such as "computing on b-cpu" or "sending from the host of a".
    """

    plan: Plan
    step_s: float
    spread: float
    gain_spread: float
    samples_per_s: float
    efficiency: float
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    memory: tuple[DeviceMemory, ...]
    overfull: tuple[str, ...]
    image_j: float | None
    timeline: Timeline
    bound: str

    @property
    def within(self) -> Within:
        """The interval of seconds that contains nine of ten measurements."""
        return around(self.step_s, self.spread)

    @property
    def traffic_bytes(self) -> int:
        """Bytes on the wire, over all devices."""
        return sum(self.sent_bytes)

    @property
    def workers(self) -> int:
        """The number of devices that compute."""
        return sum(memory.weights_bytes + memory.activations_bytes > 0 for memory in self.memory)


def predict_plan(plan: Plan, request: PlanRequest) -> PlanPrediction:
    """Predict one plan by simulating each kind of micro-batch in a step."""
    graph, costs, limits = request.graph, request.costs, request.limits
    kinds = micro_batches(request.micro_batches)
    lists = [lower(plan, graph, micro_batch=kind) for kind in kinds]
    timelines = [simulate(each, graph, costs) for each in lists]

    def mean(values: Iterable[float]) -> float:
        return sum(n * value for n, value in zip(kinds.values(), values, strict=True)) / request.micro_batches

    step_s = mean(each.step_s for each in timelines)
    rate = plan.batch / step_s
    memory = memory_of(lists[-1], graph, optimizer=request.optimizer, itemsize=costs.itemsize)
    traffic = [each.traffic(costs.itemsize) for each in lists]
    devices = range(plan.devices)
    computes = [mean(each.compute_s[d] for each in timelines) / step_s for d in devices]
    joules = _joules(request, step_s, computes)

    def sent(end: int) -> tuple[int, ...]:
        return tuple(
            round(mean(sum(n for route, n in each.items() if route[end] == d) for each in traffic)) for d in devices
        )

    return PlanPrediction(
        plan=plan,
        step_s=step_s,
        spread=costs.errors.step(computes),
        gain_spread=costs.errors.gain(computes, request.speeds.fastest),
        samples_per_s=rate,
        efficiency=rate / sum(request.speeds.devices),
        sent_bytes=sent(0),
        received_bytes=sent(1),
        memory=memory,
        overfull=tuple(limits.overfull([each.total_bytes for each in memory])),
        image_j=None if joules is None else joules / plan.batch,
        timeline=timelines[-1],
        bound=_busiest(timelines[-1], lists[-1], request),
    )


def _joules(request: PlanRequest, step_s: float, computes: Sequence[float]) -> float | None:
    """Return the joules of a step: busy watts while a device computes, else idle watts; None if watts are unknown."""
    fleet, total = request.fleet.fleet, 0.0
    if fleet is None:
        return None
    for device, part in zip(fleet.devices, computes, strict=True):
        if device.idle_w is None or device.busy_w is None:
            return None
        total += step_s * (device.idle_w + part * (device.busy_w - device.idle_w))
    return total


def _busiest(timeline: Timeline, steps: StepList, request: PlanRequest) -> str:
    """Return the name of the resource that is busy longest; "waiting: ..." if none is busy for half of the step."""
    network, names = request.costs.network, request.names
    first = {host: names[device] for device, host in reversed(list(enumerate(network.host)))}
    longest_s = max(timeline.compute_s)
    busy_s = {f"computing on {names[timeline.compute_s.index(longest_s)]}": longest_s}
    for (sender, receiver), size in steps.traffic(request.costs.itemsize).items():
        a, b = network.host[sender], network.host[receiver]
        if a != b:
            sends, receives = f"sending from the host of {first[a]}", f"receiving at the host of {first[b]}"
            busy_s[sends] = busy_s.get(sends, 0.0) + size / network.send_bytes_per_s[a]
            busy_s[receives] = busy_s.get(receives, 0.0) + size / network.receive_bytes_per_s[b]
    busiest = max(busy_s, key=lambda each: busy_s[each])
    rounds = sum(len(step.schedule.rounds) for step in steps.steps if not isinstance(step, ComputeStep))
    return busiest if busy_s[busiest] > timeline.step_s / 2 else f"waiting: {rounds} rounds of messages"


def predict_all(request: PlanRequest) -> tuple[list[PlanPrediction], list[tuple[int, float]]]:
    """Predict every named plan and, last, `auto`, the plan with the shortest step.

    Returns:
        the predictions; and for each number of computing devices, that number and the samples/s of its best plan.

    Raises:
        PlanError: no plan fits the devices' memory.
    """
    found = candidates(request)
    fastest: dict[int, float] = {}
    for each in found:  # the fastest first
        fastest.setdefault(len(working(each.plan, request.graph)), request.batch / each.step_s)
    plans = [*map(request.named, PLANS), found[0].plan.named("auto")]
    return [predict_plan(plan, request) for plan in plans], sorted(fastest.items())


def working(plan: Plan, graph: Graph) -> frozenset[int]:
    """Return the devices that compute something in a plan."""
    steps = lower(plan, graph)
    return frozenset(d for s in steps.phase("forward") if isinstance(s, ComputeStep) for d in holders(s.writes.layout))


# --- plans worth a trial ---------------------------------------------------------------------------------------------

REACH, TRIED, FEWER = 0.25, 3, 0.75
"""Limits of autotuned plans: the most extra time relative to the best plan; their number, including the best; the largest
fraction of the previous plan's messages."""

REACH_ALONE = 0.6
"""The most extra time of a plan for one device alone. It is larger: for a ResNet-8 such a plan was a quarter faster than
a plan for three devices that was predicted to take a third less time."""


def choose(request: PlanRequest) -> list[PlanPrediction]:
    """Return the planner's choice, followed by the plans worth autotuning; see `worth_trying`.

    Raises:
        PlanError: no plan fits the devices' memory.
    """
    return [predict_plan(each.plan.named("auto"), request) for each in worth_trying(candidates(request), request.graph)]


def worth_trying(found: Sequence[Candidate], graph: Graph) -> list[Candidate]:
    """Return the best candidate, and candidates that may be faster because they send fewer messages.

    Predictions err most in the cost of messages. So each plan has clearly fewer messages than the plans before it.

    Args:
        found: candidates, the shortest predicted step first.
    """
    tried: list[Candidate] = []
    fewest = 0
    for each in found:
        if each.step_s > found[0].step_s * (1 + REACH) or len(tried) == TRIED:
            break
        steps = (step for step in lower(each.plan, graph).steps if not isinstance(step, ComputeStep))
        rounds = (transfers for step in steps for transfers in step.schedule.rounds)
        messages = sum(transfer.sender != transfer.receiver for transfers in rounds for transfer in transfers)
        if not tried or messages <= FEWER * fewest:
            tried.append(each)
            fewest = messages
    near = (each for each in found if each.step_s <= found[0].step_s * (1 + REACH_ALONE))
    alone = next((each for each in near if len(working(each.plan, graph)) == 1), None)
    return tried if alone is None or alone in tried else [*tried, alone]


def check_alone(request: PlanRequest, plan: Plan, limits: MemoryLimits) -> None:
    """Check that a plan of one device fits into its memory.

    Raises:
        PlanError: it does not fit; the message gives a number of micro-batches that would, if any.
    """

    def needs(samples: int) -> list[int]:
        steps = lower(plan, request.graph, samples)
        return [each.total_bytes for each in memory_of(steps, request.graph, optimizer=request.optimizer)]

    if limits.excess(needs(request.batch)):
        more = fewest_micro_batches(request.batch, lambda samples: not limits.excess(needs(samples)))
        remedy = "" if more is None else micro_batch_words(request.graph, request.micro_batches * more)
        raise PlanError(limits.refusal(request.graph.model, request.batch, [needs(request.batch)], remedy))


# --- snapshots --------------------------------------------------------------------------------------------------------
# Each device copies its shards of weights and optimizer state in memory, and all devices confirm it. State that only one device
# holds is sent to the next one during later steps. A snapshot every k steps divides these costs by k, and after a lost device
# at most k steps are repeated.

MOST_PART = 0.02
"""The largest fraction of a step's time for snapshots."""

MOST_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class SparePrice:
    """The cost of snapshots.

    Attributes:
        every: steps from one snapshot to the next.
        part: mean extra time per step, as a fraction.
        sent_bytes: mean bytes sent per step, over all devices.
        memory_bytes: bytes of snapshots by device.
        overfull: descriptions of devices whose memory is too small for plan and snapshots.
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
    numbers, rows = 1 + optimizer_named(optimizer).state, []
    for device in range(steps.devices):
        sizes = [
            (held_entries(layout, device, p.shape) * itemsize * (numbers if p.trainable else 1), single(layout))
            for p, layout in parameters_of(steps, graph)
        ]
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
