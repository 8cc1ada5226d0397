"""Step lists as lines of text, and plans in short form."""

from convoy.layout.layout import Layout
from convoy.layout.shares import even
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import ComputeStep, GatherStatistics, Move, ReturnGradient, StepList, SumGradients
from convoy.plan.strategy import Batch, One, Strategy
from tests.support.one_device import by_name, graph_of

ALL = (0, 1, 2, 3)
TWO_CONV = ("conv1", "relu", "pool", "conv2", "relu_1", "pool#2", "flatten", "fc")


def spelled(steps: StepList, phase: str) -> list[str]:
    """Return one line per step: which device computes, and which value moves between which layouts."""
    return [_line(step) for step in steps.steps if step.phase == phase]


def _line(step: object) -> str:
    match step:
        case ComputeStep(layer=layer, phase="forward"):
            return f"{layer}: {' & '.join(str(v.layout) for v in step.reads)} -> {step.writes.layout}"
        case ComputeStep(layer=layer):
            return f"{layer} back" if step.part == "all" else f"{layer} back ({step.part})"
        case Move(phase="forward"):
            return f"move {step.reads.key}: {step.reads.layout} -> {step.writes.layout}"
        case Move():
            return f"move back to {step.writes.key}"
        case ReturnGradient():
            return f"gradient of {step.writes.key}"
        case GatherStatistics():
            return f"statistics of {' & '.join(step.layers)}: {step.entries} from {','.join(map(str, step.members))}"
        case SumGradients():
            return f"sum over {','.join(map(str, step.devices))}: {' '.join(step.keys)}"
    raise AssertionError(step)


def two_conv(plan: str) -> StepList:
    return lower(by_name(plan, "two-conv"), graph_of("two-conv"))


def plan_of(graph: Graph, layers: dict[str, Strategy], otherwise: Batch | One | None = None, batch: int = 10) -> Plan:
    return Plan("mine", graph.fingerprint, 4, batch, layers, otherwise or Batch(even(batch, 4)))


def moves(steps: StepList, phase: str = "forward") -> list[tuple[str, Layout, Layout]]:
    found = [s for s in steps.steps if isinstance(s, Move) and s.phase == phase]
    return [(s.reads.key, s.reads.layout, s.writes.layout) for s in found]
