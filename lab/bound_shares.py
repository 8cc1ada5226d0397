"""What one device and the others must compute, wait for and send, by the share of each layer that the device has; a part of
`tight_bound.py`.

**Three sums.** Of each layer of a path, in which each reads the one before, the device has the share x and the others have the
rest. A step takes at least, and so at least any mean of: the *chain* of entries (`bound_wire.py`), r x^2 + R (1 - x)^2 seconds
of a layer, where R = 1 / (sum of 1 / r of the others); what the device *computes*, r x, and behind it half of the gradients
that it shares; what passes its *card*. With fixed weights for the three, the least mean of all plans is a shortest way through
the places (`share_places.py`) of one layer after the other. Any weights are right: the largest bound counts.

**Statistics.** A batch norm over samples on several devices runs around an exchange and needs, forward and backward, a message
of every other device. The last device to come has them already, so a chain that may go on on any device, behind any other, pays
their latency where the two are not the same: 2 x (1 - x) times in the mean, which falls to no less when shares are rounded,
since it is concave. To avoid it all samples must come together, by features or on one side: those bytes are counted.

**Copies.** A layer without weights is computed on both sides only if what it reads first is there on both sides.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from convoy.model.graph import Graph, Layer
from convoy.plan.lower import BUCKET_ENTRIES
from convoy.simulate.costs import Costs
from lab.bound_wire import LOSS, Kinds, Waits, evenly, layer_s
from lab.lower_bound import least_s
from lab.share_places import STEPS, Floats, Places

OF_CARD = (0.005, 0.01, 0.02, 0.03, 0.045, 0.06, 0.08, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7)
OF_DEVICE = (0.0, 0.1, 0.25)
"""The weights that are tried: for the card; for the device's computing, of what that leaves. The chain has the rest."""

PLACES = Places.of(STEPS)


def shares_s(
    graph: Graph, batch: int, costs: Costs, path: Sequence[Sequence[Layer]], kinds: Kinds, device: int, itemsize: int,
    passes: int,
) -> float:  # fmt: skip
    """Return a lower bound of the step from one device's shares of a path's layers."""
    layers = [layer for group in path for layer in group]
    found = Sums(graph, batch, costs, kinds, device, itemsize, passes)
    of_card = np.repeat(OF_CARD, len(OF_DEVICE))
    of_device = np.tile(OF_DEVICE, len(OF_CARD)) * (1 - of_card)
    of_chain = 1 - of_card - of_device

    def mean(layer: Layer) -> Floats:
        chain, busy, card = found.of_layer(layer)
        return np.outer(of_chain, chain) + np.outer(of_device, busy) + np.outer(of_card, card)

    total = mean(layers[0])
    total[:, PLACES.copies] = np.inf
    for source, layer in itertools.pairwise(layers):
        between = np.multiply.outer(of_card, found.passed_s(source, layer))
        between += np.multiply.outer(of_chain, found.waited_s(source, layer))
        total = (total[:, :, None] + between).min(axis=1) + mean(layer)
    # What channels make at the end comes together somewhere.
    total[:, PLACES.channels] += (of_card * found.entries(layers[-1]) * found.card_s)[:, None]
    loss_s = dict(zip(kinds.names, kinds.seconds, strict=True)).get(LOSS)
    waited_s = 0.0 if loss_s is None else evenly(loss_s.tolist(), kinds.count)  # between forward and backward
    apart_s = of_chain * (kinds.apart_s.min() + waited_s) + of_device * kinds.apart_s[kinds.of_device[device]]
    return float((total.min(axis=1) + apart_s).max())


