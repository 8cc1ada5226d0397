"""Rebalancing: corrects shares while training. A pure state machine: seconds in, a decision out.

What a device does in a job is not what it did alone: threads that exchange, caches, other users. So each device's seconds of
computing, which leave out every wait, are watched for each group of coupled axes (`convoy.plan.coupling`), and give its seconds
per unit. When other units would end the slowest device's computing sooner, by more than the noise explains, the shares change:

- The median of the last `SHORT` steps sees a large change soon; that of many, a small one surely. A step that took long for
  once moves neither.
- A device whose seconds jump is another device from then on: steps from before are forgotten, and nothing is decided in
  between, where a median would be of both. So `LEAST` steps after a jump the shares are those of the new speeds.
- The gain must exceed `DEADBAND`, and `SURE` standard errors of the slowest device's median. Its noise is taken from
  differences between steps that follow each other, so that a change of speed does not count as noise.
- Once, after `FIRST` steps, `FIRST_SURE` is enough: the shares until then come from what the devices did alone, which is
  worth no more.
- New shares are watched afresh. A change that undoes the last one, soon after it, asks for twice as many steps each time: two
  splits cannot alternate.

A share changes by the whole way: a gain beyond the noise needs no damping, and where time is not proportional to the
share, the next look corrects the rest. Only +, -, *, /, square roots and comparisons are used, so every device that sees the
same seconds comes to the same decision, to the last bit.
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
"""Steps whose median is looked at."""

FIRST = 10
"""Steps after which shares that were never changed are looked at with less doubt, once."""

LEAST = 3
"""Fresh steps before a share changes again."""

MOST = 96
"""Fresh steps that are asked for at most, after changes to and fro."""

RELAXED = 60
"""After so many steps without a change, or twice those that were asked for, `LEAST` steps are enough again."""

JUMP, JUMP_SURE = 0.15, 3.0
"""A device's seconds have jumped when `LEAST` steps in turn are longer than those before by more than this part and so many
times its noise, or shorter likewise. Steps from before a jump tell nothing of those after it."""

DEADBAND = 0.03
"""A smaller part of the slowest device's computing is not worth a change."""

SURE = 4.0
"""Standard errors. Noise alone reaches them about once in ten thousand looks at four devices."""

FIRST_SURE = 2.0
"""Standard errors, at that one look."""

LEAST_NOISE = 0.02
"""Taken at least, relative to a step: a few differences between steps may be small by chance."""

STARTING, SETTLING = 2, 1
"""Steps that are not looked at: the first of all, and the first with new shares, which make memory and kernels ready."""

Seconds = Mapping[str, Sequence[float]]
"""By layer: what each device computed in one step, forward and backward, in seconds; 0 where it has no part."""


@dataclass(frozen=True, slots=True)
class Watch:
    """What is known of one group of coupled axes.

    Attributes:
        rates: seconds per unit of each device, step by step since the shares were chosen, the latest last.
        jumps: relative differences of rates between steps that follow each other, the latest last.
        steps: how many steps these shares have been watched.
        since: of each device, how many of them since its seconds last jumped.
        asks: how many it takes before they may change.
        last: by how many units each device's part last changed.
        corrected: whether they were ever changed.
    """

    rates: tuple[tuple[float, ...], ...] = ()
    jumps: tuple[tuple[float, ...], ...] = ()
    steps: int = 0
    asks: int = SHORT
    last: Shares = ()
    corrected: bool = False
    since: tuple[int, ...] = ()

    def with_step(self, rates: tuple[float, ...]) -> "Watch":
        """One more step."""
        jumps = self.jumps
        if self.rates:
            jumps += (tuple(_apart(a, b) for a, b in zip(self.rates[-1], rates, strict=True)),)
        since = tuple(n + 1 for n in self.since or (0,) * len(rates))
        relaxed = min(since) >= max(RELAXED, 2 * self.asks)
        seen = Watch(
            (*self.rates, rates)[-max(LONGEST, self.asks) :], jumps[-LONGEST:], self.steps + 1,
            min(self.asks, LEAST) if relaxed else self.asks, () if relaxed else self.last, self.corrected, since,
        )  # fmt: skip
        return replace(seen, since=tuple(LEAST if seen.jumped(d, LEAST) else n for d, n in enumerate(since)))

    def since_jump(self, device: int, steps: int) -> list[float]:
        """A device's seconds per unit, of so many steps at most, none of them before its last jump."""
        return [row[device] for row in self.rates[-min(steps, self.since[device]) :]]

    def jumped(self, device: int, steps: int) -> bool:
        """Whether the last so many steps are all longer, or all shorter, than those before explain."""
        known = self.since_jump(device, LONGEST)
        before, last = known[:-steps], known[-steps:]
        if len(before) < SHORT:
            return False
        usual, beyond = statistics.median(before), 1.0 + max(JUMP, JUMP_SURE * self.noise(device))
        return min(last) > usual * beyond or max(last) * beyond < usual

    def changed(self, change: Shares) -> "Watch":
        """The shares have changed: what comes is seen afresh; how noisy each device is, stays known."""
        undone = -sum(a * b for a, b in zip(self.last, change, strict=False))
        back = 2 * undone > sum(a * a for a in change)
        asks = min(MOST, 2 * self.asks) if back else self.asks if self.last else LEAST
        return Watch(jumps=self.jumps, asks=asks, last=change, corrected=True)

    def noise(self, device: int) -> float:
        """Standard deviation of a device's seconds in one step, relative; from the median difference of two steps."""
        found = statistics.median(row[device] for row in self.jumps) / 0.954 if self.jumps else 0.0
        return max(LEAST_NOISE, found)


