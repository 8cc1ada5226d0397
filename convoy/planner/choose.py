"""The planner's answer for a job: its plan and those worth a trial, predicted and priced."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from convoy.errors import PlanError
from convoy.fleet import Fleet
from convoy.model.graph import Graph
from convoy.plan.plan import Plan
from convoy.plan.presets import Speeds
from convoy.planner.predict import choices, predict_plan, working
from convoy.planner.request import PlanRequest
from convoy.planner.spare import SparePrice, spare_price
from convoy.simulate.interval import Interval, around
from convoy.simulate.memory import fewest_passes, memory_of, passes_words, room_of

UNCERTAIN = 2.0
"""If the high end of an interval is above this multiple of its low end, the user is told."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan to train by, then those that are predicted to take nearly as long.

    Attributes:
        step_s: predicted seconds of a micro-batch by each plan; empty if nothing was predicted.
        spread: the factor within which nine of ten measurements of each lie.
        spare: cost of snapshots, by the first plan; None if it is not known.
    """

    plans: tuple[Plan, ...]
    step_s: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    spare: SparePrice | None = None

    def predicted_s(self, plan: Plan) -> float | None:
        """Return the predicted seconds of a micro-batch by one of the plans; None for any other plan."""
        return next((step_s for each, step_s in zip(self.plans, self.step_s, strict=False) if each == plan), None)

    def within(self, plan: Plan) -> Interval | None:
        """Return the interval of nine of ten measurements of it; None for any other plan."""
        rows = zip(self.plans, self.step_s, self.spread, strict=False)
        return next((around(step_s, spread) for each, step_s, spread in rows if each == plan), None)

    def to_json(self) -> dict[str, Any]:
        """Return a job's choice as values that JSON can hold; `from_json` reads them."""
        return asdict(replace(self, plans=())) | {"plans": [plan.to_json() for plan in self.plans]}

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> "Choice":
        price = row["spare"] | {name: tuple(row["spare"][name]) for name in ("memory_bytes", "overfull")}
        plans = tuple(Plan.from_json(text, "device 0's plan") for text in row["plans"])
        return Choice(plans, tuple(row["step_s"]), tuple(row["spread"]), SparePrice(**price))


def choose(request: PlanRequest) -> Choice:
    """Plan a request.

    Raises:
        PlanError: no plan fits the devices' memory.
    """
    found = choices(request)
    rows = [predict_plan(each.plan, request) for each in found]
    price = spare_price(rows[0], request)
    if request.reduce == "inexact-butterfly-mixing":
        # Mixing sends weights beside gradients, so it may not fit where a sum did. Copies that differ cannot be handed from
        # plan to plan, so there are no others.
        mixing = predict_plan(replace(found[0].plan, reduce=request.reduce), request)
        if mixing.overfull:
            raise PlanError(
                f"plan auto with reduce {request.reduce} overfills {'; '.join(mixing.overfull)}: use a smaller batch or "
                "another reduce"
            )
        return Choice((mixing.plan,), (mixing.step_s,), (mixing.spread,), price)
    return Choice(
        tuple(each.plan for each in found), tuple(e.step_s for e in found), tuple(row.spread for row in rows), price
    )


def choice_lines(choice: Choice, graph: Graph, speeds: Speeds) -> list[str]:
    """Return lines for a person: the planner's choice, the measured speeds, and the prediction."""
    plan, fastest = choice.plans[0], speeds.fastest
    used = working(plan, graph)
    names = ", ".join(map(str, sorted(used)))
    lines = [
        f"auto chose device {names} alone: one device is faster than several"
        if len(used) == 1
        else f"auto chose devices {names} of {plan.devices}, each layer split as its times ask for",
        f"measured alone, samples/s: {', '.join(f'device {d} {s:,.3g}' for d, s in enumerate(speeds.devices))}",
    ]
    if (step_s := choice.predicted_s(plan)) and (within := choice.within(plan)):
        gain = plan.batch / step_s / speeds.devices[fastest]
        lines.append(
            f"predicted: {step_s:.3g} s a step (nine of ten: {within.low:.3g} - {within.high:.3g}), {gain:.2f} times as fast "
            f"as device {fastest} alone"
        )
        if within.high > UNCERTAIN * within.low:
            lines.append(
                "these times varied much: end what else runs on the devices, or name a plan such as data-by-speed"
            )
    return lines


def check_alone(request: PlanRequest, plan: Plan, fleet: Fleet, process_bytes: int) -> None:
    """Refuse a plan of one device that does not fit into its memory.

    Raises:
        PlanError: names the number of micro-batches that would fit, if any.
    """
    room = room_of(fleet, request.optimizer, [process_bytes])

    def needs(samples: int) -> list[int]:
        return [each.total_bytes for each in memory_of(plan, request.graph, samples, optimizer=request.optimizer)]

    if room.excess(needs(request.batch)):
        more = fewest_passes(request.batch, lambda samples: not room.excess(needs(samples)))
        remedy = "" if more is None else passes_words(request.graph, request.micro_batches * more)
        raise PlanError(room.refusal(request.graph.model, request.batch, [needs(request.batch)], remedy))
