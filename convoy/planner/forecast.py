"""Would a fleet pay? The planner's answer with its interval, and what another batch, link or device would change.

The answer itself is the planner's best plan, replayed. What is asked around it (other batches, links, devices) is compared
by the analytic model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Literal, TypeVar

from convoy.fleet import Fleet
from convoy.model.graph import Graph
from convoy.plan.plan import OutputPlace, Plan
from convoy.plan.strategy import One
from convoy.planner.by_simulation import SHALLOW
from convoy.planner.planner import quick_candidates
from convoy.planner.predict import PlanningContext, PlanPrediction, predict_plan, working
from convoy.simulate.costs import Costs
from convoy.simulate.described import described_costs
from convoy.simulate.interval import Basis, Interval, around
from convoy.simulate.memory import memory_of

_T = TypeVar("_T")

WORTH = 1.02
"""A fleet pays where it is at least so many times as fast as its fastest device alone."""

BATCHES = tuple(1 << power for power in range(2, 15))

LINKS = tuple(rate / 8 for rate in (1e7, 1e8, 1e9, 2.5e9, 1e10, 2.5e10, 4e10, 1e11))
"""Bytes/s of the links that are asked about: 10 Mbit/s to 100 Gbit/s."""

REPLAYED = 3
"""Of a deep net's plans so many are replayed."""

MOST_ASKED = 100
"""More plans than the quick search finds for a few devices."""

ASKED_DEVICES = 8
"""Of larger fleets nothing is asked about single devices."""


@dataclass(frozen=True, slots=True)
class Change:
    """What one device less or more brings.

    Attributes:
        words: "without b", "another rtx3090".
        gain: of the changed fleet, over the fastest device alone of the fleet as it is.
    """

    words: str
    gain: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Whether a fleet pays for one net and batch.

    Attributes:
        passes: in so many passes a batch goes, since it fits no device in one; context, plan and step are of one pass, in the
            mean: gradients are summed in the last.
        best: the planner's plan.
        shared: the best plan that gives work to several devices; None where there is only one.
        fastest: index of the fastest device alone.
        gain: how many times as fast as that device the shared plan is; 1 where there is none.
        gain_within: what nine of ten measurements lie between.
        alone_within: samples/s of each device alone.
        from_batch: the smallest of `BATCHES` at which the fleet pays; None: at none that fits.
        from_link: bytes/s of the slowest of `LINKS` at which it pays; None: at none, or the hosts have links of their own.
        changes: one device less or more.
    """

    context: PlanningContext
    basis: Basis | None
    passes: int
    best: PlanPrediction
    shared: PlanPrediction | None
    fastest: int
    gain: float
    gain_within: Interval
    alone_within: tuple[Interval, ...]
    from_batch: int | None
    from_link: float | None
    asked_links: bool
    changes: tuple[Change, ...]

    @property
    def verdict(self) -> Literal["yes", "perhaps", "probably not", "no"]:
        """Yes where even the low end of the interval is a gain; no where even the high end is none."""
        if self.best.workers == 1 or self.gain < WORTH:
            return "no" if self.gain_within.high < WORTH else "probably not"
        return "yes" if self.gain_within.low >= 1 else "perhaps"


def forecast(
    graph: Graph,
    batch: int,
    fleet: Fleet,
    costs: Costs | None = None,
    *,
    optimizer: str = "sgd-momentum",
    outputs: OutputPlace = "everywhere",
    say: Callable[[str], object] = lambda _: None,
) -> Forecast:
    """The answer for a fleet: from its measured costs, or from what its devices can do.

    Args:
        costs: from what was measured on this fleet; None: the devices are described.
        outputs: where they are, by every plan.
        say: told what is being worked on.

    Raises:
        PlanError: no plan fits the devices' memory.
        InputError: a device of which nothing is known.
    """
    costs = costs or described_costs(fleet, optimizer=optimizer)
    basis = costs.errors.basis
    context, passes = _in_passes(PlanningContext.of(graph, batch, costs, fleet, optimizer, outputs=outputs), fleet)
    batch = context.batch
    say(f"planning for {len(fleet.devices)} devices")
    best, shared = _best(context)
    speeds = context.speeds.devices
    fastest = max(range(len(speeds)), key=lambda d: speeds[d])
    gain = 1.0 if shared is None else shared.samples_per_s / speeds[fastest]
    rates = partial(_rates, graph, optimizer, passes, outputs)
    several = len(fleet.devices) > 1
    asked_links = basis == "described" and several and len(fleet.hosts) > 1 and not fleet.links
    pays = best.workers > 1 and gain >= WORTH
    if basis == "described" and several:
        say("comparing batches, links and devices")
    from_link = _first(LINKS, lambda rate: _pays(rates(batch, _with_link(fleet, rate)))) if asked_links else None
    sizes = [size for size in BATCHES if size <= batch * _more_samples(context)]
    from_batch = _first(sizes, lambda size: _pays(rates(size, fleet))) if basis == "described" and several else None
    if pays and fleet.network is not None and from_link is not None:
        from_link = min(from_link, fleet.network.send_bytes_per_s)
    if pays and basis == "described":
        from_batch = batch if from_batch is None else min(from_batch, batch)
    return Forecast(
        context=context, basis=basis, passes=passes, best=best, shared=shared, fastest=fastest, gain=gain,
        gain_within=around(gain, 1.0 if shared is None else shared.gain_spread),
        alone_within=tuple(around(speed, costs.errors.alone(d)) for d, speed in enumerate(speeds)),
        from_batch=from_batch, from_link=from_link, asked_links=asked_links,
        changes=_changes(partial(rates, batch), fleet, speeds[fastest]) if basis == "described" else (),
    )  # fmt: skip


def _best(context: PlanningContext) -> tuple[PlanPrediction, PlanPrediction | None]:
    """The planner's plan, and its best with several devices; of a deep net the best of a few that its quick search finds."""
    if len(context.graph.weighted) <= SHALLOW:
        found = context.candidates()
        several = [each for each in found if len(working(each.plan, context.graph)) > 1][:1]
        found = [*found[:1], *(each for each in several if each is not found[0])]
    else:
        few = len(context.names) <= ASKED_DEVICES
        fitting_ones = quick_candidates(
            context.graph, context.batch, context.costs, context.room, enough=MOST_ASKED if few else REPLAYED,
            passes=context.passes, outputs=context.outputs,
        )  # fmt: skip
        found = fitting_ones[:REPLAYED]
        # Where one device is faster than several, the best of several may be a plan for some of the devices only.
        of_several = (each for each in fitting_ones if each not in found and len(working(each.plan, context.graph)) > 1)
        found += islice(of_several, REPLAYED)
        found = found or context.candidates()[:1]  # that search saves memory where it must
    rows = [predict_plan(each.plan.named("auto"), context) for each in found]
    if len(context.names) > 1 and not any(row.workers > 1 for row in rows):
        rows.append(predict_plan(context.named("data-by-speed"), context))
    fitting = [row for row in rows if not row.overfull] or rows
    shared = [row for row in fitting if row.workers > 1]
    return _fastest(fitting), _fastest(shared) if shared else None


