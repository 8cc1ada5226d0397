"""The plan for the next devices of a training: who makes it, and what it is where nobody plans anew."""

from collections.abc import Sequence
from typing import Protocol

from convoy.plan.plan import Plan
from convoy.plan.survivors import plan_for
from convoy.runtime.module import Distributed


class Replan(Protocol):
    """Makes the plan for the next devices. All are named by their ids, in the order in which they are in the group."""

    def note(self, model: Distributed, before: Sequence[int]) -> None:
        """On every device: what there is to be kept of what the model's plan has shown, which is still the one of `before`."""

    def __call__(self, model: Distributed, before: Sequence[int], now: Sequence[int]) -> Plan:
        """On the first of the devices `now`."""
        ...


class InProportion:
    """The same strategies, with shares in the same proportions."""

    def note(self, model: Distributed, before: Sequence[int]) -> None:
        """Nothing."""

    def __call__(self, model: Distributed, before: Sequence[int], now: Sequence[int]) -> Plan:
        devices = [before.index(d) if d in before else None for d in now]
        return plan_for(model.plan, model.traced[True].graph, devices)