@dataclass(frozen=True, slots=True)
class Change:
    """Other shares for coupled axes.

    Attributes:
        axes: as they were; `units`: as they shall be.
        slowest: the device that was done last.
        before_s, after_s: seconds until the slowest device has computed these layers, measured and predicted.
    """

    axes: CoupledAxes
    units: Shares
    slowest: int
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Keep:
    """The shares stay."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reshard:
    """Another plan: the same strategies, other shares."""

    plan: Plan
    changes: tuple[Change, ...]
    reason: str


Decision = Keep | Reshard


@dataclass(frozen=True, slots=True)
class Balancer:
    """The state: the plan that runs, its coupled axes, and what was seen of each.

    Attributes:
        skips: so many steps are not looked at.
        ids: by which messages name the devices; None: their indices.
    """

    plan: Plan
    axes: tuple[CoupledAxes, ...]
    watches: tuple[Watch, ...]
    skips: int = STARTING
    ids: tuple[int, ...] | None = None

    @staticmethod
    def start(plan: Plan, graph: Graph, ids: Sequence[int] | None = None) -> "Balancer":
        """Before the first step of a plan.

        Args:
            ids: by which messages name the devices; None: their indices.

        Raises:
            PlanError: the plan does not fit the graph.
        """
        found = coupled_axes(plan, graph)
        return Balancer(plan, found, (Watch(),) * len(found), ids=None if ids is None else tuple(ids))


def observe(state: Balancer, seconds: Seconds) -> tuple[Balancer, Decision]:
    """One training step of the plan's own batch, as every device timed it: the next state, and what to do.

    A layer that is missing counts as no time. A step in which a device that has a part shows no time is not looked at.
    """
    if not state.axes:
        return state, Keep("the plan leaves no shares to choose")
    totals = [_totals(axes, seconds) for axes in state.axes]
    if any(not 0.0 < row[d] < math.inf for axes, row in zip(state.axes, totals, strict=True) for d in axes.active):
        return state, Keep("not every device timed its part in this step")
    if state.skips:
        return replace(state, skips=state.skips - 1), Keep("the first steps with these shares are not looked at")
    watches = tuple(
        watch.with_step(_rates(axes, row)) for watch, axes, row in zip(state.watches, state.axes, totals, strict=True)
    )
    seen = replace(state, watches=watches)
    changes = [c for axes, watch in zip(state.axes, watches, strict=True) if (c := _change(axes, watch)) is not None]
    now_s = sum(max(row) for row in totals)
    saved_s = sum(c.before_s - c.after_s for c in changes)
    if not changes:
        return seen, Keep("no other shares would be faster by more than the noise")
    if saved_s < DEADBAND * now_s:
        return seen, Keep(f"other shares would save {saved_s:.3g} s of {now_s:.3g} s, less than {DEADBAND:.0%}")
    return _apply(seen, changes)


def slower(state: Balancer, predicted: Sequence[Mapping[str, float]]) -> dict[int, float]:
    """How many times as long as predicted devices compute the layers that were watched; of those that were timed.

    Args:
        predicted: of each device, seconds of its part of each layer by the plan of `state`, by "forward conv1".
    """
    took_s, should_s = ([0.0] * len(predicted) for _ in range(2))
    for axes, watch in zip(state.axes, state.watches, strict=True):
        for device in axes.active if watch.steps >= LEAST else ():
            took_s[device] += statistics.median(watch.since_jump(device, LONG)) * axes.units[device]
            row = predicted[device]
            should_s[device] += sum(
                row.get(f"{phase} {n}", 0.0) for n in axes.layers for phase in ("forward", "backward")
            )
    return {d: took / should for d, (took, should) in enumerate(zip(took_s, should_s, strict=True)) if took and should}


def best(rates: Sequence[float], units: Shares) -> Shares:
    """Units of the same sum with which the slowest device is done first, at least one for each device that has any.

    Args:
        rates: seconds per unit of each device.
    """
    active = [device for device, count in enumerate(units) if count]
    result = [int(device in active) for device in range(len(units))]
    # Unit by unit to the device that would be done with it first: the exact optimum where time is proportional.
    ends = [(2 * rates[device], device) for device in active]
    heapq.heapify(ends)
    for _ in range(sum(units) - len(active)):
        _, device = ends[0]
        result[device] += 1
        heapq.heapreplace(ends, ((result[device] + 1) * rates[device], device))
    return tuple(result)


def _change(axes: CoupledAxes, watch: Watch) -> Change | None:
    """Better units for coupled axes, where the gain is beyond doubt."""
    after_jump = watch.asks if watch.last else LEAST
    if watch.steps < watch.asks or any(watch.since[d] < after_jump or watch.jumped(d, 1) for d in axes.active):
        return None
    looks = [(max(SHORT, watch.asks), SURE), (LONG, SURE), (LONGEST, SURE)]
    if not watch.corrected and watch.steps == FIRST:
        looks.insert(0, (FIRST, FIRST_SURE))
    for steps, sure in looks:
        rows = [watch.since_jump(d, steps) for d in range(len(axes.units))]
        rates = [statistics.median(row) for row in rows]
        units = best(rates, axes.units)
        ends_s = [rate * count for rate, count in zip(rates, axes.units, strict=True)]
        before_s, after_s = max(ends_s), max(rate * count for rate, count in zip(rates, units, strict=True))
        slowest = ends_s.index(before_s)
        most = max(map(len, rows))
        doubted = {slowest, *(d for d in axes.active if len(rows[d]) < most)}
        error = max(1.25 * watch.noise(d) / math.sqrt(len(rows[d])) for d in doubted)  # of a median, relative
        if before_s - after_s > max(DEADBAND, sure * error) * before_s:
            return Change(axes, units, slowest, before_s, after_s)
    return None


def _apply(state: Balancer, changes: Sequence[Change]) -> tuple[Balancer, Reshard]:
    plan, found, watches, words = state.plan, list(state.axes), list(state.watches), []
    for change in changes:
        i = found.index(change.axes)
        after = with_units(plan, change.axes, change.units)
        found[i] = replace(change.axes, units=change.units)
        words.append(_words(plan, after, change, found[i], state.ids))
        moved = tuple(b - a for a, b in zip(change.axes.units, change.units, strict=True))
        watches[i] = watches[i].changed(moved)
        plan = after
    before_s, after_s = (sum(times) for times in zip(*((c.before_s, c.after_s) for c in changes), strict=True))
    reason = f"{'; '.join(words)}; predicted compute {before_s:.3g} s -> {after_s:.3g} s"
    return replace(state, plan=plan, axes=tuple(found), watches=tuple(watches), skips=SETTLING), Reshard(
        plan, tuple(changes), reason
    )


def _words(before: Plan, after: Plan, change: Change, axes: CoupledAxes, ids: Sequence[int] | None) -> str:
    old, new = shares_of(before, change.axes), shares_of(after, axes)
    times = change.before_s / change.after_s
    return (
        f"{axes.name} {'/'.join(map(str, old))} -> {'/'.join(map(str, new))} {axes.counted}: "
        f"device {change.slowest if ids is None else ids[change.slowest]} took {times:.2g}x the balanced time"
    )


def _totals(axes: CoupledAxes, seconds: Seconds) -> list[float]:
    """What each device computed of the layers of coupled axes."""
    rows = [seconds[name] for name in axes.layers if name in seconds]
    return [sum(row[device] for row in rows) for device in range(len(axes.units))]


def _rates(axes: CoupledAxes, totals: Sequence[float]) -> tuple[float, ...]:
    """Seconds per unit; 0 for a device without a part, which stays without one."""
    return tuple(total / count if count else 0.0 for total, count in zip(totals, axes.units, strict=True))


def _apart(a: float, b: float) -> float:
    return 2.0 * abs(a - b) / (a + b) if a + b else 0.0
