"""Groups nodes into regions: what passes between the nodes of one is not rows of the batch, so it becomes one layer."""

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from convoy.model.tracing.nodes import Untraceable
from convoy.model.tracing.values import is_form

Reads = Mapping[fx.Node, Collection[fx.Node]]
"""Of each node, the nodes that it waits for: whose tensors, or odd numbers, it reads."""


def regions(nodes: Sequence[fx.Node], reads: Reads, odd: Mapping[fx.Node, str], together: Sequence[Collection[fx.Node]],
            rows: Collection[fx.Node], of_batch: Collection[fx.Node] = ()) -> list[list[fx.Node]]:  # fmt: skip
    """The regions, each with its nodes in order.

    Args:
        nodes: all, in order.
        odd: whose value cannot pass from layer to layer, and why: all its readers join its region.
        together: nodes that must be in one region for another reason.
        rows: nodes that give several tensors; no region gives such a value.
        of_batch: odd nodes whose value the model may return.

    Raises:
        Untraceable: an odd value is an input or an output of the model.
    """
    order = {node: place for place, node in enumerate(nodes)}
    users: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
    for node in nodes:
        for read in reads[node]:
            users[read].append(node)
    groups = {node: {node} for node in nodes}
    for group in together:
        _unite(groups, group)
    for node in odd:
        returned = [n for n in users[node] if node in of_batch and (n.op == "output" or is_form(n))]
        _unite(groups, [node, *(n for n in users[node] if n not in returned)])
    while True:
        before = len({id(group) for group in groups.values()})
        found = {id(g): g for g in groups.values() if len(g) > 1 or any(n in odd for n in g)}
        for group in found.values():
            for node in [n for n in group if n in rows]:
                _unite(groups, [node, *users[node]])
            _unite(groups, [*groups[next(iter(group))], *_between(group, order, nodes, reads, users)])
        if len({id(group) for group in groups.values()}) == before:
            break
    result = [sorted(g, key=order.__getitem__) for g in found.values() if len(g) > 1 or any(n in odd for n in g)]
    for group in result:
        why = next((odd[n] for n in group if n in odd), "")
        for node in group:
            if node.op in ("placeholder", "output"):
                raise Untraceable(why, "" if node.op == "output" else node.meta["where"])
    return result


def _unite(groups: dict[fx.Node, set[fx.Node]], nodes: Collection[fx.Node]) -> None:
    union: set[fx.Node] = set().union(*(groups[node] for node in nodes))
    for node in union:
        groups[node] = union


def _between(
    group: Collection[fx.Node],
    order: Mapping[fx.Node, int],
    nodes: Sequence[fx.Node],
    reads: Reads,
    users: Mapping[fx.Node, Sequence[fx.Node]],
) -> list[fx.Node]:
    """The nodes on the way from one node of a group to another."""
    places = [order[node] for node in group]
    first, last = min(places), max(places)
    after, before = set(group), set(group)
    for node in nodes[first : last + 1]:
        if any(read in after for read in reads[node]):
            after.add(node)
    for node in reversed(nodes[first : last + 1]):
        if any(user in before for user in users[node]):
            before.add(node)
    return [node for node in after & before if node not in group]
