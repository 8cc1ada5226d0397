"""What each plan would bring on a fleet, before anything runs: the rows of `convoy plan`."""

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.cost.memory import DeviceMemory, memory_of
from convoy.cost.network import Network
from convoy.graph import Graph
from convoy.layout import holders
from convoy.lower import lower
from convoy.named import PLANS, Speeds, named_plan
from convoy.plan import Plan
from convoy.planner import candidates, solo_speeds
from convoy.simulate import Costs, Timeline, simulate
from convoy.steps import Compute, StepList


@dataclass(frozen=True, slots=True)
class Prospect:
    """One plan on one fleet.

    Attributes:
        step_s: predicted seconds of a training step.
        efficiency: samples/s over the sum of the devices' solo speeds.
        traffic_bytes: on the wire per step, over all devices.
        bound: what the step waits for most: "computing on b-cpu", "sending from host a".
    """

    plan: Plan
    step_s: float
    samples_per_s: float
    efficiency: float
    traffic_bytes: int
    memory: tuple[DeviceMemory, ...]
    timeline: Timeline
    bound: str

    @property
    def workers(self) -> int:
        """How many devices compute at all."""
        return sum(seconds > 0 for seconds in self.timeline.compute_s)


def prospects(graph: Graph, batch: int, costs: Costs, names: Sequence[str]) -> list[Prospect]:
    """A row per named plan, and `auto` last.

    Args:
        names: of the devices, for the words in `bound`.
    """
    speeds = Speeds(solo_speeds(graph, batch, costs))
    plans = [named_plan(name, graph, batch, speeds) for name in PLANS]
    best = candidates(graph, batch, costs)[0].plan
    plans.append(best.named("auto"))
    return [prospect(plan, graph, costs, speeds, names) for plan in plans]


def prospect(plan: Plan, graph: Graph, costs: Costs, speeds: Speeds, names: Sequence[str]) -> Prospect:
    """The prediction for one plan."""
    steps = lower(plan, graph)
    timeline = simulate(steps, graph, costs)
    rate = plan.batch / timeline.step_s
    return Prospect(
        plan, timeline.step_s, rate, rate / sum(speeds.devices), sum(steps.traffic(costs.itemsize).values()),
        memory_of(plan, graph, itemsize=costs.itemsize), timeline, _bound(timeline, steps, costs, names),
    )  # fmt: skip


def fewer_and_more(graph: Graph, batch: int, costs: Costs, speeds: Sequence[float]) -> list[tuple[int, float]]:
    """(devices, samples/s) of the best plan found for the fastest device alone, the two fastest, and so on."""
    best: dict[int, float] = {}
    for candidate in candidates(graph, batch, costs):
        steps = lower(candidate.plan, graph)
        working = {d for s in steps.phase("forward") if isinstance(s, Compute) for d in holders(s.writes.layout)}
        best[len(working)] = max(best.get(len(working), 0.0), batch / candidate.step_s)
    assert len(speeds) >= max(best)
    return sorted(best.items())


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
