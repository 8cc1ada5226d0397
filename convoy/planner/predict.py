"""Predictions of plans on a fleet, before anything runs: the rows of `convoy plan`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from convoy.errors import InputError, PlanError
from convoy.fleet import Fleet
from convoy.layout.comm_dtype import CommDtype
from convoy.layout.layout import holders
from convoy.layout.redistribute import Reduce
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import OutputPlace, Plan
from convoy.plan.presets import PLANS, Speeds, named_plan
from convoy.plan.steps import Compute, StepList, passes_of
from convoy.planner.bound import LowerBound, lower_bound
from convoy.planner.found import Candidate
from convoy.planner.planner import candidates
from convoy.planner.speeds import solo_speeds
from convoy.simulate.energy import Energy, Power, energy_of, known_power_of, least_energy
from convoy.simulate.interval import Interval, around
from convoy.simulate.memory import DeviceMemory, Room, memory_of_passes, room_of
from convoy.simulate.network import Network
from convoy.simulate.simulate import Costs, Timeline, simulate


@dataclass(frozen=True, slots=True)
class PlanPrediction:
    """The prediction for one plan on one fleet; where several passes make a step, of a pass in the mean.

    Attributes:
        step_s: predicted seconds of a training step.
        spread, gain_spread: the factors within which nine of ten measurements lie, of the step and of how many times as fast as
            the fastest device alone it is.
        efficiency: samples/s over the sum of the devices' solo speeds.
        sent_bytes, received_bytes: on the wire per step, of each device.
        overfull: the devices whose memory it overfills, in words.
        energy: None where the fleet gives no watts.
        timeline: where several passes make a step, of the last one.
        bound: what the step waits for most: "computing on b-cpu", "sending from host a".
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
        """Seconds of a step that nine of ten measurements lie between."""
        return around(self.step_s, self.spread)

    @property
    def traffic_bytes(self) -> int:
        """On the wire per step, over all devices."""
        return sum(self.sent_bytes)

    @property
    def workers(self) -> int:
        """How many devices have a part in any layer."""
        return sum(memory.weights_bytes + memory.activations_bytes > 0 for memory in self.memory)


@dataclass(frozen=True, slots=True)
class PlanningContext:
    """What plans of one model on one fleet are made and predicted with.

    Attributes:
        room: memory that plans may fill.
        power: watts of each device; None where one of them has none.
        speeds: samples/s of each device alone.
        wire: in which numbers tensors travel, by any plan.
        reduce: how sums are made, by any plan; None: as each plan is known for, or as the planner says.
        passes: so many passes of a batch make a step; the last one sums gradients and updates weights for all.
        outputs: where they are, by any plan.
    """

    graph: Graph
    batch: int
    costs: Costs
    names: tuple[str, ...]
    room: Room
    power: tuple[Power, ...] | None
    speeds: Speeds
    wire: CommDtype = "exact"
    reduce: Reduce | None = None
    passes: int = 1
    outputs: OutputPlace = "everywhere"

    @classmethod
    def of(
        cls,
        graph: Graph,
        batch: int,
        costs: Costs,
        fleet: Fleet,
        optimizer: str = "sgd-momentum",
        wire: CommDtype = "exact",
        reduce: Reduce | None = None,
        passes: int = 1,
        outputs: OutputPlace = "everywhere",
    ) -> Self:
        """The context of a model on a fleet.

        Raises:
            InputError: unknown optimizer.
        """
        names = tuple(device.name for device in fleet.devices)
        speeds, power = Speeds(solo_speeds(graph, batch, costs, passes)), known_power_of(fleet)
        return cls(
            graph,
            batch,
            costs,
            names,
            room_of(fleet, optimizer, costs.process_bytes),
            power,
            speeds,
            wire,
            reduce,
            passes,
            outputs,
        )

    def candidates(self) -> list[Candidate]:
        """The planner's; see `convoy.planner.planner.candidates`."""
        return candidates(
            self.graph, self.batch, self.costs, self.room, self.wire, reduce=self.reduce, passes=self.passes,
            outputs=self.outputs,
        )  # fmt: skip

    def least(self) -> LowerBound:
        """What no exact plan can take less than; see `convoy.planner.bound`."""
        return lower_bound(self.graph, self.batch, self.costs, self.wire, self.passes)

    def named(self, name: str) -> Plan:
        """A plan by name, with the sums, the wire and the place of outputs of all plans here."""
        made = named_plan(name, self.graph, self.batch, self.speeds, self.reduce)
        return replace(made, wire=self.wire, outputs=self.outputs)


