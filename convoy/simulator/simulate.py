"""Replays a step list on devices and links that exist only as numbers: when each computes, sends and receives.

`programs.py` writes what each device does, as the executor does it; `replay.py` plays all of it together.
"""

from convoy.cost.costs import Costs
from convoy.model.graph import Graph
from convoy.plan.steps import StepList
from convoy.simulator.events import Event, Timeline, play
from convoy.simulator.price import programs

__all__ = ["Costs", "Event", "Timeline", "simulate"]


def simulate(steps: StepList, graph: Graph, costs: Costs, *, overlap: bool = True) -> Timeline:
    """Replay one training step.

    Args:
        overlap: False: as if every move and sum were awaited where it stands in the list, to see what overlap brings.
    """
    return play(programs(steps, graph, costs, overlap=overlap), costs.network)
