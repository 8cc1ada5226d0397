"""Autotune: finds the fastest of a few plans by training with each in turn. A pure state machine.

A predicted step is some per cent off, most of all in what many messages cost. Where the planner's plans lie closer together
than that, the devices know better: they train a few steps by each plan, and go on with the fastest. Nothing is lost by it
but what the slower plans take longer, since every plan computes the same step.

The rounds go there and back (the first plan, the second, the third, the third, the second, the first), so that a machine that
becomes slower meanwhile, evenly, is unfair to none. A plan that is far behind after its first round has no second.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.plan.plan import Plan
from convoy.train.rebalance import SETTLING, STARTING, Decision, Keep, Reshard

ROUND_STEPS, ROUND_S = 3, 0.5
"""A round has at least so many steps that count, and so many seconds of them."""

FAR_BEHIND = 0.15
"""A plan that takes so much longer in its first round has no second; the benchmarks' machine is as noisy as that."""

AS_FAST = 0.02
"""Plans that lie closer than this are as fast: then the one with the fewest messages goes on, which is the last of them. It
waits least when the others' pace varies, and no round of a few steps tells plans apart by less."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan that is tried.

    Attributes:
        seen_s: seconds of its steps, the first of each round left out.
    """

    plan: Plan
    seen_s: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seen_s)


@dataclass(frozen=True, slots=True)
class Autotune:
    """The state.

    Attributes:
        entries: the planner's choice first, each with fewer messages than those before it.
        running: whose round it is; once all is over, the winner.
        rounds: whose rounds are to come.
        round_s: seconds of the steps of this round.
        skips: so many steps do not count.
    """

    entries: tuple[Entry, ...]
    running: int = 0
    rounds: tuple[int, ...] = ()
    round_s: tuple[float, ...] = ()
    skips: int = STARTING
    is_over: bool = False

    @staticmethod
    def start(plans: Sequence[Plan]) -> "Autotune":
        """Before the first step, which is one of the first plan. A single plan has no rival: it is over at once."""
        there = tuple(range(len(plans)))
        return Autotune(
            tuple(Entry(plan) for plan in plans), rounds=(*there[1:], *reversed(there)), is_over=len(plans) < 2
        )

    @property
    def plan(self) -> Plan:
        """Whose round it is, or who has won."""
        return self.entries[self.running].plan


def observe(state: Autotune, step_s: float) -> tuple[Autotune, Decision]:
    """One training step of the plan whose round it is: the next state, and what to do.

    Args:
        step_s: what the step took, from the end of the one before; the same number on every device.
    """
    if state.is_over:
        return state, Keep("autotuning is over")
    if state.skips:
        return replace(state, skips=state.skips - 1), Keep("the first steps by a plan do not count")
    state = replace(state, round_s=(*state.round_s, step_s))
    if len(state.round_s) < ROUND_STEPS or sum(state.round_s) < ROUND_S:
        return state, Keep(f"plan {state.running + 1} of {len(state.entries)} is being tried")
    entries = list(state.entries)
    own = entries[state.running]
    entries[state.running] = replace(own, seen_s=own.seen_s + state.round_s)
    rounds = _rounds_left(entries, state.rounds)
    if not rounds:
        return _ended(replace(state, entries=tuple(entries), rounds=(), round_s=()))
    after = replace(state, entries=tuple(entries), running=rounds[0], rounds=rounds[1:], round_s=(), skips=0)
    if after.running == state.running:
        return after, Keep(f"plan {state.running + 1} of {len(entries)} has its second round at once")
    return replace(after, skips=SETTLING), Reshard(
        after.plan, (), f"autotune: {_words(entries)}; now plan {rounds[0] + 1}"
    )


_GOES_ON = "goes on"


def is_end(decision: Decision) -> bool:
    """Whether this is the decision that ends autotuning."""
    return decision.reason.endswith(_GOES_ON)


def _rounds_left(entries: Sequence[Entry], rounds: tuple[int, ...]) -> tuple[int, ...]:
    """The rounds that are left, without those of plans that are far behind."""
    best_s = min(entry.step_s for entry in entries if entry.seen_s)
    kept = [not entry.seen_s or entry.step_s <= best_s * (1 + FAR_BEHIND) for entry in entries]
    left = tuple(plan for plan in rounds if kept[plan])
    # The only one whose second round is left has nobody to be compared with.
    return left if any(not entries[plan].seen_s for plan in left) or sum(kept) > 1 else ()


def _ended(state: Autotune) -> tuple[Autotune, Decision]:
    rows = [entry.step_s for entry in state.entries]
    winner = max(i for i, step_s in enumerate(rows) if step_s <= min(rows) * (1 + AS_FAST))
    words = f"autotune: {_words(state.entries)}; plan {winner + 1} {_GOES_ON}"
    ended = replace(state, running=winner, is_over=True)
    if winner == state.running:
        return ended, Keep(words)
    return ended, Reshard(ended.plan, (), words)


def _words(entries: Sequence[Entry]) -> str:
    seen = [f"plan {i} {entry.step_s:.3g} s" for i, entry in enumerate(entries, start=1) if entry.seen_s]
    return f"{', '.join(seen)} a step"