def _fastest(rows: Sequence[PlanPrediction]) -> PlanPrediction:
    return min(rows, key=lambda row: row.step_s)


def _in_passes(context: PlanningContext, fleet: Fleet) -> tuple[PlanningContext, int]:
    """The context of one pass of a batch, and how many there are: the fastest device alone must hold one, or there would be
    nothing to compare with."""
    more = _more_samples(context)
    if more >= 1:
        return context, 1
    passes = next((n for n in range(2, context.batch + 1) if context.batch % n == 0 and 1 / n <= more), 0)
    if not passes:
        return context, 1
    graph, costs, room = context.graph, context.costs, context.room
    smaller = PlanningContext.of(
        graph, context.batch // passes, costs, fleet, room.optimizer, passes=passes, outputs=context.outputs
    )
    return smaller, passes


def _more_samples(context: PlanningContext) -> float:
    """How many times as many samples the fastest device alone has memory for."""
    speeds = context.speeds.devices
    fastest = max(range(len(speeds)), key=lambda d: speeds[d])
    limit = context.room.bytes_of(fastest)
    if limit == float("inf"):
        return limit
    plan = Plan("alone", context.graph.fingerprint, len(speeds), context.batch, {}, One(fastest))
    need = memory_of(plan, context.graph, optimizer=context.room.optimizer, itemsize=context.costs.itemsize)[fastest]
    fixed = need.total_bytes - need.activations_bytes
    return max(0.0, (limit - fixed) / max(1, need.activations_bytes))


def _rates(
    graph: Graph, optimizer: str, passes: int, outputs: OutputPlace, batch: int, fleet: Fleet
) -> tuple[float, float] | None:
    """Samples/s of a fleet by the analytic model: of its best plan, of its fastest device alone; None: nothing fits."""
    costs = described_costs(fleet, optimizer=optimizer)
    context = PlanningContext.of(graph, batch, costs, fleet, optimizer, passes=passes)
    found = quick_candidates(graph, batch, costs, context.room, passes=passes, outputs=outputs)
    return (batch / found[0].step_s, max(context.speeds.devices)) if found else None


def _pays(rates: tuple[float, float] | None) -> bool:
    return rates is not None and rates[0] >= WORTH * rates[1]


def _first(values: Sequence[_T], holds: Callable[[_T], bool]) -> _T | None:
    """The first of some values from which on something holds, found by halving; None where it holds at none."""
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if holds(values[middle]):
            high = middle
        else:
            low = middle + 1
    return values[low] if low < len(values) else None


def _with_link(fleet: Fleet, bytes_per_s: float) -> Fleet:
    """All hosts on cards of another rate."""
    cards = [host.card for host in fleet.hosts if host.card is not None]
    card = fleet.network or cards[0]
    hosts = tuple(replace(host, card=None) for host in fleet.hosts)
    network = replace(card, send_bytes_per_s=bytes_per_s, receive_bytes_per_s=bytes_per_s)
    return replace(fleet, hosts=hosts, network=network)


def _changes(rates_of: Callable[[Fleet], tuple[float, float] | None], fleet: Fleet, alone: float) -> tuple[Change, ...]:
    """Each device left out, and another of each class."""
    if not 2 <= len(fleet.devices) <= ASKED_DEVICES:
        return ()
    all_ = set(range(len(fleet.devices)))
    changed = [(f"without {fleet.devices[index].name}", fleet.with_only(all_ - {index})) for index in sorted(all_)]
    seen: set[object] = set()
    for index, device in enumerate(fleet.devices):
        kind = (device.class_name, device.peak_flop_per_s, device.memory_bytes_per_s)
        if kind not in seen and len(fleet.hosts) > 1:
            seen.add(kind)
            changed.append((f"with another {device.class_name or device.name}", _with_another(fleet, index)))
    rates = [(words, rates_of(each)) for words, each in changed]
    return tuple(Change(words, None if rate is None else max(rate) / alone) for words, rate in rates)


def _with_another(fleet: Fleet, index: int) -> Fleet:
    """A device like this one on a host of its own."""
    like = fleet.devices[index]
    host = next(host for host in fleet.hosts if host.name == like.host)
    name = f"{like.name[:56]}-more"
    return replace(
        fleet,
        hosts=(*fleet.hosts, replace(host, name=name)),
        devices=(*fleet.devices, replace(like, name=name, host=name)),
    )
