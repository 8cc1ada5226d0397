"""Plans that fit the devices' memory.

Where the fastest plans do not fit, the search is repeated with a penalty on memory, and last with all weights freed after use.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from convoy.errors import PlanError
from convoy.layout.shares import apportion
from convoy.plan.plan import Plan
from convoy.plan.presets import SHARE_UNITS
from convoy.plan.steps import micro_batches
from convoy.plan.strategy import Batch, One, Sharding, can_shard
from convoy.planner.analytic import DIRECT_DEVICES, CostModel, MemoryPenalty
from convoy.planner.load_balance import batch_shares
from convoy.planner.search import Found, Search, in_order, model_s
from convoy.simulate.memory import memory_of, memory_of_passes, memory_of_steps, most_bytes

MEMORY_ATTEMPTS = 8
"""Attempts to save memory, each at a higher price, for each set of devices."""


def fits(plan: Plan, model: CostModel) -> bool:
    room = model.request.room
    return not room.limited or not room.excess(_memory(plan, model))


def _memory(plan: Plan, model: CostModel) -> tuple[int, ...]:
    """Return the bytes needed on each device. Where all fits easily, this is an upper limit."""
    graph, room, itemsize = model.graph, model.request.room, model.costs.itemsize
    most = most_bytes(model.steps(plan), graph, optimizer=room.optimizer, itemsize=itemsize)
    if not room.excess(most):
        return most
    # The first micro-batch keeps what it has gathered or sent. Those between need less than it or the last.
    kinds = [kind for kind in micro_batches(model.request.micro_batches if plan.sharded else 1) if kind != "middle"]
    lists = [model.steps(plan, kind) for kind in kinds]
    return tuple(row.total_bytes for row in memory_of_passes(lists, graph, optimizer=room.optimizer, itemsize=itemsize))


def that_fit(model: CostModel, found: Sequence[Found], order: Sequence[int], remedy: Callable[[], str]) -> list[Found]:
    """Return the plans that fit. If the fastest one does not, search for more that save memory.

    Args:
        remedy: returns the number of micro-batches with which some plan fits, in the words of `passes_words`.

    Raises:
        PlanError: no plan fits.
    """
    room = model.request.room
    lean = model.request.sums or "ring"  # in a ring, less of a tensor arrives at once than directly
    needs = [(each, _memory(each.plan, model)) for each in in_order(found)]
    for each, need in list(needs):
        if room.excess(need) and each.plan.reduce == "direct" and lean != "direct":
            plan = replace(each.plan, reduce=lean)
            needs.append((Found(model_s(model, order, plan), each.working, plan), _memory(plan, model)))
    fitting = [each for each, need in needs if not room.excess(need)]
    if not needs or (fitting and fitting[0] is needs[0][0]):
        return fitting
    largest = sorted(order, key=lambda d: (-room.bytes_of(d), order.index(d)))
    tried: list[tuple[int, ...]] = []
    for ranking in (order, largest):
        for count in _few_counts(len(order)):
            # The set decides, and who works alone where one does; who comes second does not.
            active = (ranking[0], *sorted(ranking[1:count]))
            if active not in tried:
                tried.append(active)
                for keepers in ((), tuple(order)):
                    # Of many devices each sends a share to each: only where nothing else fits.
                    if keepers and fitting and len(order) > DIRECT_DEVICES:
                        continue
                    for each, need in _saving_memory(model.variant(reduce=lean), active, keepers):
                        needs.append((each, need))
                        if not room.excess(need):
                            fitting.append(each)
    for each, need in freeing_weights(model, order):
        needs.append((each, need))
        if not room.excess(need):
            fitting.append(each)
    if not fitting:
        raise PlanError(room.refusal(model.graph.model, model.batch, [need for _, need in needs], remedy()))
    return fitting


def freeing_weights(model: CostModel, order: Sequence[int]) -> list[tuple[Found, tuple[int, ...]]]:
    """Return plans in which all weights are sharded and freed after use, with the bytes that each needs.

    What is left on a device is its samples, so these move from overfilled devices to others until the plan fits.
    """
    graph, batch, room = model.graph, model.batch, model.request.room
    parts = [min(room.bytes_of(d), 1e18) if d in order else 0.0 for d in range(model.devices)]
    how = Sharding(apportion(SHARE_UNITS, parts), "free")
    kept = {layer.name: how for layer in graph.layers.values() if can_shard(layer)}
    samples = list(batch_shares(model, order))
    rows: list[tuple[Found, tuple[int, ...]]] = []
    # Of more devices each would send a share to each.
    for _ in range(MEMORY_ATTEMPTS if kept and 1 < len(order) <= DIRECT_DEVICES else 0):
        plan = Plan(
            "auto", graph.fingerprint, model.devices, batch, {}, Batch(tuple(samples)), model.reduce,
            wire=model.request.wire, sharded=kept, outputs=model.request.outputs,
        )  # fmt: skip
        memory = memory_of_steps(model.steps(plan), graph, optimizer=room.optimizer, itemsize=model.costs.itemsize)
        need = tuple(each.total_bytes for each in memory)
        rows.append((Found(model_s(model, order, plan), len(order), plan), need))
        excess = room.excess(need)
        sample_bytes = max(each.activations_bytes / n for each, n in zip(memory, samples, strict=True) if n)
        if not excess or not sample_bytes:
            break
        left = [int(min(batch, max(0.0, (room.bytes_of(d) - need[d]) / sample_bytes))) for d in range(model.devices)]
        given = {d: min(samples[d], math.ceil(over / sample_bytes)) for d, over in excess.items()}
        if sum(left) < sum(given.values()):
            break
        taken = apportion(
            sum(given.values()), [n * s for n, s in zip(left, model.request.speeds.devices, strict=True)], at_most=left
        )
        samples = [n - given.get(d, 0) + taken[d] for d, n in enumerate(samples)]
    return rows


def _few_counts(devices: int) -> list[int]:
    """Return all numbers of devices up to 16, then ever larger steps."""
    counts = list(range(1, min(devices, 16) + 1))
    while counts[-1] < devices:
        counts.append(min(devices, counts[-1] * 3 // 2))
    return counts


def _saving_memory(
    model: CostModel, active: Sequence[int], keepers: Sequence[int]
) -> list[tuple[Found, tuple[int, ...]]]:
    """Return plans of these devices that save ever more memory, up to the first that fits.

    Args:
        keepers: devices that may keep shards of weights that others use.
    """
    plain, room = Search(model, active), model.request.room
    alone_s = model.samples_s(active[0], model.batch)
    # One device alone keeps everything: shares of an axis are held to what part of that a device has room for.
    alone = Plan("alone", model.graph.fingerprint, model.devices, model.batch, {}, One(active[0]))
    needs = memory_of(alone, model.graph, optimizer=room.optimizer, itemsize=model.costs.itemsize)
    everything = max(each.total_bytes for each in needs)
    budget = [float(room.bytes_of(d)) for d in range(model.devices)]
    price = [0.0] * model.devices
    rows: list[tuple[Found, tuple[int, ...]]] = []
    for attempt in range(MEMORY_ATTEMPTS):
        parts = tuple(min(1.0, each / everything) for each in budget)
        penalty = MemoryPenalty(parts, tuple(price))
        search = Search(model, active, penalty=penalty, keepers=keepers)
        _, plan = search.run()[0]
        rows.append((Found(plain.step_s(plan), len(active), plan), _memory(plan, model)))
        excess = room.excess(rows[-1][1])
        if not excess or len(active) == 1:  # alone there is nothing to split
            break
        for device, over in excess.items():
            price[device] = max(4 * price[device], alone_s / room.bytes_of(device))
            # A high price turns copies and whole layers into splits; only then do smaller shares of them help.
            if attempt >= MEMORY_ATTEMPTS // 2:
                budget[device] = max(budget[device] - over, budget[device] / 2)
    return rows
