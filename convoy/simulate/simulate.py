"""Simulates a step on devices and links that exist only as numbers: when each computes, sends and receives.

`price.py` gives the operations of the device programs their seconds and bytes, `events.py` plays all of them together.
"""

from convoy.model.graph import Graph
from convoy.plan.steps import StepList
from convoy.simulate.costs import Costs
from convoy.simulate.events import HELD_BYTES, Event, Timeline, play
from convoy.simulate.price import programs

__all__ = ["Costs", "Event", "Timeline", "simulate"]


def simulate(steps: StepList, graph: Graph, costs: Costs, *, overlap: bool = True) -> Timeline:
    """Simulate one training step.

    Args:
        overlap: False: as if every move and sum were awaited where it stands in the list, by its senders, too, and nothing
            were sent before it is asked for; to see what overlap brings.
    """
    return play(programs(steps, graph, costs, overlap=overlap), costs.network, HELD_BYTES if overlap else 0)
