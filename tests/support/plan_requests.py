"""Planning requests for given costs."""

from typing import Any

from convoy.fleet import Fleet
from convoy.model.graph import Graph
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.request import PlanRequest
from convoy.simulate.costs import Costs


def asked(graph: Graph, batch: int, costs: Costs, fleet: Fleet | None = None, **options: Any) -> PlanRequest:
    """Return a request for these costs; without a fleet, memory has no limits."""
    return PlanRequest(graph, batch, FleetKnowledge(fleet, given=costs), **options)
