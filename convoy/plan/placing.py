"""Compute the layouts of layers under a plan, and the layouts in which parameters are used and kept.

In evaluation, every layer computes on the devices that hold its parameters in training. The evaluation graph may differ:
dropout becomes an identity, a layer no longer reads the global batch, an auxiliary output is missing. A layer that follows its
input could then be placed on devices without its parameters. `pin` gives such layers their own strategy.
"""

from collections.abc import Mapping
from dataclasses import replace

from convoy.errors import PlanError
from convoy.layout.layout import (
    Layout,
    OnOne,
    Replicated,
    Split,
    Tiles,
    Windows,
    entries,
    everywhere,
    holders,
    intersection,
)
from convoy.layout.shares import apportion, rescale
from convoy.model.graph import Graph, Layer
from convoy.plan.device_program import exchanges_statistics
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Filter, One, Placement, Spatial, Strategy, can_shard, follow, in_tiles, place


def placements(plan: Plan, graph: Graph, batch: int | None = None) -> dict[str, Placement]:
    """Return the placement of every layer, in order.

    Raises:
        PlanError: a named strategy does not fit its layer.
    """
    result: dict[str, Placement] = {}
    batch = plan.batch if batch is None else batch
    if batch < 1:
        raise PlanError(
            f"a batch of {batch}: a batch has at least one sample; give 1 or more, or None for the plan's batch"
        )
    for name, layer in graph.layers.items():
        leading = next((result[i].gives for i in layer.inputs if graph[i].batched), None)
        own = own_strategy(plan, layer)
        if layer.kind == "input":
            result[name] = Placement((), _input_layout(plan, graph, layer, batch))
        elif own is not None and leading is not None and layer.batched and layer.kind != "pick":
            result[name] = place(graph, layer, own, batch, plan.devices)
        else:
            result[name] = unnamed(graph, layer, leading, plan.otherwise, batch, plan.devices)[1]
    _compute_borders(graph, result)
    return result


MOST_BORDER = 1.25
"""Largest number of entries that a device computes with a border, divided by those of its tile."""


def _compute_borders(graph: Graph, placed: dict[str, Placement]) -> None:
    """Let layers compute the windows that their only reader reads, where this saves an exchange or a copy of a tile."""
    for layer in reversed(list(graph.layers.values())):
        for name, wanted in zip(layer.inputs, placed[layer.name].takes, strict=True):
            placed |= _extended(graph, placed, graph[name], wanted)


def _extended(
    graph: Graph, placed: Mapping[str, Placement], layer: Layer, wanted: Layout, *, activations: bool = True
) -> dict[str, Placement]:
    """Return placements of a layer, and of layers before it, that give the windows `wanted`; none if this saves no exchange.

    With `activations`, extend an activation after a norm, too: if its input is exchanged, its tile is not kept twice.
    """
    at = placed[layer.name].gives
    if not isinstance(at, Tiles) or not isinstance(wanted, Windows):
        return {}
    rows = [(w, t) for w, t in zip(wanted.boxes, at.boxes, strict=True) if w is not None]
    if any(t is None or intersection(w, t) != t or entries(w) > MOST_BORDER * entries(t) for w, t in rows):
        return {}
    # A norm's statistics count each entry once. Inputs have one layout in training and evaluation.
    reads_input = any(graph[i].kind == "input" for i in layer.inputs)
    if reads_input or layer.random or layer.several or exchanges_statistics(layer, at):
        return {}
    readers = [each for reader in graph.readers[layer.name] for each in reader.inputs if each == layer.name]
    placement = None if len(readers) > 1 or layer.name in graph.outputs else in_tiles(graph, layer, wanted)
    if placement is None:
        return {}
    before: dict[str, Placement] = {}
    for name, needed in zip(layer.inputs, placement.takes, strict=True):
        before |= _extended(graph, placed, graph[name], needed, activations=False)
    exchanges = any(placed[i].gives != takes for i, takes in zip(layer.inputs, placed[layer.name].takes, strict=True))
    saves_copy = activations and layer.kind == "elementwise" and exchanges_statistics(graph[layer.inputs[0]], at)
    if not (before or exchanges or saves_copy):
        return {}
    return {layer.name: replace(placement, note=placed[layer.name].note), **before}


