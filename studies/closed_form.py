"""Step times of the named plans on p equal devices, for thousands of points at once.

What is assumed, besides the plan itself:

- p equal devices, one per host; every host has one NIC, as fast in both directions, behind a switch that never fills.
- A layer takes max(FLOP / peak, bytes / memory bandwidth) for its local size; the largest share, ceil(K/p) filters or
  ceil(B/p) samples, sets the pace. Nothing else of a layer's time depends on its size: no cache, no kernel launch.
- Each step waits for the one before, on every device: nothing overlaps. With `overlap` gradient sums
  hide behind all of backward's arithmetic, the best that any overlap could do.
- A round of messages takes one latency, and the bytes of the fullest card; sums take their formula (`studies/collectives.py`).
- `message_s` is what a device spends on each message that it sends or receives (LogP's overhead). The replay has no such cost;
  it matters when hundreds of devices exchange directly.
- Adding what arrives, the loss, and loading images cost nothing. The optimizer moves its numbers through memory once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from convoy.layout.collectives import Reduce
from convoy.model.graph import Graph
from convoy.simulate.compute import SHARED_PASSES
from convoy.simulate.memory import optimizer_named
from studies import collectives
from studies.collectives import Floats, Numbers
from studies.points import Points
from studies.terms import (
    AtMaster,
    ByBatch,
    ByUnits,
    Carry,
    Copies,
    Place,
    Tell,
    Terms,
    Total,
    Trained,
    Work,
    named_terms,
)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step by cause, per point.

    Attributes:
        compute_s: arithmetic of the device with the largest shares.
        moves_s: moves of activations and their gradients, and batch statistics.
        sums_s: sums of gradients, as far as they are not hidden.
        update_s: the optimizer.
        busy_device_s: computing and updating, summed over all devices, for energy.
    """

    compute_s: Floats
    moves_s: Floats
    sums_s: Floats
    update_s: Floats
    busy_device_s: Floats

    @property
    def step_s(self) -> Floats:
        return self.compute_s + self.moves_s + self.sums_s + self.update_s


def plan_times(
    name: str,
    graph: Graph,
    points: Points,
    *,
    reduce: Reduce | None = None,
    optimizer: str = "sgd-momentum",
    overlap: bool = False,
    itemsize: int = 4,
) -> StepTimes:
    """Return the step times of a named plan.

    Args:
        name: data, data-by-speed (the same on equal devices), model, hybrid or master.
        reduce: how sums are made; default: the plan's own.
        overlap: hide gradient sums behind backward, as far as it lasts.

    Raises:
        InputError: unknown plan, reduce or optimizer.
    """
    terms = named_terms(name, graph, reduce)
    return times_of(terms, points, optimizer=optimizer, overlap=overlap, itemsize=itemsize)


def times_of(
    terms: Terms, points: Points, *, optimizer: str = "sgd-momentum", overlap: bool = False, itemsize: int = 4
) -> StepTimes:
    """Return the step times of a plan's terms; see `plan_times`."""
    at = _Evaluation(points, itemsize)
    zero = np.zeros(len(points))
    forward_s, backward_s, busy_s, moves_s, sums_s = zero, zero, zero, zero, zero
    for term in terms.steps:
        match term:
            case Work(phase=phase):
                longest_s, all_s = at.work(term)
                busy_s = busy_s + all_s
                if phase == "forward":
                    forward_s = forward_s + longest_s
                else:
                    backward_s = backward_s + longest_s
            case Carry():
                moves_s = moves_s + at.carry(term)
            case Tell():
                moves_s = moves_s + at.tell(term)
            case Total():
                sums_s = sums_s + at.total(term)
    update_s, updates_s = at.update(terms.trained, optimizer_named(optimizer).moved)
    shown_s = np.maximum(0.0, sums_s - backward_s) if overlap else sums_s
    return StepTimes(forward_s + backward_s, moves_s, shown_s, update_s, busy_s + updates_s)


