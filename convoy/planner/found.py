"""Plans with their predicted seconds, and the analytic model's seconds of any plan."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from convoy.plan.plan import Plan
from convoy.planner.analytic import CostModel
from convoy.planner.search import Search


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its predicted step time."""

    plan: Plan
    step_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """A plan of the search with its seconds by the analytic model, and how many devices take part.

    Attributes:
        overlap: what the model took to be hidden: seconds of one overlap say little beside those of another.
    """

    model_s: float
    working: int
    plan: Plan
    overlap: float = 0.0


def model_s(model: CostModel, order: Sequence[int], plan: Plan) -> float:
    """Seconds of a plan by the analytic model, with the sums that it has."""
    return Search(model.variant(reduce=plan.collective), order).step_s(plan)


def in_order(found: Iterable[Found]) -> list[Found]:
    """The shortest step by the analytic model first; of equal ones that of fewer devices."""
    return sorted(found, key=lambda each: (each.model_s, each.working))
