"""Rebalancing: corrects shares while training. A pure state machine: takes seconds, returns a decision.

A device is not as fast in a job as alone: communication threads, caches and other users slow it down. So each device's
computing seconds, without any waiting, are observed for each group of coupled axes (`convoy.plan.coupling`), and give its
seconds per unit. The shares change when other units would shorten the slowest device's computing by more than the noise:

- The median of the last `SHORT` steps shows a large change quickly; the median of many steps shows a small one reliably. A
  single slow step changes neither.
- After a jump of a device's seconds, earlier steps are dropped, and nothing is decided for `LEAST` steps.
- The gain must exceed `DEADBAND`, and `SURE` standard errors of the slowest device's median. The noise is taken from
  differences between consecutive steps, so that a change of speed does not count as noise.
- Once, after `FIRST` steps, `FIRST_SURE` is enough: the first shares come from the devices' solo throughput.
- A change of shares discards earlier observations. A change that soon undoes the last one needs twice as many steps each time,
  so two splits cannot alternate.

Only +, -, *, /, square roots and comparisons are used, so all devices with the same seconds make the same decision, bit by bit.
"""

import heapq
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from convoy.layout.shares import Shares
from convoy.model.graph import Graph
from convoy.plan.coupling import CoupledAxes, coupled_axes, shares_of, with_units
from convoy.plan.plan import Plan

SHORT, LONG, LONGEST = 5, 20, 60
"""Numbers of steps for medians."""

LEAST, MOST = 3, 96
"""Minimum steps after a change of shares before the next, and the maximum of that number after alternating changes."""

RELAXED = 60
"""After this many steps without a change, or twice those that were needed, `LEAST` steps are enough again."""

JUMP, JUMP_SURE = 0.15, 3.0
"""A device's seconds have jumped if `LEAST` steps are longer, or shorter, by this fraction and this multiple of its noise."""

DEADBAND = 0.03
"""Minimum gain, as a fraction of the slowest device's computing."""

SURE = 4.0
"""Minimum gain in standard errors. Noise alone reaches it about once in ten thousand decisions for four devices."""

FIRST, FIRST_SURE = 10, 2.0
"""After this many steps with the first shares, and only once: a lower minimum gain, in standard errors."""

LEAST_NOISE = 0.02
"""Minimum assumed noise, relative to a step: a few differences between steps may be small by chance."""

STARTING, SETTLING = 2, 1
"""Steps to ignore at the start, and after a change of shares: they allocate memory and prepare kernels."""

Seconds = Mapping[str, Sequence[float]]
"""By layer: each device's seconds for forward and backward in one step; 0 if it has no share."""


@dataclass(frozen=True, slots=True)
class ObservedAxes:
    """The observed steps of one group of coupled axes.

    Attributes:
        rates: seconds per unit of each device, step by step since the shares were chosen, the latest last.
        jumps: relative differences of rates between consecutive steps, the latest last.
        steps: the number of steps with these shares.
        asks: the number of steps before the shares may change.
        last: each device's last change, in units.
        corrected: whether the shares have ever changed.
        since: for each device, the number of steps since its seconds last jumped.
    """

    rates: tuple[tuple[float, ...], ...] = ()
    jumps: tuple[tuple[float, ...], ...] = ()
    steps: int = 0
    asks: int = SHORT
    last: Shares = ()
    corrected: bool = False
    since: tuple[int, ...] = ()

    def with_step(self, rates: tuple[float, ...]) -> "ObservedAxes":
        jumps = self.jumps
        if self.rates:
            pairs = zip(self.rates[-1], rates, strict=True)
            jumps += (tuple(2.0 * abs(a - b) / (a + b) if a + b else 0.0 for a, b in pairs),)
        since = tuple(n + 1 for n in self.since or (0,) * len(rates))
        relaxed = min(since) >= max(RELAXED, 2 * self.asks)
        seen = ObservedAxes(
            (*self.rates, rates)[-max(LONGEST, self.asks) :], jumps[-LONGEST:], self.steps + 1,
            min(self.asks, LEAST) if relaxed else self.asks, () if relaxed else self.last, self.corrected, since,
        )  # fmt: skip
        return replace(seen, since=tuple(LEAST if seen.jumped(d, LEAST) else n for d, n in enumerate(since)))

    def since_jump(self, device: int, steps: int) -> list[float]:
        """Return a device's seconds per unit in the last N steps, without those before its last jump."""
        return [row[device] for row in self.rates[-min(steps, self.since[device]) :]]

    def jumped(self, device: int, steps: int) -> bool:
        """Return whether the last N steps are all longer, or all shorter, than the noise of earlier steps can explain."""
        known = self.since_jump(device, LONGEST)
        before, last = known[:-steps], known[-steps:]
        if len(before) < SHORT:
            return False
        usual, beyond = statistics.median(before), 1.0 + max(JUMP, JUMP_SURE * self.noise(device))
        return min(last) > usual * beyond or max(last) * beyond < usual

    def changed(self, change: Shares) -> "ObservedAxes":
        """Return the state after a change of shares: no steps yet, but the known noise of each device."""
        undone = -sum(a * b for a, b in zip(self.last, change, strict=False))
        back = 2 * undone > sum(a * a for a in change)
        asks = min(MOST, 2 * self.asks) if back else self.asks if self.last else LEAST
        return ObservedAxes(jumps=self.jumps, asks=asks, last=change, corrected=True)

    def noise(self, device: int) -> float:
        """Return the relative standard deviation of a device's seconds per step, from the median difference of two steps."""
        found = statistics.median(row[device] for row in self.jumps) / 0.954 if self.jumps else 0.0
        return max(LEAST_NOISE, found)


