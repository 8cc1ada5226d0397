"""The planner's answer for a job: its plan and those worth a trial, predicted and priced."""

from dataclasses import dataclass, replace

from convoy.errors import PlanError
from convoy.plan.plan import Plan
from convoy.planner.predict import choices, predict_plan
from convoy.planner.request import PlanRequest
from convoy.planner.spare import SparePrice, spare_price
from convoy.simulate.memory import Room, fewest_passes, memory_of, passes_words


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan to train by, then those that are predicted to take nearly as long.

    Attributes:
        step_s: predicted seconds of a micro-batch by each plan.
        spread: the factor within which nine of ten measurements of each lie.
        spare: cost of snapshots, by the first plan.
    """

    plans: tuple[Plan, ...]
    step_s: tuple[float, ...]
    spread: tuple[float, ...]
    spare: SparePrice


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


def check_alone(request: PlanRequest, plan: Plan, room: Room) -> None:
    """Refuse a plan of one device that does not fit into its memory.

    Raises:
        PlanError: names the number of micro-batches that would fit, if any.
    """

    def needs(samples: int) -> list[int]:
        return [each.total_bytes for each in memory_of(plan, request.graph, samples, optimizer=request.optimizer)]

    if room.excess(needs(request.batch)):
        more = fewest_passes(request.batch, lambda samples: not room.excess(needs(samples)))
        remedy = "" if more is None else passes_words(request.graph, request.micro_batches * more)
        raise PlanError(room.refusal(request.graph.model, request.batch, [needs(request.batch)], remedy))
