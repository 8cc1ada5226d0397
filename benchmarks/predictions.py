"""What Convoy predicts for a series, from one measuring of it: made on device 0, before anything runs."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.configurations import AUTO, PEERS, Series
from convoy.graph import Graph
from convoy.lower import lower
from convoy.named import Speeds, named_plan
from convoy.plan import Plan
from convoy.planner import plan_auto, solo_speeds
from convoy.simulate import Costs, simulate


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step of one plan at one batch."""

    batch: int
    plan: Plan
    step_s: float


@dataclass(frozen=True, slots=True)
class Predictions:
    """All predictions of a series.

    Attributes:
        solo_s: seconds of a step of each device alone, one row per batch of the series.
        plan_s: seconds that all of it took, one per batch.
    """

    plans: tuple[Prediction, ...]
    solo_s: tuple[tuple[float, ...], ...]
    plan_s: tuple[float, ...]

    def to_json(self) -> str:
        """Text that `from_json` reads back to equal predictions."""
        plans = [[p.batch, p.plan.to_json(), p.step_s] for p in self.plans]
        return json.dumps([plans, self.solo_s, self.plan_s])

    @classmethod
    def from_json(cls, text: str) -> "Predictions":
        """The predictions in a text of `to_json`."""
        plans, solo_s, plan_s = json.loads(text)
        return cls(
            tuple(Prediction(batch, Plan.from_json(plan), step_s) for batch, plan, step_s in plans),
            tuple(tuple(row) for row in solo_s),
            tuple(plan_s),
        )


def predict(series: Series, graph: Graph, costs: Costs) -> Predictions:
    """Every plan of the series that is Convoy's, at every batch, as `convoy plan` predicts it."""
    plans: list[Prediction] = []
    solo_s, plan_s = [], []
    for batch in series.batches:
        speeds = Speeds(solo_speeds(graph, batch, costs))
        solo_s.append(tuple(batch / speed for speed in speeds.devices))
        start_s = time.perf_counter()
        for plan in _plans(series, graph, batch, speeds, costs):
            plans.append(Prediction(batch, plan, simulate(lower(plan, graph, batch), graph, costs).step_s))
        plan_s.append(time.perf_counter() - start_s)
    return Predictions(tuple(plans), tuple(solo_s), tuple(plan_s))


def _plans(series: Series, graph: Graph, batch: int, speeds: Speeds, costs: Costs) -> list[Plan]:
    names = [name for name in series.plans if name not in PEERS]
    return [
        plan_auto(graph, batch, costs).named(AUTO) if name == AUTO else named_plan(name, graph, batch, speeds)
        for name in names
    ]


def strategies(plan: Plan) -> dict[str, str]:
    """What each layer does, in few words: `conv1: filter(20,15,9,6)`; `*` stands for all layers not named."""

    def words(strategy: object) -> str:
        shares: Sequence[int] = getattr(strategy, "shares", None) or [getattr(strategy, "device", 0)]
        return f"{getattr(strategy, 'name', 'one')}({','.join(map(str, shares))})"

    return {name: words(each) for name, each in plan.layers.items()} | {"*": words(plan.otherwise)}