def predict_all(context: PlanningContext, least_energy_s: float | None = None) -> list[PlanPrediction]:
    """A prediction per named plan, and `auto` last: the shortest predicted step, or the least energy within a limit.

    Args:
        least_energy_s: choose the plan of least joules per image among those whose step takes at most this long.

    Raises:
        PlanError: no plan fits the devices' memory, or none is fast enough.
        InputError: least energy on a fleet without watts.
    """
    rows = [predict_plan(context.named(name), context) for name in PLANS]
    found = context.candidates()
    if least_energy_s is None:
        best = predict_plan(found[0].plan, context)
    else:
        best = _least_energy([predict_plan(each.plan, context) for each in found], least_energy_s, context.names)
    return [*rows, replace(best, plan=best.plan.named("auto"))]


def choices(context: PlanningContext) -> list[Candidate]:
    """The planner's choice, and the plans that are worth autotuning beside it; see `worth_trying`.

    Raises:
        PlanError: no plan fits the devices' memory.
    """
    tried = worth_trying(context.candidates(), context.graph)
    return [replace(each, plan=each.plan.named("auto")) for each in tried]


def _least_energy(rows: Sequence[PlanPrediction], limit_s: float, names: Sequence[str]) -> PlanPrediction:
    """The plan of least joules per image among those whose step takes at most `limit_s`."""
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


def predict_plan(plan: Plan, context: PlanningContext) -> PlanPrediction:
    """Simulate one plan, each kind of pass that a step has."""
    graph, costs, room = context.graph, context.costs, context.room
    kinds = passes_of(context.passes)
    lists = [lower(plan, graph, pass_=kind) for kind in kinds]
    timelines = [simulate(each, graph, costs) for each in lists]
    steps, timeline = lists[-1], timelines[-1]

    def mean(values: Iterable[float]) -> float:
        return sum(n * value for n, value in zip(kinds.values(), values, strict=True)) / context.passes

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
    if context.power is not None:
        rows = [energy_of(each, context.power, plan.batch) for each in timelines]
        energy = replace(rows[-1], step_s=step_s, devices_j=tuple(mean(e.devices_j[d] for e in rows) for d in devices))
    return PlanPrediction(
        plan=plan,
        step_s=step_s,
        spread=costs.errors.step(computes),
        gain_spread=costs.errors.gain(computes, context.speeds.fastest),
        samples_per_s=rate,
        efficiency=rate / sum(context.speeds.devices),
        sent_bytes=sent(0),
        received_bytes=sent(1),
        memory=memory,
        overfull=tuple(room.overfull([each.total_bytes for each in memory])),
        energy=energy,
        timeline=timeline,
        bound=_bound(timeline, steps, costs, context.names),
    )


def rates_by_devices(context: PlanningContext) -> list[tuple[int, float]]:
    """(devices, samples/s) of the best plan found for the fastest device alone, the two fastest, and so on."""
    best: dict[int, float] = {}
    for candidate in context.candidates():
        count = len(working(candidate.plan, context.graph))
        best[count] = max(best.get(count, 0.0), context.batch / candidate.step_s)
    return sorted(best.items())


def working(plan: Plan, graph: Graph) -> frozenset[int]:
    """The devices that compute a part of some layer."""
    steps = lower(plan, graph)
    return frozenset(d for s in steps.phase("forward") if isinstance(s, Compute) for d in holders(s.writes.layout))


def _bound(timeline: Timeline, steps: StepList, costs: Costs, names: Sequence[str]) -> str:
    """The resource that is busy longest; waiting, where none is busy for half of the step."""
    busiest = timeline.busiest
    rows = [
        (timeline.compute_s[busiest], f"computing on {names[busiest]}"),
        *_cards(steps, costs.network, costs.itemsize, names),
    ]
    seconds, words = max(rows, key=lambda row: row[0])
    rounds = sum(len(step.schedule.rounds) for step in steps.steps if not isinstance(step, Compute))
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
"""Worth autotuning: predicted to take at most so much longer than the best; so many plans, with the best; each with at most
this part of the messages of the one before it."""

REACH_ALONE = 0.6
"""One device alone may be predicted to take so much longer: for a ResNet-8 it was out of reach, predicted a third longer than
three devices, and was a quarter faster when both were run."""


def worth_trying(found: Sequence[Candidate], graph: Graph) -> list[Candidate]:
    """The best of some candidates, and those that may turn out better where messages cost more than is predicted.

    That is what predictions err in most: so each of them has clearly fewer messages than those that are predicted to be faster.

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
    """Messages of one step, from all devices."""
    steps = lower(plan, graph).steps
    rounds = [each for step in steps if not isinstance(step, Compute) for each in step.schedule.rounds]
    return sum(transfer.sender != transfer.receiver for each in rounds for transfer in each)
