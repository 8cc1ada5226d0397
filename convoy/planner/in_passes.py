"""In how many passes a step is best made: in several where memory asks for it, since a pass holds its own samples alone."""

from dataclasses import dataclass, replace

from convoy.errors import PlanError
from convoy.plan.presets import Speeds
from convoy.planner.analytic import CostModel
from convoy.planner.memory import fits
from convoy.planner.planner import quick_candidates, quick_in_passes
from convoy.planner.predict import PlanningContext, PlanPrediction, predict_plan
from convoy.planner.speeds import solo_speeds
from convoy.simulate.memory import sees_batch

MUCH = 1.2
"""Several passes are proposed where in one no plan fits, or the best that does takes at least so many times as long."""


@dataclass(frozen=True, slots=True)
class InPasses:
    """A step of several passes.

    Attributes:
        context: of one pass.
        best: a plan that fits, with what is predicted of a pass in the mean.
    """

    context: PlanningContext
    best: PlanPrediction

    @property
    def passes(self) -> int:
        return self.context.passes

    @property
    def step_s(self) -> float:
        """Of the whole step."""
        return self.best.step_s * self.passes


def split(context: PlanningContext, passes: int) -> PlanningContext:
    """The context of one of so many equal passes.

    Raises:
        PlanError: the batch has no so many equal parts.
    """
    if passes < 1 or context.batch % passes:
        raise PlanError(
            f"a step of {context.batch} samples in {passes} passes: the passes of a step must be equal; give a number that "
            f"divides {context.batch}"
        )
    batch, all_passes = context.batch // passes, context.passes * passes
    speeds = Speeds(solo_speeds(context.graph, batch, context.costs, all_passes))
    return replace(context, batch=batch, passes=all_passes, speeds=speeds)


def proposal(context: PlanningContext, step_s: float | None) -> InPasses | None:
    """A step of several passes that fits, and is much shorter than the best in one; None where there is none.

    Args:
        step_s: predicted seconds of the best step in one pass; None: no plan fits.
    """
    graph, room = context.graph, context.room
    model = CostModel(
        graph, context.batch, context.costs, wire=context.wire, passes=context.passes, outputs=context.outputs
    )
    if not room.limited:
        return None
    fastest = quick_candidates(
        graph, context.batch, context.costs, wire=context.wire, reduce=context.reduce, passes=context.passes,
        outputs=context.outputs,
    )  # fmt: skip
    if fits(fastest[0].plan, model, room):
        return None  # memory takes nothing away
    some = quick_in_passes(model, room, context.reduce)
    if some is None:
        return None
    smaller = split(context, some[0] // context.passes)
    found = InPasses(smaller, predict_plan(some[1].plan, smaller))
    return found if step_s is None or step_s > MUCH * found.step_s else None


def as_memory_asks(context: PlanningContext) -> PlanningContext:
    """The context of a step in one pass; of a pass, where the step is to be made in several: see `MUCH`.

    A net that makes other numbers of a batch in parts stays in one pass: a person has to say that this may be.
    """
    if not context.room.limited or sees_batch(context.graph):
        return context
    try:
        best = context.candidates()[0].step_s
    except PlanError:
        best = None
    found = proposal(context, best)
    return context if found is None else found.context
