"""Devices that join a chaos run on threads at a random step; some are killed while joining or later."""

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from convoy.api import distribute
from convoy.comm.connection import Fields
from convoy.comm.group import AloneGroup, ChangingGroup
from convoy.elastic.admission import Verdict
from convoy.elastic.entrance import Entrance
from convoy.elastic.members import Members
from convoy.errors import InputError
from convoy.model.tracing import trace
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from convoy.train.record import Observer
from lab.chaos import Blow, Case, Join
from lab.chaos_drawn import example
from lab.chaos_machines import Machine

HELLO_S = 5.0


class Everybody:
    """An admission policy that admits every device."""

    def decide(self, facts: Fields, members: Sequence[int], device: int) -> Verdict:  # noqa: ARG002
        return "wanted", ""

    def note_joined(self, device: int, facts: Fields) -> None:
        """Nothing."""

    def knowledge(self) -> Any:
        return None

    def learn(self, knowledge: Any) -> None:
        """Nothing."""


class Opens(Observer):
    """An observer that lets the device answer join requests from the first step on."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self._open()

    def on_step_end(self, step: int, samples: int) -> None:  # noqa: ARG002
        self._open()

    def _open(self) -> None:
        if self.members.membership is not None:
            self.members.membership.offer = {}


class Late(Exception):  # noqa: N818 - no error
    """The training ended before this device joined."""


def part_of(net: nn.Module, case: Case, timeout_s: float) -> Distributed:
    """The model of a device that comes, with other weights than the job's. Made before there are threads: torch cannot be
    traced while others train."""
    net = copy.deepcopy(net)
    for parameter in net.parameters():
        nn.init.zeros_(parameter)
    group = ChangingGroup(AloneGroup(torch.device("cpu"), timeout_s))
    plan = named_plan("data", trace(net, example()).graph, case.batch, Speeds((1.0,)))
    return distribute(net, plan, group, example())


def entrance_of(join: Join, machine: Machine, there: Callable[[], Sequence[Members]], over: Callable[[], bool]) -> Any:
    """Return the address to join at once the job has done the steps of the join.

    Args:
        there: what trains.

    Raises:
        Late: it was over before.
    """
    while not any(each.steps >= join.at for each in there()):
        if over():
            raise Late
        time.sleep(0.005)
    until_s = time.monotonic() + HELLO_S
    while True:
        doors = [door for each in there() if each.membership is not None for door in each.membership.addresses]
        try:
            entrance = Entrance(list(dict.fromkeys(doors)), machine)
            entrance.hello(1.0)
            return entrance
        except InputError:  # as yet; or it has come to its end
            if over():
                raise Late from None
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)


def with_joins(case: Case) -> Case:
    """Return the case, longer, with joining devices drawn from its seed."""
    dice = random.Random(f"{case.seed} joins")
    joins = tuple(Join(dice.randint(0, 12)) for _ in range(dice.choice((1, 1, 2, 3))))
    blows = list(case.blows)
    for device, join in enumerate(joins, case.devices):
        match dice.choice(("stays", "stays", "stays", "dies coming", "dies", "leaves")):
            case "dies coming":
                blows.append(Blow(device, "kill", 0, dice.choice((dice.randint(1, 10), dice.randint(1, 60)))))
            case "dies":
                blows.append(Blow(device, "kill", join.at + dice.randint(2, 8), dice.randint(1, 30)))
            case "leaves":
                blows.append(Blow(device, "term", join.at + dice.randint(2, 8), dice.randint(1, 30)))
    return replace(case, joins=joins, blows=tuple(blows), epochs=4, saves=1)
