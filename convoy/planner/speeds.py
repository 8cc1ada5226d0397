"""Predicted speeds of devices that train alone."""

from convoy.model.graph import Graph
from convoy.plan.presets import Speeds
from convoy.plan.size import whole_size
from convoy.planner.analytic import CostModel
from convoy.simulate.simulate import Costs


def solo_speeds(graph: Graph, batch: int, costs: Costs, passes: int = 1) -> tuple[float, ...]:
    """Samples/s of each device training alone with the whole batch: their sum is the limit of the fleet."""
    return CostModel(graph, batch, costs, passes=passes).solo_speeds()


def predicted_speeds(graph: Graph, batch: int, costs: Costs) -> Speeds:
    """Samples/s of each device on the whole model and on each weighted layer, as a measurement would give them."""
    layers = {}
    for layer in graph.weighted:
        size = whole_size(layer, batch)
        layers[layer.name] = tuple(
            batch / sum(costs.times.seconds(device, layer, phase, size) for phase in ("forward", "backward"))
            for device in range(costs.network.devices)
        )
    return Speeds(solo_speeds(graph, batch, costs), layers)