@dataclass(frozen=True, slots=True)
class ShareChange:
    """New units of coupled axes, with the slowest device's seconds before (measured) and after (predicted)."""

    axes: CoupledAxes
    units: Shares
    slowest: int
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Keep:
    reason: str


@dataclass(frozen=True, slots=True)
class Reshard:
    plan: Plan
    changes: tuple[ShareChange, ...]
    reason: str


Decision = Keep | Reshard


@dataclass(frozen=True, slots=True)
class Balancer:
    """The state: the plan in use, its coupled axes, the observed steps of each, and the number of steps to ignore."""

    plan: Plan
    axes: tuple[CoupledAxes, ...]
    observed: tuple[ObservedAxes, ...]
    skips: int = STARTING
    ids: tuple[int, ...] | None = None

    @staticmethod
    def start(plan: Plan, graph: Graph, ids: Sequence[int] | None = None) -> "Balancer":
        """Return the state before the first step of a plan. PlanError if it does not fit the graph."""
        found = coupled_axes(plan, graph)
        return Balancer(plan, found, (ObservedAxes(),) * len(found), ids=None if ids is None else tuple(ids))


def observe(state: Balancer, seconds: Seconds) -> tuple[Balancer, Decision]:
    """Return the next state and the decision after a step of the plan's own batch.

    A missing layer counts as no time. A step in which a device with a share has no time is ignored.
    """
    if not state.axes:
        return state, Keep("the plan leaves no shares to choose")
    totals = []  # by coupled axes, each device's seconds of their layers
    for axes in state.axes:
        rows = [seconds[name] for name in axes.layers if name in seconds]
        totals.append([sum(row[device] for row in rows) for device in range(len(axes.units))])
    if any(not 0.0 < row[d] < math.inf for axes, row in zip(state.axes, totals, strict=True) for d in axes.active):
        return state, Keep("not every device timed its part in this step")
    if state.skips:
        return replace(state, skips=state.skips - 1), Keep("the first steps with these shares are ignored")
    observed = tuple(
        history.with_step(tuple(total / n if n else 0.0 for total, n in zip(row, axes.units, strict=True)))
        for history, axes, row in zip(state.observed, state.axes, totals, strict=True)
    )
    seen = replace(state, observed=observed)
    changes = [
        c for axes, history in zip(state.axes, observed, strict=True) if (c := _change(axes, history)) is not None
    ]
    now_s = sum(max(row) for row in totals)
    saved_s = sum(c.before_s - c.after_s for c in changes)
    if not changes:
        return seen, Keep("no other shares would be faster by more than the noise")
    if saved_s < DEADBAND * now_s:
        return seen, Keep(f"other shares would save {saved_s:.3g} s of {now_s:.3g} s, less than {DEADBAND:.0%}")
    return _apply(seen, changes)