def parameter_layouts(plan: Plan, graph: Graph) -> dict[str, Layout]:
    """Return the layout of every parameter and buffer between steps, by `state_dict` key. It is the same for all batches."""
    return kept_layouts(plan, graph, used_layouts(graph, placements(plan, graph)))


def used_layouts(graph: Graph, placed: Mapping[str, Placement]) -> dict[str, Layout]:
    """Return the layouts in which layers compute with parameters, by key: as kept, or gathered from shards."""
    rows = ((graph[name].parameters, each.parameters) for name, each in placed.items())
    return {parameters[name].key: layout for parameters, layouts in rows for name, layout in layouts.items()}


def kept_layouts(plan: Plan, graph: Graph, used: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts of parameters between steps. `used`: their layouts during computation."""
    kept = dict(used)
    for name, how in plan.sharded.items():
        for p in graph[name].trainable:
            layout = used[p.key]
            if isinstance(layout, Replicated) and len(layout.devices) > 1 and p.shape:
                kept[p.key] = Split(0, rescale(how.shares, p.shape[0]))
    return kept


def own_strategy(plan: Plan, layer: Layer) -> Strategy | None:
    """Return a layer's own strategy, if any. All calls of one module share weights, so they share its strategy."""
    return plan.layers.get(layer.name) or plan.layers.get(layer.name.partition("#")[0])


def unnamed(
    graph: Graph, layer: Layer, leading: Layout | None, otherwise: Strategy, batch: int, devices: int
) -> tuple[Strategy | None, Placement]:
    """Place a layer without its own strategy. Return the plan's `otherwise`, or None if the layer follows its input.

    Args:
        leading: layout of the layer's first batched input; None: it has none.

    Raises:
        PlanError: `otherwise` does not fit the layer.
    """
    if leading is not None and layer.kind == "pick":
        return None, Placement((leading,), leading)
    # Without a batched input the layer depends only on parameters: every device computes it.
    reads_batch = leading is not None and layer.batched
    if leading is not None and reads_batch and (followed := follow(graph, layer, leading, devices)) is not None:
        return None, followed
    if isinstance(otherwise, Batch) and not layer.per_sample:
        # The device with the most samples is the fastest one, according to the plan.
        otherwise = One(otherwise.shares.index(max(otherwise.shares)))
    placed = place(graph, layer, otherwise, batch, devices)
    if reads_batch:
        note = f"cannot keep {leading}" + (f": {layer.reason}" if layer.reason else "")
        placed = replace(placed, note="" if placed.gives == leading else note)
    return otherwise, placed


def _input_layout(plan: Plan, graph: Graph, layer: Layer, batch: int) -> Layout:
    """Return the layout of an input: where its first readers are, so that no sample is sent."""
    readers = graph.readers[layer.name]
    is_read_once = len(readers) == 1 and layer.name not in graph.outputs
    if is_read_once and isinstance(own := own_strategy(plan, readers[0]), Spatial):
        return place(graph, readers[0], own, batch, plan.devices).takes[0]
    layouts = _layouts_read(plan, graph, (layer, layer), batch, {})
    if len(layouts) == 1:
        (only,) = layouts
        if isinstance(only, Replicated | OnOne | Tiles) or (isinstance(only, Split) and only.axis == 0):
            return only
        return Replicated(holders(only))
    if not layouts:
        return place(graph, layer, plan.otherwise, batch, plan.devices).gives
    if all(isinstance(layout, Tiles) for layout in layouts):
        return min(layouts, key=str)
    # Use the devices of a full batch for a smaller batch too: devices left out would miss its running statistics.
    layouts |= _layouts_read(plan, graph, (layer, layer), max(batch, plan.batch), {})
    return Replicated(tuple(sorted({d for layout in layouts for d in holders(layout)})))


def _layouts_read(
    plan: Plan, graph: Graph, ends: tuple[Layer, Layer], batch: int, known: dict[str, set[Layout]]
) -> set[Layout]:
    """Return the layouts in which layers read a layer's output. For layers that follow their input, look at their readers.

    Args:
        ends: an input of the graph, and the layer, which is the input or follows it. For readers in tiles, the result has tiles
            of the input.
    """
    source, layer = ends
    if layer.name in known:
        return known[layer.name]
    layouts: set[Layout] = set()
    for reader in graph.readers[layer.name]:
        own = own_strategy(plan, reader)
        follows = own is None and not (reader.weighted and reader.groups == 1) and reader.per_sample
        if follows and not reader.random:
            layouts |= _layouts_read(plan, graph, (source, reader), batch, known)
            continue
        if isinstance(own, Spatial) and len(source.shape) == len(reader.shape):
            layouts.add(own.tiles(source.batch_shape(batch)))
            continue
        if own is not None:
            placed = place(graph, reader, own, batch, plan.devices)
        else:
            placed = unnamed(graph, reader, None, plan.otherwise, batch, plan.devices)[1]
        taken = placed.takes[reader.inputs.index(layer.name)]
        # Tiles of a reader with other axes are no tiles of the input.
        layouts.add(Replicated(holders(taken)) if isinstance(own, Spatial) else taken)
    known[layer.name] = layouts
    return layouts


# --- evaluation ------------------------------------------------------------------------------------------------------


def pin(plan: Plan, training: Graph, evaluation: Graph) -> Plan:
    """Return the plan for the evaluation graph. Layers that would be placed without their parameters get a strategy.

    Raises:
        PlanError: the plan does not fit the training graph.
    """
    known = {name: s for name, s in plan.layers.items() if name in evaluation.layers}
    sharded = {n: s for n, s in plan.sharded.items() if n in evaluation.layers and can_shard(evaluation[n])}
    pinned = replace(plan, model=evaluation.fingerprint, layers=known, sharded=sharded)
    placed = placements(plan, training)
    homes = {name: placed[name].gives for name, layer in training.layers.items() if layer.parameters}
    while strays := _strays(pinned, training, evaluation, plan):
        moves = {name: _strategy_at(evaluation[name], homes[name], plan) for name in strays if name in homes}
        if moves.items() <= pinned.layers.items():
            break
        pinned = replace(pinned, layers={**pinned.layers, **moves})
    return pinned


def borrowed(pinned: Plan, plan: Plan, training: Graph, evaluation: Graph) -> dict[str, Layout]:
    """Return the parameters that must move for evaluation, and their layouts there. Ordinary models have none.

    For example, evaluation computes a layer as a whole, but training splits the layers inside it.

    Raises:
        PlanError: two layers need different parts of the same parameter.
    """
    result: dict[str, Layout] = {}
    strays = _strays(pinned, training, evaluation, plan).values()
    for key, wanted, is_there in (row for rows in strays for row in rows):
        before = result.get(key, wanted)
        if is_there and before == wanted:
            continue
        if before != wanted and (isinstance(before, Split) or isinstance(wanted, Split)):
            raise PlanError(
                f"in evaluation two layers need other parts of {key!r} than training keeps: give them the strategy 'one'"
            )
        result[key] = wanted if before == wanted else everywhere(plan.devices)
    return result


def _strays(pinned: Plan, training: Graph, evaluation: Graph, plan: Plan) -> dict[str, list[tuple[str, Layout, bool]]]:
    """For each evaluation layer that misses parameters, return (key, wanted layout, whether it is there) of each one."""
    kept, found = used_layouts(training, placements(plan, training)), {}
    for name, placed in placements(pinned, evaluation).items():
        rows = []
        for local, wanted in placed.parameters.items():
            key = evaluation[name].parameters[local].key
            have = kept.get(key, wanted)
            whole = isinstance(have, Replicated | OnOne) and isinstance(wanted, Replicated | OnOne)
            is_there = set(holders(wanted)) <= set(holders(have)) if whole else wanted == have
            rows.append((key, wanted, is_there))
        if not all(is_there for _, _, is_there in rows):
            found[name] = rows
    return found


def _strategy_at(layer: Layer, home: Layout, plan: Plan) -> Strategy:
    """Return the strategy that computes a layer where training has its output (`home`)."""
    match home:
        case OnOne(device):
            return One(device)
        case Split(axis, shares) if axis > 0:
            return Filter(shares)
        case Split(_, shares):
            return Batch(shares) if layer.per_sample else One(shares.index(max(shares)))
    devices = holders(home)
    if not layer.per_sample:
        return One(devices[0])
    return Batch(apportion(plan.batch, [float(d in devices) for d in range(plan.devices)]))