class _Evaluation:
    """Seconds of terms at all points."""

    def __init__(self, points: Points, itemsize: int) -> None:
        self.at, self.itemsize = points, itemsize
        self.p, self.batch = points.devices, points.batch
        self.holders = np.minimum(self.p, self.batch)  # devices with samples
        self.beta = 1.0 / points.link_bytes_per_s
        self.alpha = points.latency_s

    # --- shares: device i of p has floor(U/p) units, and one more if i < U mod p ---

    def _units(self, place: Place) -> Floats:
        match place:
            case ByBatch():
                return self.batch
            case ByUnits(units):
                return np.full(len(self.p), float(units))
            case AtMaster() | Copies():
                return np.ones(len(self.p))

    def share(self, place: Place, device: Numbers) -> Floats:
        """Return the fraction of the whole that a device has; zero for a device that does not exist."""
        units = self._units(place)
        part = (np.floor(units / self.p) + (device < np.mod(units, self.p))) / units
        return np.where(np.asarray(device) < self.p, part, 0.0)

    # --- computing ---

    def work(self, term: Work) -> tuple[Floats, Floats]:
        """Return the seconds of the device with the largest share, and the sum over all devices."""
        if isinstance(term.place, Copies):
            alone_s = self._layer_s(term, np.ones(len(self.p)))
            return alone_s, alone_s * self._reach(term.place)
        units = self._units(term.place)
        more = np.mod(units, self.p)
        many = np.where(more > 0, more, self.p)  # so many devices have the larger share
        large_s = self._layer_s(term, np.ceil(units / self.p) / units)
        small_s = self._layer_s(term, np.floor(units / self.p) / units)
        return large_s, large_s * many + small_s * (self.p - many)

    def _layer_s(self, term: Work, part: Floats) -> Floats:
        """Return the roofline seconds of a part of a layer, as `cost.compute.Roofline` does."""
        samples = self.batch if term.batched else np.ones(len(self.p))
        products = term.products
        of_weights = np.where(part > 0, 1.0, 0.0) if isinstance(term.place, ByBatch) else part
        of_inputs = np.where(part > 0, 1.0, 0.0) if term.reads_all and not isinstance(term.place, ByBatch) else part
        moved = (samples * (term.entries * part + term.read * of_inputs) + term.weights * of_weights) * self.itemsize
        if term.statistics and isinstance(term.place, ByBatch):
            shared = SHARED_PASSES[term.phase] * samples * term.entries * part * self.itemsize / products
            moved = np.where(np.minimum(self.p, self.batch) > 1, shared, moved)
        arithmetic_s = term.flop * samples * part / (self.at.flop_per_s * self.at.efficiency)
        return np.asarray(products * np.maximum(arithmetic_s, moved / self.at.memory_bytes_per_s))

    def update(self, trained: tuple[Trained, ...], moved: int) -> tuple[Floats, Floats]:
        """Return the seconds of the device that holds most, and the sum over all devices."""
        largest, everywhere = np.zeros(len(self.p)), np.zeros(len(self.p))
        for each in trained:
            copied = isinstance(each.place, ByBatch | Copies)
            largest = largest + each.entries * (1.0 if copied else self.share(each.place, 0))
            everywhere = everywhere + each.entries * (self._reach(each.place) if copied else 1.0)
        per_entry_s = moved * self.itemsize / self.at.memory_bytes_per_s
        return largest * per_entry_s, everywhere * per_entry_s

    # --- moving ---

    def _reach(self, place: Place) -> Floats:
        """Return how many devices hold entries."""
        match place:
            case Copies(units):
                return np.minimum(self.p, max(units))
            case _:
                return np.minimum(self.p, self._units(place))

    def carry(self, term: Carry) -> Floats:
        n_bytes = term.entries * self.itemsize * (self.batch if term.batched else 1.0)
        if not isinstance(term.target, Copies):
            return self._seconds(n_bytes, *self._direct(term.source, term.target))
        total, before = np.zeros(len(self.p)), np.zeros(len(self.p))
        for units in term.target.units:
            copies = np.minimum(self.p, float(units))
            one_s = self._seconds(n_bytes, *self._to_copies(term.source, copies))
            # Readers on the same devices share one move.
            total, before = total + np.where(copies != before, one_s, 0.0), copies
        return total

    def _seconds(self, n_bytes: Numbers, load: Floats, messages: Floats) -> Floats:
        wire_s = self.alpha * (load > 0) + load * n_bytes * self.beta
        return np.asarray(wire_s + self.at.message_s * messages)

    def _to_copies(self, source: Place, copies: Floats) -> tuple[Floats, Floats]:
        """Return the busiest NIC's load as a fraction of the value, and the busiest device's messages, for copies on
        `copies` devices."""
        if isinstance(source, Copies):
            return np.zeros(len(self.p)), np.zeros(len(self.p))
        holders = self._reach(source)
        sent = self.share(source, 0) * (copies - 1)
        received = 1 - self.share(source, copies - 1)
        # A device with a shard but no copy sends less than a reader receives: all other shards are at least as large.
        load = np.maximum(sent, received)
        return load, (copies - 1) + np.where(copies > 0, holders - 1, 0.0)

    def _direct(self, source: Place, target: Place) -> tuple[Floats, Floats]:
        """Do as `_to_copies` between two splits; the largest load is at a step of either."""
        if isinstance(source, Copies):
            return np.zeros(len(self.p)), np.zeros(len(self.p))
        along = isinstance(source, ByBatch) and isinstance(target, ByBatch)
        if along or source == target:
            return np.zeros(len(self.p)), np.zeros(len(self.p))
        steps = [np.zeros(len(self.p)), np.ones(len(self.p)), self.p - 1]
        for place in (source, target):
            more = np.mod(self._units(place), self.p)
            steps += [np.maximum(0.0, more - 1), more]
        load = np.zeros(len(self.p))
        for device in steps:
            of_source, of_target = self.share(source, device), self.share(target, device)
            kept = of_source * of_target
            load = np.maximum(load, np.maximum(of_source - kept, of_target - kept))
        messages = self._reach(source) + self._reach(target) - 2
        return load, np.maximum(0.0, messages)

    def tell(self, term: Tell) -> Floats:
        others = self.holders - 1
        return self._seconds(term.entries * self.itemsize, np.asarray(others), np.asarray(2 * others))

    def total(self, term: Total) -> Floats:
        members = self.p if term.everyone else self.holders
        n_bytes = float(term.entries * self.itemsize)
        formula, messages = _SUMS[term.reduce]
        return np.asarray(formula(members, n_bytes, self.alpha, self.beta) + self.at.message_s * messages(members))


def _butterfly_messages(p: Floats) -> Floats:
    return np.asarray(4 * np.floor(np.log2(p)) + 2 * (np.exp2(np.floor(np.log2(p))) != p))


_SUMS: Mapping[str, tuple[Callable[..., Floats], Callable[[Floats], Floats]]] = {
    # The formula, and the messages in and out of the busiest device.
    "ring": (collectives.ring_allreduce, lambda p: 4 * (p - 1)),
    "butterfly": (collectives.butterfly_allreduce, _butterfly_messages),
    "direct": (collectives.direct_allreduce, lambda p: 4 * (p - 1)),
    "star": (collectives.star_allreduce, lambda p: 2 * (p - 1)),
}
