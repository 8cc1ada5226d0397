"""A lower bound on the step: what no exact plan of the vocabulary can take less than, however its shares are chosen.

It is proved for the cost model, not for the machine: of every plan that `lower` takes, the simulated step is at least so long,
by the same costs. Two things that no plan can avoid are added up, apart, and the larger is the bound.

**Computing.** Every entry that a layer makes is computed on one device at least, every trained entry is updated on one, and the
loss of every output is computed on one. Let
device d take at least r(l, d) seconds for the whole of item l, and at least f r(l, d) for a part f of it, whatever its shape
(`ComputeTimes.least_s`). Device d has T - o(d) seconds for its parts, where o(d) is what every device takes for a step beside
its layers. So sum over l of f(l, d) r(l, d) <= T - o(d) for each d, and sum over d of f(l, d) >= 1 for each l. Multiply the
first by any weights w(d) >= 0 that sum to 1, and add:

    T >= sum over d of w(d) o(d) + sum over l and d of w(d) f(l, d) r(l, d)
      >= sum over d of w(d) o(d) + sum over l of the least w(d) r(l, d) of all d.

The last line holds for *any* weights, so the search for good ones needs no proof.

**The wire of one device, and a chain of entries.** Where layers are shared out, something passes the cards, and where they are
not, devices wait for each other: `bound_wire.py`; and what a device has of one layer comes from who has the layer before:
`bound_shares.py`.
"""

from dataclasses import dataclass, replace

import numpy as np

from convoy.layout.comm_dtype import CommDtype, sent_itemsize
from convoy.model.graph import Graph
from convoy.planner.bound_shares import shares_s
from convoy.planner.bound_wire import LOSS, Kinds, path_of, wire_s
from convoy.simulate.costs import Costs

ROUNDS = 300
"""Of the search for weights; any weights are right."""

MORE = 1e-3
"""By so much more than computing the wire has to say, to be named: both say the same where all can be shared."""

CARDS = 4
"""Of so many devices the wire is looked at, the fastest."""


@dataclass(frozen=True, slots=True)
class LowerBound:
    """What no exact plan can take less than.

    Attributes:
        compute_s: by computing alone: layers_s, updates_s of the optimizer, apart_s beside them, and loss_s, as in the proof.
        wire_s: by the card of one device; 0: none says more than computing does.
        device: whose card that is.
    """

    layers_s: float
    updates_s: float = 0.0
    apart_s: float = 0.0
    loss_s: float = 0.0
    wire_s: float = 0.0
    device: int = -1

    @property
    def compute_s(self) -> float:
        return self.layers_s + self.updates_s + self.apart_s + self.loss_s

    @property
    def step_s(self) -> float:
        return max(self.compute_s, self.wire_s)


def lower_bound(graph: Graph, batch: int, costs: Costs, wire: CommDtype = "exact", passes: int = 1) -> LowerBound:
    """The bound for a pass of a global batch; where several make a step, of a pass in the mean.

    Args:
        wire: in which numbers tensors travel.
    """
    kinds = Kinds.of(graph, batch, costs, passes)
    best = LowerBound(*_computing_s(kinds))
    path = path_of(graph, batch, costs) if costs.network.devices > 1 else None
    if path is None:
        return best
    alone = kinds.seconds.sum(axis=0)
    hosts = costs.network.host
    single = [d for d in range(len(hosts)) if hosts.count(hosts[d]) == 1] if len(hosts) <= 64 else []
    for device in sorted(single, key=lambda d: (alone[kinds.of_device[d]], d))[:CARDS]:
        found_s = max(
            float(bound_s(graph, batch, costs, path, kinds, device, sent_itemsize(wire, costs.itemsize), passes))
            for bound_s in (wire_s, shares_s)
        )
        if found_s > best.step_s * (1 + MORE):
            best = replace(best, wire_s=found_s, device=device)
    return best


def _computing_s(kinds: Kinds) -> tuple[float, float, float, float]:
    """The largest bound of the weights that are tried, those that are even in time, then by multiplicative steps: what layers,
    updates, what is beside them, and the loss have of it."""
    seconds, apart_s, count = kinds.seconds, kinds.apart_s, kinds.count
    loss = kinds.names.index(LOSS) if LOSS in kinds.names else None
    total = np.maximum(seconds.sum(axis=0), 1e-300)
    weights = 1 / total  # a device that takes twice as long for everything has half the price of a second
    best = (0.0, 0.0, float(apart_s.max(initial=0.0)), 0.0)  # a device without a part takes that, too
    for step in range(ROUNDS):
        weights = weights / (weights * count).sum()
        priced = weights * seconds
        chosen = priced.argmin(axis=1)
        rows = np.arange(len(seconds))
        items = priced[rows, chosen]
        layers_s, beside_s = float(items[: kinds.layers].sum()), float((weights * count * apart_s).sum())
        loss_s = 0.0 if loss is None else float(items[loss])
        best = max(best, (layers_s, float(items.sum()) - layers_s - loss_s, beside_s, loss_s), key=sum)
        # The load of each kind where every item goes to whom it is cheapest for: who has more gets dearer.
        load = np.bincount(chosen, seconds[rows, chosen], len(weights)) / count + apart_s
        weights = weights * np.exp((load / max(load.max(), 1e-300) - 0.5) / (2.0 + step))
    return best