def slower(state: Balancer, predicted: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """Return measured divided by predicted seconds of the observed layers, for each timed device.

    Args:
        predicted: for each device, seconds of its share of each layer in the plan of `state`, by "forward conv1".
    """
    took_s, should_s = ([0.0] * len(predicted) for _ in range(2))
    for axes, history in zip(state.axes, state.observed, strict=True):
        for device in axes.active if history.steps >= LEAST else ():
            took_s[device] += statistics.median(history.since_jump(device, LONG)) * axes.units[device]
            row = predicted[device]
            should_s[device] += sum(
                row.get(f"{phase} {n}", 0.0) for n in axes.layers for phase in ("forward", "backward")
            )
    return {d: took / should for d, (took, should) in enumerate(zip(took_s, should_s, strict=True)) if took and should}


def best(rates: Sequence[float], units: Shares) -> Shares:
    """Redistribute units so that the slowest device needs the shortest time. Devices with units keep at least one.
    `rates` are seconds per unit."""
    active = [device for device, count in enumerate(units) if count]
    result = [int(device in active) for device in range(len(units))]
    # Give each unit to the device that would finish it first: optimal if time is proportional to units.
    ends = [(2 * rates[device], device) for device in active]
    heapq.heapify(ends)
    for _ in range(sum(units) - len(active)):
        _, device = ends[0]
        result[device] += 1
        heapq.heapreplace(ends, ((result[device] + 1) * rates[device], device))
    return tuple(result)


def _change(axes: CoupledAxes, history: ObservedAxes) -> ShareChange | None:
    """Return better units for coupled axes, if the gain is significant."""
    after_jump = history.asks if history.last else LEAST
    if history.steps < history.asks or any(history.since[d] < after_jump or history.jumped(d, 1) for d in axes.active):
        return None
    looks = [(max(SHORT, history.asks), SURE), (LONG, SURE), (LONGEST, SURE)]
    if not history.corrected and history.steps == FIRST:
        looks.insert(0, (FIRST, FIRST_SURE))
    for steps, sure in looks:
        rows = [history.since_jump(d, steps) for d in range(len(axes.units))]
        rates = [statistics.median(row) for row in rows]
        units = best(rates, axes.units)
        ends_s = [rate * count for rate, count in zip(rates, axes.units, strict=True)]
        before_s, after_s = max(ends_s), max(rate * count for rate, count in zip(rates, units, strict=True))
        slowest = ends_s.index(before_s)
        most = max(map(len, rows))
        doubted = {slowest, *(d for d in axes.active if len(rows[d]) < most)}
        error = max(1.25 * history.noise(d) / math.sqrt(len(rows[d])) for d in doubted)  # of a median, relative
        if before_s - after_s > max(DEADBAND, sure * error) * before_s:
            return ShareChange(axes, units, slowest, before_s, after_s)
    return None


def _apply(state: Balancer, changes: Sequence[ShareChange]) -> tuple[Balancer, Reshard]:
    plan, found, observed, lines = state.plan, list(state.axes), list(state.observed), []
    for change in changes:
        i = found.index(change.axes)
        after = with_units(plan, change.axes, change.units)
        found[i] = replace(change.axes, units=change.units)
        lines.append(_line(plan, after, change, found[i], state.ids))
        moved = tuple(b - a for a, b in zip(change.axes.units, change.units, strict=True))
        observed[i] = observed[i].changed(moved)
        plan = after
    before_s, after_s = (sum(times) for times in zip(*((c.before_s, c.after_s) for c in changes), strict=True))
    reason = f"{'; '.join(lines)}; predicted compute {before_s:.3g} s -> {after_s:.3g} s"
    return replace(state, plan=plan, axes=tuple(found), observed=tuple(observed), skips=SETTLING), Reshard(
        plan, tuple(changes), reason
    )


def _line(before: Plan, after: Plan, change: ShareChange, axes: CoupledAxes, ids: Sequence[int] | None) -> str:
    old, new = shares_of(before, change.axes), shares_of(after, axes)
    times = change.before_s / change.after_s
    return (
        f"{axes.name} {'/'.join(map(str, old))} -> {'/'.join(map(str, new))} {axes.counted}: "
        f"device {change.slowest if ids is None else ids[change.slowest]} took {times:.2g}x the balanced time"
    )
