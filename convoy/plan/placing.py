"""Which layout each layer of a plan works in, and in which layouts parameters are used and kept."""

from collections.abc import Mapping
from dataclasses import replace

from convoy.errors import PlanError
from convoy.layout.layout import Layout, OnOne, Replicated, Split, holders
from convoy.layout.shares import rescale
from convoy.model.graph import Graph, Layer, Parameter
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, InShares, One, Placement, Strategy, follow, place


def placements(plan: Plan, graph: Graph, batch: int | None = None) -> dict[str, Placement]:
    """Placement of every layer, in order.

    Raises:
        PlanError: a named strategy does not fit its layer.
    """
    result: dict[str, Placement] = {}
    batch = plan.batch if batch is None else batch
    if batch < 1:
        raise PlanError(
            f"a batch of {batch}: a batch holds one sample at least; give 1 or more, or None for the plan's"
        )
    for layer in graph.layers.values():
        if layer.kind == "input":
            layout = _input_layout(plan, graph, layer, batch)
            result[layer.name] = Placement((), layout)
        else:
            result[layer.name] = _placement(plan, graph, layer, result, batch)
    return result


def parameter_layouts(plan: Plan, graph: Graph) -> dict[str, Layout]:
    """How every parameter and buffer is kept, by its `state_dict` key; it does not depend on the batch at hand."""
    return kept_layouts(plan, graph, used_layouts(graph, placements(plan, graph)))


def used_layouts(graph: Graph, placed: Mapping[str, Placement]) -> dict[str, Layout]:
    """What layers compute with, by key: parameters as they are kept, or gathered from their shares."""
    return {
        graph[name].parameters[key].key: layout
        for name, each in placed.items()
        for key, layout in each.parameters.items()
    }


def kept_layouts(plan: Plan, graph: Graph, used: Mapping[str, Layout]) -> dict[str, Layout]:
    """How parameters are kept that layers compute with in these layouts."""
    kept = dict(used)
    for name, how in plan.in_shares.items():
        kept |= {p.key: _in_shares(how, p, used[p.key]) for p in graph[name].trainable}
    return kept


def _in_shares(how: InShares, parameter: Parameter, used: Layout) -> Layout:
    """A parameter that several devices use whole is cut along its first axis; any other stays as it is used."""
    if not isinstance(used, Replicated) or len(used.devices) == 1 or not parameter.shape:
        return used
    return Split(0, rescale(how.shares, parameter.shape[0]))


def is_gathered(kept: Layout, used: Layout) -> bool:
    """Whether a parameter is made whole from shares before it is used."""
    return isinstance(kept, Split) and isinstance(used, Replicated)


def own_strategy(plan: Plan, layer: Layer) -> Strategy | None:
    """A layer's own strategy. A second call of one module does what the first does: they share weights."""
    return plan.layers.get(layer.name) or plan.layers.get(layer.name.partition("#")[0])


def _placement(plan: Plan, graph: Graph, layer: Layer, placed: Mapping[str, Placement], batch: int) -> Placement:
    leading = next((placed[i].gives for i in layer.inputs if graph[i].batched), None)
    own = own_strategy(plan, layer)
    if own is not None and leading is not None and layer.batched and layer.kind != "pick":
        return place(graph, layer, own, batch, plan.devices)
    return unnamed(graph, layer, leading, plan.otherwise, batch, plan.devices)[1]


def unnamed(
    graph: Graph, layer: Layer, leading: Layout | None, otherwise: Strategy, batch: int, devices: int
) -> tuple[Strategy | None, Placement]:
    """What a layer does that has no strategy of its own, with its placement: it follows its input (None), or does as the
    plan's other layers do.

    Args:
        leading: layout of its first batched input; None where it has none.
        otherwise: see `Plan.otherwise`.

    Raises:
        PlanError: `otherwise` does not fit the layer.
    """
    if leading is not None and layer.kind == "pick":
        return None, Placement((leading,), leading)
    # Without a batched input it is made from parameters alone: every device has it.
    reads_batch = leading is not None and layer.batched
    if leading is not None and reads_batch and (not layer.weighted or layer.groups > 1):
        followed = follow(graph, layer, leading, devices)
        if followed is not None:
            return None, followed
    if isinstance(otherwise, Batch) and not layer.per_sample:
        # The device with the most samples is the fastest by the plan's own account.
        otherwise = One(otherwise.shares.index(max(otherwise.shares)))
    placed = place(graph, layer, otherwise, batch, devices)
    if reads_batch:
        note = f"cannot keep {leading}" + (f": {layer.reason}" if layer.reason else "")
        placed = replace(placed, note="" if placed.gives == leading else note)
    return otherwise, placed


def _input_layout(plan: Plan, graph: Graph, layer: Layer, batch: int) -> Layout:
    """Data is loaded where the first layers want it, so that no image crosses the network."""
    wants = _wants(plan, graph, layer, batch, {})
    if len(wants) == 1:
        (only,) = wants
        if isinstance(only, Replicated | OnOne) or (isinstance(only, Split) and only.axis == 0):
            return only
        return Replicated(holders(only))
    if not wants:
        own = place(graph, layer, plan.otherwise, batch, plan.devices)
        return own.gives
    # The devices of a whole batch, for a smaller one too: those that a small one leaves out would miss its running statistics.
    wants |= _wants(plan, graph, layer, max(batch, plan.batch), {})
    return Replicated(tuple(sorted({d for layout in wants for d in holders(layout)})))


def _wants(plan: Plan, graph: Graph, layer: Layer, batch: int, known: dict[str, set[Layout]]) -> set[Layout]:
    """The layouts in which the layers after `layer` take its output, looking through layers that follow."""
    if layer.name in known:
        return known[layer.name]
    wants: set[Layout] = set()
    for reader in graph.readers[layer.name]:
        own = own_strategy(plan, reader)
        follows = own is None and not (reader.weighted and reader.groups == 1) and reader.per_sample
        if follows and not reader.random:
            wants |= _wants(plan, graph, reader, batch, known)
        else:
            if own is not None:
                placed = place(graph, reader, own, batch, plan.devices)
            else:
                placed = unnamed(graph, reader, None, plan.otherwise, batch, plan.devices)[1]
            wants.add(placed.takes[reader.inputs.index(layer.name)])
    known[layer.name] = wants
    return wants
