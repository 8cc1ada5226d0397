"""Autotune: finds the fastest of a few plans by training with each in turn. A pure state machine.

Predictions of a step are some per cent off. If the planner's best plans are closer than that, the devices train a few steps
with each plan and continue with the fastest. Every plan computes the same step, so only time is lost.

The rounds run forth and back (1, 2, 3, 3, 2, 1), so that a steady slowdown of a machine affects all plans equally. A plan that
is far behind after its first round gets no second.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from convoy.plan.plan import Plan
from convoy.train.rebalance import SETTLING, STARTING, Decision, Keep, Reshard

ROUND_STEPS, ROUND_S = 3, 0.5
"""Minimum number of counted steps in a round, and their minimum total seconds."""

FAR_BEHIND = 0.15
"""A plan that is slower by this fraction in its first round gets no second."""

AS_FAST = 0.02
"""The last plan within this fraction of the fastest wins: it has the fewest messages."""


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """A plan on trial, with its step times, except the first of each round."""

    plan: Plan
    seen_s: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        return statistics.median(self.seen_s)


@dataclass(frozen=True, slots=True)
class Autotune:
    """The state of all trials.

    Attributes:
        entries: the planner's choice first, each with fewer messages than those before it.
        running: the index of the plan in use; at the end, the winner.
        rounds: the plans of the rounds to come.
        round_s: seconds of the steps of this round.
    """

    entries: tuple[PlanTrial, ...]
    running: int = 0
    rounds: tuple[int, ...] = ()
    round_s: tuple[float, ...] = ()
    skips: int = STARTING
    is_over: bool = False

    @staticmethod
    def start(plans: Sequence[Plan]) -> "Autotune":
        """Return the state before the first step. With a single plan autotuning is over at once."""
        there = tuple(range(len(plans)))
        return Autotune(
            tuple(PlanTrial(plan) for plan in plans), rounds=(*there[1:], *reversed(there)), is_over=len(plans) < 2
        )

    @property
    def plan(self) -> Plan:
        """The plan in use, or the winner."""
        return self.entries[self.running].plan


def observe(state: Autotune, step_s: float) -> tuple[Autotune, Decision]:
    """Return the next state and the decision after a training step of `step_s` seconds, which must be equal on all devices."""
    if state.is_over:
        return state, Keep("autotuning is over")
    if state.skips:
        return replace(state, skips=state.skips - 1), Keep("the first steps of a plan do not count")
    state = replace(state, round_s=(*state.round_s, step_s))
    if len(state.round_s) < ROUND_STEPS or sum(state.round_s) < ROUND_S:
        return state, Keep(f"plan {state.running + 1} of {len(state.entries)} is being tried")
    entries = list(state.entries)
    own = entries[state.running]
    entries[state.running] = replace(own, seen_s=own.seen_s + state.round_s)
    best_s = min(entry.step_s for entry in entries if entry.seen_s)
    kept = [not entry.seen_s or entry.step_s <= best_s * (1 + FAR_BEHIND) for entry in entries]
    left = tuple(plan for plan in state.rounds if kept[plan])
    # A single plan needs no second round.
    rounds = left if any(not entries[plan].seen_s for plan in left) or sum(kept) > 1 else ()
    if not rounds:
        return _ended(replace(state, entries=tuple(entries), rounds=(), round_s=()))
    after = replace(state, entries=tuple(entries), running=rounds[0], rounds=rounds[1:], round_s=(), skips=0)
    if after.running == state.running:
        return after, Keep(f"plan {state.running + 1} of {len(entries)} has its second round at once")
    return replace(after, skips=SETTLING), Reshard(
        after.plan, (), f"autotune: {_times(entries)}; now plan {rounds[0] + 1}"
    )


_CONTINUES = "continues"


def is_end(decision: Decision) -> bool:
    """Return whether this is the decision that ends autotuning."""
    return decision.reason.endswith(_CONTINUES)


def _ended(state: Autotune) -> tuple[Autotune, Decision]:
    rows = [entry.step_s for entry in state.entries]
    winner = max(i for i, step_s in enumerate(rows) if step_s <= min(rows) * (1 + AS_FAST))
    line = f"autotune: {_times(state.entries)}; plan {winner + 1} {_CONTINUES}"
    ended = replace(state, running=winner, is_over=True)
    if winner == state.running:
        return ended, Keep(line)
    return ended, Reshard(ended.plan, (), line)


def _times(entries: Sequence[PlanTrial]) -> str:
    seen = [f"plan {i} {entry.step_s:.3g} s" for i, entry in enumerate(entries, start=1) if entry.seen_s]
    return f"{', '.join(seen)} a step"
