"""Predict a case on device 0 from one measurement of its net, before anything runs."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from benchmarks.configurations import ALONE, AUTO, IN_TURN, PEERS, Case
from benchmarks.results import Row, Where
from benchmarks.tasks import task_of
from convoy.fleet import Fleet
from convoy.model.graph import Graph
from convoy.plan.plan import Plan
from convoy.plan.presets import PLANS
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.prediction import PlanPrediction, choose, predict_plan
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import Costs
from lab.lower_bound import lower_bound


@dataclass(frozen=True)
class Prediction:
    """The prediction of one plan: JSON, step seconds and their causes, seconds of the busiest NIC, and the
    bottleneck."""

    plan: str
    step_s: float
    where: Where
    card_s: float
    bound: str


@dataclass(frozen=True)
class Predictions:
    """All predictions of a case.

    Attributes:
        plans: by name.
        others: what is worth a trial beside `auto`.
        solo_s: seconds of a step of each device alone.
        plan_s: seconds that all of it took.
        least_s: what no exact plan can take less than; None where `auto` was not asked for.
    """

    plans: Mapping[str, Prediction]
    solo_s: tuple[float, ...]
    plan_s: float
    others: tuple[Prediction, ...] = ()
    least_s: float | None = None

    def to_json(self) -> str:
        """Return text that `from_json` reads back as equal predictions."""
        return _TEXT.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Predictions":
        """Read predictions from the text of `to_json`."""
        return _TEXT.validate_json(text)


_TEXT = TypeAdapter(Predictions)


def predict(case: Case, graph: Graph, costs: Costs, fleet: Fleet) -> Predictions:
    """Predict every Convoy plan of the case, as `convoy plan` does."""
    start_s = time.perf_counter()
    context = PlanRequest(graph, case.batch, FleetKnowledge(fleet, given=costs), outputs=task_of(case.net).outputs)

    def row(plan: Plan) -> Prediction:
        return _prediction(predict_plan(plan, context), fleet)

    rows = {name: row(context.named(name)) for name in case.plans if name in PLANS}
    others: list[Prediction] = []
    least_s = None
    if AUTO in case.plans:
        rows[AUTO], *others = (row(each.plan) for each in choose(context))
        least_s = lower_bound(context).step_s
    solo_s = tuple(case.batch / speed for speed in context.speeds.devices)
    return Predictions(rows, solo_s, time.perf_counter() - start_s, tuple(others), least_s)


def _prediction(row: PlanPrediction, fleet: Fleet) -> Prediction:
    where = Where(row.timeline.compute_s, row.timeline.exchange_s)
    return Prediction(row.plan.to_json(), row.step_s, where, _card_s(row, fleet), row.bound)


def _card_s(row: PlanPrediction, fleet: Fleet) -> float:
    """Return the seconds of the busiest NIC; in these fleets every device has its own host."""
    cards = [fleet.nic(device.host) for device in fleet.devices] if len(fleet.hosts) > 1 else []
    ways = zip(cards, row.sent_bytes, row.received_bytes, strict=False)
    return max((max(out / c.send_bytes_per_s, into / c.receive_bytes_per_s) for c, out, into in ways), default=0.0)


def strategies(plan: Plan) -> dict[str, str]:
    """Summarise each layer's strategy: `conv1: filter(20,15,9,6)`; `*` stands for all other layers."""

    def words(strategy: object) -> str:
        shares: Sequence[int] = getattr(strategy, "shares", None) or [getattr(strategy, "device", 0)]
        return f"{getattr(strategy, 'name', 'one')}({','.join(map(str, shares))})"

    return {name: words(each) for name, each in plan.layers.items()} | {"*": words(plan.otherwise)}


def rows_of(case: Case, predictions: Predictions, round_s: float) -> tuple[Row, ...]:
    """Return one row per configuration, or per device if devices train alone, before any measurement."""
    alone_s = predictions.solo_s
    # For DDP, a guess of how long a step takes, only to choose how many make a round.
    guess_s = 1 / sum(1 / each_s for each_s in alone_s)
    rows: list[Row] = []
    for name in case.plans:
        if name in (ALONE, IN_TURN):
            # Beside each other, all are busy about as long as the slowest is.
            busy_s = max(alone_s) if name == ALONE else 0.0
            rows += [
                Row(
                    case.fleet,
                    case.net,
                    case.batch,
                    name,
                    device,
                    step_s,
                    {},
                    max(_steps(round_s, step_s), round(busy_s / step_s)),
                )
                for device, step_s in enumerate(alone_s)
            ]
        elif name in PEERS:
            rows.append(Row(case.fleet, case.net, case.batch, name, None, None, {}, _steps_together(round_s, guess_s)))
        else:
            found = predictions.plans[name]
            rows.append(
                Row(
                    case.fleet, case.net, case.batch, name, None, found.step_s, strategies(Plan.from_json(found.plan)),
                    _steps_together(round_s, found.step_s), foreseen=found.where, card_s=found.card_s, bound=found.bound,
                    least_s=predictions.least_s if name == AUTO else None,
                )
            )  # fmt: skip
    return tuple(rows)


def _steps_together(round_s: float, step_s: float) -> int:
    """Return at least two steps unless a step is long: devices start and end a turn at slightly different times."""
    return max(_steps(round_s, step_s), 2 if step_s < 2 * round_s else 1)


def _steps(round_s: float, step_s: float) -> int:
    return max(1, min(100, math.ceil(round_s / step_s - 0.1)))
