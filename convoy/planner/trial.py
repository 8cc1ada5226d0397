"""Which of the planner's plans are worth autotuning."""

from collections.abc import Sequence

from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import Compute
from convoy.planner.found import Candidate

REACH, TRIED, FEWER = 0.25, 3, 0.75
"""Worth autotuning: predicted to take at most so much longer than the best; so many plans, with the best; each with at most
this part of the messages of the one before it."""


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
    return [each for each, _ in tried]


def _messages(plan: Plan, graph: Graph) -> int:
    """Messages of one step, from all devices."""
    steps = lower(plan, graph).steps
    rounds = [each for step in steps if not isinstance(step, Compute) for each in step.schedule.rounds]
    return sum(transfer.sender != transfer.receiver for each in rounds for transfer in each)
