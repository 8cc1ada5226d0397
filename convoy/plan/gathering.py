"""Which parameters are gathered from their shares together, and when: begun before they are needed, freed when they are not."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from convoy.layout.layout import Layout, holders
from convoy.model.graph import Graph, Parameter


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered together.

    Attributes:
        devices: that compute with them.
        freed: their whole copies are freed after use.
        layers: that compute with them.
    """

    parameters: tuple[Parameter, ...]
    devices: tuple[int, ...]
    freed: bool
    layers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Turn:
    """Around one layer: the buckets that set out before it, and the parameters that are freed after it, by key."""

    begins: list[Bucket] = field(default_factory=list)
    frees: list[str] = field(default_factory=list)


def buckets_of(graph: Graph, used: Mapping[str, Layout], freed: Collection[str], bucket_entries: int) -> list[Bucket]:
    """The parameters that are gathered, in the order in which they are used.

    Args:
        used: those that are gathered, by key, with the layout in which layers compute with them.
        freed: keys of those that are freed after use.
        bucket_entries: a bucket is full with so many; a larger parameter has one of its own.
    """
    found: list[Bucket] = []
    filled: dict[tuple[tuple[int, ...], bool], list[tuple[Parameter, str]]] = {}
    sent = 0
    rows = {p.key: (p, layer.name) for layer in graph.layers.values() for p in layer.parameters.values()}
    for key, row in rows.items():
        if key not in used:
            continue
        kind = (holders(used[key]), key in freed)
        if row[0].entries >= bucket_entries:
            found.append(_bucket([row], *kind))
            sent += row[0].entries
            continue
        filled.setdefault(kind, []).append(row)
        size = sum(p.entries for p, _ in filled[kind])
        # The first layers wait for theirs, so the first are small.
        if size >= min(bucket_entries, max(bucket_entries // 16, sent)):
            found.append(_bucket(filled.pop(kind), *kind))
            sent += size
    return found + [_bucket(rest, *kind) for kind, rest in filled.items()]


def _bucket(rows: Sequence[tuple[Parameter, str]], devices: tuple[int, ...], freed: bool) -> Bucket:
    return Bucket(tuple(p for p, _ in rows), devices, freed, frozenset(layer for _, layer in rows))


def turns(buckets: Sequence[Bucket], order: Sequence[str]) -> dict[str, Turn]:
    """When buckets that are freed set out and are freed, by layer. Each sets out when the one before it is used first.

    Args:
        order: the layers, in the order in which they are computed.
    """
    places = {name: place for place, name in enumerate(order)}
    spans = []
    for bucket in buckets:
        used_at = [places[name] for name in bucket.layers if name in places]
        if used_at:
            spans.append((min(used_at), max(used_at), bucket))
    spans.sort(key=lambda span: span[:2])
    found: dict[str, Turn] = {}
    for number, (first, last, bucket) in enumerate(spans):
        begins = spans[number - 1][0] if number else first
        found.setdefault(order[begins], Turn()).begins.append(bucket)
        found.setdefault(order[last], Turn()).frees.extend(p.key for p in bucket.parameters)
    return found
