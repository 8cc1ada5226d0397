"""Predicts whether a fleet is worth using, and the effect of another batch or link.

The forecast simulates the planner's best plan. The analytic model compares other batches and links.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, TypeVar

from convoy.fleet import Fleet
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.strategy import One
from convoy.planner.knowledge import FleetKnowledge
from convoy.planner.planner import SHALLOW, candidates, quick_candidates
from convoy.planner.prediction import PlanPrediction, predict_plan, working
from convoy.planner.request import PlanRequest
from convoy.simulate.interval import Basis, Within, around
from convoy.simulate.memory import memory_of

_T = TypeVar("_T")

WORTH = 1.02
"""A fleet pays off if its speedup over its fastest device alone is at least this."""

BATCHES = tuple(1 << power for power in range(2, 15))

LINKS = tuple(rate / 8 for rate in (1e7, 1e8, 1e9, 2.5e9, 1e10, 2.5e10, 4e10, 1e11))
"""Bytes/s of the compared links: 10 Mbit/s to 100 Gbit/s."""

SIMULATED = 3
"""The number of simulated plans of a deep net."""

MOST_PLANS = 100
"""More plans than the quick search ever finds for a few devices, so that it returns all."""

FEW_DEVICES = 8
"""In larger fleets, fewer plans are compared."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction whether a fleet pays off for one net and batch.

    Attributes:
        request: the request; for one micro-batch if the batch must be divided to fit on the fastest device alone.
        best: the planner's best plan.
        shared: the best plan in which several devices compute; None if there is none.
        fastest: index of the device that is fastest alone.
        gain: speedup of the shared plan over that device; 1 without a shared plan.
        alone_within: intervals of the samples/s of each device alone.
        from_batch: the smallest of `BATCHES` for which the fleet pays off; None if there is none.
        from_link: the slowest of `LINKS` (bytes/s) for which it pays off; None if there is none, or if links are given.
        asked_links: whether links were compared.
    """

    request: PlanRequest
    basis: Basis | None
    best: PlanPrediction
    shared: PlanPrediction | None
    fastest: int
    gain: float
    gain_within: Within
    alone_within: tuple[Within, ...]
    from_batch: int | None
    from_link: float | None
    asked_links: bool

    @property
    def verdict(self) -> Literal["yes", "perhaps", "probably not", "no"]:
        """Whether the fleet pays off: "yes" if the whole interval of the speedup is a gain, "no" if no part of it is."""
        if self.best.workers == 1 or self.gain < WORTH:
            return "no" if self.gain_within.high < WORTH else "probably not"
        return "yes" if self.gain_within.low >= 1 else "perhaps"


def forecast(request: PlanRequest, say: Callable[[str], object] = lambda _: None) -> Forecast:
    """Return the forecast for a described or measured fleet.

    Args:
        say: called with a description of the work in progress.

    Raises:
        PlanError: no plan fits the devices' memory.
        InputError: nothing is known about a device.
    """
    fleet = request.fleet.fleet
    assert fleet is not None
    if (more := _more_samples(request)) < 1:
        # Divide the batch until the fastest device alone can hold a micro-batch, for the comparison.
        counts = (n for n in range(1, request.batch + 1) if request.batch % n == 0 and 1 / n <= more)
        request = request.split(next(counts, 1))
    errors = request.costs.errors
    say(f"planning for {len(fleet.devices)} devices")
    best, shared = _best(request)
    speeds, fastest = request.speeds.devices, request.speeds.fastest
    gain = 1.0 if shared is None else shared.samples_per_s / speeds[fastest]
    compares = errors.basis == "described" and len(fleet.devices) > 1
    asked_links = compares and len(fleet.hosts) > 1 and not fleet.links
    from_link, from_batch = None, None
    if compares:
        say("comparing batches and links")
        sizes = [size for size in BATCHES if size <= request.batch * _more_samples(request)]
        from_batch = _first(sizes, lambda size: _pays(replace(request, batch=size), fleet))
    if asked_links:
        card = fleet.network or next(host.card for host in fleet.hosts if host.card is not None)
        hosts = tuple(replace(host, card=None) for host in fleet.hosts)

        def pays(rate: float) -> bool:
            network = replace(card, send_bytes_per_s=rate, receive_bytes_per_s=rate)
            return _pays(request, replace(fleet, hosts=hosts, network=network))

        from_link = _first(LINKS, pays)
    if best.workers > 1 and gain >= WORTH:  # the simulation is more exact than the analytic model
        if fleet.network is not None and from_link is not None:
            from_link = min(from_link, fleet.network.send_bytes_per_s)
        if errors.basis == "described":
            from_batch = request.batch if from_batch is None else min(from_batch, request.batch)
    return Forecast(
        request=request, basis=errors.basis, best=best, shared=shared, fastest=fastest, gain=gain,
        gain_within=around(gain, 1.0 if shared is None else shared.gain_spread),
        alone_within=tuple(around(speed, errors.alone(d)) for d, speed in enumerate(speeds)),
        from_batch=from_batch, from_link=from_link, asked_links=asked_links,
    )  # fmt: skip


def _best(request: PlanRequest) -> tuple[PlanPrediction, PlanPrediction | None]:
    """Return the best plan, and the best one with several devices. For a deep net, simulate only a few quick candidates."""
    if len(request.graph.weighted) <= SHALLOW:
        found, most = candidates(request), 1
    else:
        few = len(request.names) <= FEW_DEVICES
        found, most = quick_candidates(request, MOST_PLANS if few else SIMULATED), SIMULATED
        found = found or candidates(request)[:1]  # the full search; it raises an error if no plan fits
    # Even if one device is faster than several, find the best plan with several.
    several = islice((each for each in found if len(working(each.plan, request.graph)) > 1), most)
    tried = found[:most] + [each for each in several if each not in found[:most]]
    rows = [predict_plan(each.plan.named("auto"), request) for each in tried]
    if len(request.names) > 1 and not any(row.workers > 1 for row in rows):
        rows.append(predict_plan(request.named("data-by-speed"), request))
    rows = [row for row in rows if not row.overfull] or rows
    rows.sort(key=lambda row: row.step_s)
    return rows[0], next((row for row in rows if row.workers > 1), None)


def _more_samples(request: PlanRequest) -> float:
    """Return the multiple of the batch that fits on the fastest device alone."""
    fastest = request.speeds.fastest
    limit = request.limits.bytes_of(fastest)
    if limit == float("inf"):
        return limit
    plan = Plan("alone", request.graph.fingerprint, len(request.names), request.batch, {}, One(fastest))
    steps = lower(plan, request.graph)
    need = memory_of(steps, request.graph, optimizer=request.optimizer, itemsize=request.costs.itemsize)[fastest]
    fixed = need.total_bytes - need.activations_bytes
    return max(0.0, (limit - fixed) / max(1, need.activations_bytes))


def _pays(request: PlanRequest, fleet: Fleet) -> bool:
    """Return whether the best plan on a fleet is clearly faster than its fastest device alone, by the analytic model."""
    here = replace(request, fleet=FleetKnowledge(fleet))
    found = quick_candidates(here)
    return bool(found) and here.batch / found[0].step_s >= WORTH * max(here.speeds.devices)


def _first(values: Sequence[_T], holds: Callable[[_T], bool]) -> _T | None:
    """Return the first value for which `holds` is true, which then is true for all later values; None if there is none."""
    index = bisect_left(values, True, key=holds)
    return values[index] if index < len(values) else None
