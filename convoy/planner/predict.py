"""Predictions of plans on a fleet, before anything runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from convoy.errors import InputError, PlanError
from convoy.layout.layout import holders
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS
from convoy.plan.steps import ComputeStep, StepList, micro_batches
from convoy.planner.planner import Candidate, candidates, in_micro_batches, memory_slows
from convoy.planner.request import PlanRequest
from convoy.simulate.energy import Energy, energy_of, least_energy
from convoy.simulate.interval import Interval, around
from convoy.simulate.memory import DeviceMemory, memory_of_passes
from convoy.simulate.network import Network
from convoy.simulate.simulate import Costs, Timeline, simulate


@dataclass(frozen=True, slots=True)
class PlanPrediction:
    """The prediction for one plan on one fleet, per micro-batch: the mean over all of a step.

    Attributes:
        step_s: predicted seconds.
        spread: the factor within which nine of ten measurements of it lie.
        gain_spread: the same for the speedup over the fastest device alone.
        efficiency: samples/s divided by the sum of solo speeds.
        sent_bytes, received_bytes: on the wire, by device.
        overfull: the devices whose memory the plan overfills, in words.
        energy: None if the fleet gives no watts.
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
    energy: Energy | None
    timeline: Timeline
    bound: str

    @property
    def within(self) -> Interval:
        """The seconds between which nine of ten measurements lie."""
        return around(self.step_s, self.spread)

    @property
    def traffic_bytes(self) -> int:
        """Bytes on the wire, over all devices."""
        return sum(self.sent_bytes)

    @property
    def workers(self) -> int:
        """The number of devices that have a part in any layer."""
        return sum(memory.weights_bytes + memory.activations_bytes > 0 for memory in self.memory)


def predict_all(request: PlanRequest, least_energy_s: float | None = None) -> list[PlanPrediction]:
    """Predict every named plan, and last `auto`: the shortest step, or the least energy within a limit.

    Args:
        least_energy_s: choose by joules per image, among plans whose step takes at most this long.

    Raises:
        PlanError: no plan fits the devices' memory, or none is fast enough.
        InputError: least energy on a fleet without watts.
    """
    rows = [predict_plan(request.named(name), request) for name in PLANS]
    found = candidates(request)
    if least_energy_s is None:
        best = predict_plan(found[0].plan, request)
    else:
        best = _least_energy([predict_plan(each.plan, request) for each in found], least_energy_s, request.names)
    return [*rows, replace(best, plan=best.plan.named("auto"))]


def choices(request: PlanRequest) -> list[Candidate]:
    """Return the planner's choice, and the plans worth autotuning beside it; see `worth_trying`.

    Raises:
        PlanError: no plan fits the devices' memory.
    """
    tried = worth_trying(candidates(request), request.graph)
    return [replace(each, plan=each.plan.named("auto")) for each in tried]


def _least_energy(rows: Sequence[PlanPrediction], limit_s: float, names: Sequence[str]) -> PlanPrediction:
    energies = [(index, row.energy) for index, row in enumerate(rows) if row.energy is not None]
    if not energies:
        raise InputError(
            f"least energy of {', '.join(names)}: a device has no watts; give every [[device]] of the fleet file idle_w "
            "and busy_w"
        )
    try:
        return rows[least_energy(energies, limit_s)[0]]
    except PlanError:
        fastest = min(row.step_s for row in rows)
        raise PlanError(
            f"no plan takes at most {limit_s:.4g} s a step: the fastest takes {fastest:.4g} s; raise the limit or add devices"
        ) from None


def predict_plan(plan: Plan, request: PlanRequest) -> PlanPrediction:
    """Simulate one plan, each kind of micro-batch that a step has."""
    graph, costs, room = request.graph, request.costs, request.room
    kinds = micro_batches(request.micro_batches)
    lists = [lower(plan, graph, micro_batch=kind) for kind in kinds]
    timelines = [simulate(each, graph, costs) for each in lists]
    steps, timeline = lists[-1], timelines[-1]

    def mean(values: Iterable[float]) -> float:
        return sum(n * value for n, value in zip(kinds.values(), values, strict=True)) / request.micro_batches

    step_s = mean(each.step_s for each in timelines)
    rate = plan.batch / step_s
    memory = memory_of_passes(lists, graph, optimizer=room.optimizer, itemsize=costs.itemsize)
    traffic = [each.traffic(costs.itemsize) for each in lists]
    devices = range(plan.devices)
    computes = [mean(each.compute_s[d] for each in timelines) / step_s for d in devices]

    def sent(end: int) -> tuple[int, ...]:
        return tuple(
            round(mean(sum(n for route, n in each.items() if route[end] == d) for each in traffic)) for d in devices
        )

    energy = None
    if request.power is not None:
        rows = [energy_of(each, request.power, plan.batch) for each in timelines]
        energy = replace(rows[-1], step_s=step_s, devices_j=tuple(mean(e.devices_j[d] for e in rows) for d in devices))
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
        overfull=tuple(room.overfull([each.total_bytes for each in memory])),
        energy=energy,
        timeline=timeline,
        bound=_bound(timeline, steps, costs, request.names),
    )