class Sums:
    """The three sums within a layer and between two layers, for each place."""

    def __init__(
        self, graph: Graph, batch: int, costs: Costs, kinds: Kinds, device: int, itemsize: int, passes: int
    ) -> None:
        self.graph, self.batch, self.costs, self.device, self.passes = graph, batch, costs, device, passes
        self.waits = Waits(graph, batch, costs, itemsize)
        self.own, self.first = kinds.of_device[device], [kinds.of_device.index(k) for k in range(len(kinds.count))]
        self.others = kinds.count.copy()
        self.others[self.own] -= 1
        network, host = costs.network, costs.network.host[device]
        sent, received = network.send_bytes_per_s[host], network.receive_bytes_per_s[host]
        # Per entry: both NIC directions at once, or the faster one.
        self.card_s, self.one_way_s = itemsize / (sent + received), itemsize / max(sent, received)
        trained = {p.key: p.entries for name in self.waits.back for p in graph[name].trainable}
        self.together = sum(trained.values()) < BUCKET_ENTRIES
        others = [d for d in range(network.devices) if d != device]
        latency_s = min(min(network.latency_s[device][d], network.latency_s[d][device]) for d in others)
        self.message_s = latency_s

    def entries(self, layer: Layer) -> int:
        """Return the entries of a layer's output."""
        return self.batch * math.prod(layer.shape)

    def of_layer(self, layer: Layer) -> tuple[Floats, Floats, Floats]:
        """Return seconds of the chain, the device and its NIC."""
        back = layer.name in self.waits.back
        chain, busy = self._computed(layer, back)
        card = np.zeros_like(chain)
        if layer.statistics:
            x = PLACES.share[PLACES.samples]
            chain[PLACES.samples] += 2 * x * (1 - x) * self.message_s * (2 if back else 1)
        if layer.weighted and back:
            weights = sum(p.entries for p in layer.trainable) / self.passes
            card[PLACES.samples] = 2 * weights * self.card_s
            if self.together:
                busy[PLACES.samples] += weights / 2 * self.one_way_s
        return chain, busy, card

    def passed_s(self, source: Layer, layer: Layer) -> Floats:
        """Return NIC seconds for the tensor between two layers and its gradient."""
        entries = self.entries(source) * (2 if source.name in self.waits.back else 1)
        leading = next(name for name in layer.inputs if self.graph[name].batched)
        passed = PLACES.weighted if layer.weighted else PLACES.following if leading == source.name else PLACES.plain
        found: Floats = entries * self.card_s * passed
        return found

    def waited_s(self, source: Layer, layer: Layer) -> Floats:
        """Return chain seconds spent waiting for messages between two layers; see `Places`."""
        one_way_s, each = self.entries(source) * self.one_way_s, 1 / self.others.sum()
        if not layer.weighted:
            returned = layer.name in self.waits.back and source.name in self.waits.back and not layer.multiplies
            apart: Floats = one_way_s * (2 if returned else 1) * (PLACES.waits + PLACES.waits_of_each * each)
            return apart
        waits: Floats = one_way_s * PLACES.waits_weighted * each
        read = one_way_s * (PLACES.reads + PLACES.reads_of_each * each)
        forward = self._chain_s([least_s(self.costs.times, d, layer, "forward", self.batch) for d in self.first])
        middle = PLACES.features.start + STEPS // 2
        if read[middle, middle] > forward[middle]:
            read[:, PLACES.features] -= forward[PLACES.features]
            waits = waits + read
        return waits

    def _computed(self, layer: Layer, back: bool) -> tuple[Floats, Floats]:
        rows = [self.waits.seconds(d, layer) for d in self.first]
        chain = self._chain_s(rows)
        # A mean of squares of shares that are rounded at random is larger than the square by so much at most.
        chain[2:] -= (rows[self.own] + evenly(rows, self.others)) / (2 * STEPS) ** 2
        chain[PLACES.copies] = min(rows)
        return chain, PLACES.share * layer_s(self.costs, self.device, layer, self.batch, back)

    def _chain_s(self, rows: Sequence[float]) -> Floats:
        """Return chain seconds of a layer, given each device kind's seconds for all of it."""
        chain: Floats = rows[self.own] * PLACES.share**2 + evenly(rows, self.others) * (1 - PLACES.share) ** 2
        return chain
