"""Predicts plans on a fleet, and chooses a plan by its prediction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from convoy.errors import PlanError
from convoy.layout.layout import holders
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
    memory_of_steps,
    micro_batch_words,
)
from convoy.simulate.simulator import simulate


@dataclass(frozen=True, slots=True)
class PlanPrediction:
    """The prediction of one plan on one fleet: the mean over a step's micro-batches.

    Attributes:
        step_s: predicted seconds.
        spread: the factor within which nine of ten measurements lie.
        gain_spread: the same for the speedup over the fastest device alone.
        efficiency: samples/s divided by the sum of solo speeds.
        sent_bytes, received_bytes: on the wire, by device.
        overfull: descriptions of the devices whose memory the plan overfills.
        image_j: joules per sample; None if the fleet gives no watts.
        timeline: of the last micro-batch.
        bound: the busiest resource: "computing on b-cpu", "sending from the host of a".
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
    """Simulate one plan, for each kind of micro-batch in a step."""
    graph, costs, limits = request.graph, request.costs, request.limits
    kinds = micro_batches(request.micro_batches)
    lists = [lower(plan, graph, micro_batch=kind) for kind in kinds]
    timelines = [simulate(each, graph, costs) for each in lists]

    def mean(values: Iterable[float]) -> float:
        return sum(n * value for n, value in zip(kinds.values(), values, strict=True)) / request.micro_batches

    step_s = mean(each.step_s for each in timelines)
    rate = plan.batch / step_s
    memory = memory_of_steps(lists[-1], graph, optimizer=request.optimizer, itemsize=costs.itemsize)
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
    """Return the joules of a step: busy watts while a device computes, else idle watts; None if a device has none."""
    fleet, total = request.fleet.fleet, 0.0
    if fleet is None:
        return None
    for device, part in zip(fleet.devices, computes, strict=True):
        if device.idle_w is None or device.busy_w is None:
            return None
        total += step_s * (device.idle_w + part * (device.busy_w - device.idle_w))
    return total


def _busiest(timeline: Timeline, steps: StepList, request: PlanRequest) -> str:
    """Name the resource that is busy longest; "waiting" if none is busy for half of the step."""
    network, names = request.costs.network, request.names
    first = {host: names[device] for device, host in reversed(list(enumerate(network.host)))}
    busy_s = {f"computing on {names[timeline.busiest]}": timeline.compute_s[timeline.busiest]}
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
    """Predict every named plan, and last `auto`, the plan with the shortest step.

    Returns:
        the predictions; and (devices, samples/s) of the best plan by the number of devices that compute.

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
    """Return the devices that compute."""
    steps = lower(plan, graph)
    return frozenset(d for s in steps.phase("forward") if isinstance(s, ComputeStep) for d in holders(s.writes.layout))


# --- plans worth a trial ---------------------------------------------------------------------------------------------

REACH, TRIED, FEWER = 0.25, 3, 0.75
"""Autotuned plans: the most extra time relative to the best; their number, including the best; the largest fraction of the
previous plan's messages."""

REACH_ALONE = 0.6
"""The most extra time for one device alone. It is larger, because such a plan was a quarter faster than a plan with a
predicted time a third shorter (a ResNet-8 on three devices)."""


def choose(request: PlanRequest) -> list[PlanPrediction]:
    """Return the planner's choice, followed by the plans worth autotuning; see `worth_trying`.

    Raises:
        PlanError: no plan fits the devices' memory.
    """
    return [predict_plan(each.plan.named("auto"), request) for each in worth_trying(candidates(request), request.graph)]


def worth_trying(found: Sequence[Candidate], graph: Graph) -> list[Candidate]:
    """Return the best candidate, and candidates that are better if messages cost more than predicted.

    Predictions err most in messages. So each plan has clearly fewer messages than the faster plans before it.

    Args:
        found: the shortest predicted step first.
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
    """Refuse a plan of one device that does not fit into its memory.

    Raises:
        PlanError: names the number of micro-batches that would fit, if any.
    """

    def needs(samples: int) -> list[int]:
        return [each.total_bytes for each in memory_of(plan, request.graph, samples, optimizer=request.optimizer)]

    if limits.excess(needs(request.batch)):
        more = fewest_micro_batches(request.batch, lambda samples: not limits.excess(needs(samples)))
        remedy = "" if more is None else micro_batch_words(request.graph, request.micro_batches * more)
        raise PlanError(limits.refusal(request.graph.model, request.batch, [needs(request.batch)], remedy))