MUCH = 1.2
"""Micro-batches are proposed if no plan fits without, or if the best that does takes at least this multiple of the time."""


def proposal(request: PlanRequest, step_s: float | None) -> PlanPrediction | None:
    """Return a plan with micro-batches that is much faster than the best without; None if there is none.

    Args:
        step_s: predicted seconds of the best step without; None: no plan fits.

    Returns:
        the prediction per micro-batch; `request.batch / plan.batch` of them make the step.
    """
    if not memory_slows(request) or (found := in_micro_batches(request)) is None:
        return None
    smaller, best = found
    predicted = predict_plan(best.plan, smaller)
    return predicted if step_s is None or step_s > MUCH * predicted.step_s * smaller.micro_batches else None


def rates_by_devices(request: PlanRequest) -> list[tuple[int, float]]:
    """Return (devices, samples/s) of the best plan for the fastest device alone, the two fastest, and so on."""
    best: dict[int, float] = {}
    for candidate in candidates(request):
        count = len(working(candidate.plan, request.graph))
        best[count] = max(best.get(count, 0.0), request.batch / candidate.step_s)
    return sorted(best.items())


def working(plan: Plan, graph: Graph) -> frozenset[int]:
    """Return the devices that compute a part of some layer."""
    steps = lower(plan, graph)
    return frozenset(d for s in steps.phase("forward") if isinstance(s, ComputeStep) for d in holders(s.writes.layout))


def _bound(timeline: Timeline, steps: StepList, costs: Costs, names: Sequence[str]) -> str:
    """Return the resource that is busy longest; "waiting" if none is busy for half of the step."""
    busiest = timeline.busiest
    rows = [
        (timeline.compute_s[busiest], f"computing on {names[busiest]}"),
        *_cards(steps, costs.network, costs.itemsize, names),
    ]
    seconds, words = max(rows, key=lambda row: row[0])
    rounds = sum(len(step.schedule.rounds) for step in steps.steps if not isinstance(step, ComputeStep))
    return words if seconds > timeline.step_s / 2 else f"waiting: {rounds} rounds of messages"


def _cards(steps: StepList, network: Network, itemsize: int, names: Sequence[str]) -> list[tuple[float, str]]:
    out = [0.0] * len(network.send_bytes_per_s)
    into = [0.0] * len(network.send_bytes_per_s)
    for (sender, receiver), size in steps.traffic(itemsize).items():
        a, b = network.host[sender], network.host[receiver]
        if a != b:
            out[a] += size / network.send_bytes_per_s[a]
            into[b] += size / network.receive_bytes_per_s[b]
    first = {host: names[device] for device, host in reversed(list(enumerate(network.host)))}
    rows = [(seconds, f"sending from the host of {first[host]}") for host, seconds in enumerate(out)]
    return rows + [(seconds, f"receiving at the host of {first[host]}") for host, seconds in enumerate(into)]


REACH, TRIED, FEWER = 0.25, 3, 0.75
"""Plans worth autotuning take at most this fraction longer than the best; their number, with the best; and the fraction of the
previous plan's messages that each may have."""

REACH_ALONE = 0.6
"""The same for one device alone. It is larger because such a plan was a quarter faster than one that was predicted a third
shorter (a ResNet-8 on three devices)."""


def worth_trying(found: Sequence[Candidate], graph: Graph) -> list[Candidate]:
    """Return the best candidate, and those that are better if messages cost more than predicted.

    Predictions err most in messages. So each plan has clearly fewer of them than the faster ones before it.

    Args:
        found: the shortest predicted step first.
    """
    tried: list[tuple[Candidate, int]] = []
    for each in found:
        if each.step_s > found[0].step_s * (1 + REACH) or len(tried) == TRIED:
            break
        count = _messages(each.plan, graph)
        if not tried or count <= FEWER * tried[-1][1]:
            tried.append((each, count))
    near = (each for each in found if each.step_s <= found[0].step_s * (1 + REACH_ALONE))
    alone = next((each for each in near if len(working(each.plan, graph)) == 1), None)
    plans = [each for each, _ in tried]
    return plans if alone is None or alone in plans else [*plans, alone]


def _messages(plan: Plan, graph: Graph) -> int:
    """Count the messages of one step, from all devices."""
    steps = lower(plan, graph).steps
    rounds = [each for step in steps if not isinstance(step, ComputeStep) for each in step.schedule.rounds]
    return sum(transfer.sender != transfer.receiver for each in rounds for transfer in each)
