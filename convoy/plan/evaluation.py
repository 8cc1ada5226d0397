"""The plan for evaluation: every layer computes where training keeps its parameters.

A model may be another one in evaluation: dropout passes its input on, a layer no longer looks at the whole batch, an
auxiliary output is gone. Layers that follow their input could then land elsewhere than in training, without parameters.
"""

from dataclasses import replace

from convoy.errors import PlanError
from convoy.layout.layout import Layout, OnOne, Replicated, Split, everywhere, holders
from convoy.layout.shares import apportion
from convoy.model.graph import Graph, Layer
from convoy.plan.placing import placements, used_layouts
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Filter, One, Strategy


def pin(plan: Plan, training: Graph, evaluation: Graph) -> Plan:
    """The plan for the graph of evaluation, with a strategy of its own for each layer that would leave its parameters.

    Raises:
        PlanError: the plan does not fit the graph of training.
    """
    known = {name: s for name, s in plan.layers.items() if name in evaluation.layers}
    # What training keeps in shares is gathered wherever evaluation uses it whole: see `lower`'s `kept`.
    pinned = replace(plan, model=evaluation.fingerprint, layers=known, in_shares={})
    placed = placements(plan, training)
    homes = {name: placed[name].gives for name, layer in training.layers.items() if layer.parameters}
    while strays := _strays(pinned, training, evaluation, plan):
        moves = {layer.name: _strategy_at(layer, homes[layer.name], plan) for layer in strays if layer.name in homes}
        if moves.items() <= pinned.layers.items():
            break
        pinned = replace(pinned, layers={**pinned.layers, **moves})
    return pinned


def borrowed(pinned: Plan, plan: Plan, training: Graph, evaluation: Graph) -> dict[str, Layout]:
    """Where the parameters of layers lie in evaluation that no strategy brings to them; nothing in ordinary models.

    A layer that is whole in evaluation only, of which training splits the inside, say.

    Raises:
        PlanError: two such layers want the same parameter in different parts.
    """
    kept, placed = used_layouts(training, placements(plan, training)), placements(pinned, evaluation)
    result: dict[str, Layout] = {}
    for layer in _strays(pinned, training, evaluation, plan):
        for name, wanted in placed[layer.name].parameters.items():
            key = layer.parameters[name].key
            before = result.get(key, wanted)
            if _held(wanted, kept.get(key, wanted)) and before == wanted:
                continue
            if before != wanted and (isinstance(before, Split) or isinstance(wanted, Split)):
                raise PlanError(
                    f"in evaluation two layers want other parts of {key!r} than training keeps: give them the strategy 'one'"
                )
            result[key] = wanted if before == wanted else everywhere(plan.devices)
    return result


def _strays(pinned: Plan, training: Graph, evaluation: Graph, plan: Plan) -> list[Layer]:
    kept, placed = used_layouts(training, placements(plan, training)), placements(pinned, evaluation)
    return [
        layer
        for layer in evaluation.layers.values()
        if any(
            not _held(wanted, kept.get(layer.parameters[key].key, wanted))
            for key, wanted in placed[layer.name].parameters.items()
        )
    ]


def _held(wanted: Layout, kept: Layout) -> bool:
    """Whether devices that keep a parameter in layout `kept` can compute a layer that wants it in layout `wanted`."""
    if isinstance(kept, Replicated | OnOne) and isinstance(wanted, Replicated | OnOne):
        return set(holders(wanted)) <= set(holders(kept))
    return wanted == kept


def _strategy_at(layer: Layer, home: Layout, plan: Plan) -> Strategy:
    """The strategy by which a layer computes where its output lies in training."""
    match home:
        case OnOne(device):
            return One(device)
        case Split(axis, shares) if axis > 0:
            return Filter(shares)
        case Split(_, shares) if layer.per_sample:
            return Batch(shares)
        case Split(_, shares):
            return One(shares.index(max(shares)))
    devices = holders(home)
    if not layer.per_sample:
        return One(devices[0])
    return Batch(apportion(plan.batch, [float(d in devices) for d in range(plan.devices)]))
