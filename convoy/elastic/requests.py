"""What the devices wish for after a step: to leave, to let others in, to end; and how all do so."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from convoy.comm.agreement import from_first, share_number, share_tensor
from convoy.comm.group import Group, Pending
from convoy.elastic.changed import GrownError, LeftError, StoppedError
from convoy.elastic.regroup import Membership
from convoy.errors import DeviceLostError


class Wishes:
    """Tells the others what this device wishes for, and hears their wishes a step later, so that nobody waits for them.

    Attributes:
        leaves: this device wishes to leave.
        ends: it wishes that all end.
    """

    def __init__(self) -> None:
        self.leaves, self.ends = False, False
        self._told: tuple[Tensor, Pending] | None = None

    def exchange(self, group: Group, wanted: Callable[[], bool]) -> tuple[list[int], bool, bool]:
        """The devices that leave after this step, by their index, whether others come in, and whether all end: as all told in
        the step before. Every device calls it.

        Args:
            wanted: whether this device knows of somebody who is to come in.
        """
        leaving, grows, ends = [], False, False
        if self._told is not None:
            table, travels = self._told
            travels.wait()
            told = [int(each) for each in table.tolist()]
            leaving = may_leave([bool(each & LEAVES) for each in told])
            grows = any(each & GROWS for each in told)
            # Where all leave nobody goes on, so they end together, and save.
            ends = any(each & ENDS for each in told) or all(each & LEAVES for each in told)
        own = torch.tensor(float(LEAVES * self.leaves + GROWS * wanted() + ENDS * self.ends), dtype=torch.float64)
        self._told = share_tensor(group, own)
        return leaving, grows, ends

    def forget(self) -> None:
        """What was told before a loss."""
        self._told = None


def may_leave(wish: Sequence[bool]) -> list[int]:
    """Who of the devices that wish to leaves now. The next one has the copies of what only it had, and stays; the others leave
    after a later step."""
    return [d for d, each in enumerate(wish) if each and not wish[(d + 1) % len(wish)]]


def end_all(group: Group, step: int) -> NoReturn:
    """All have finished the same step, and end there. Every device calls it.

    Raises:
        StoppedError: always.
        DeviceLostError: a device was lost just now.
    """
    share_number(group, 0.0)  # everybody knows
    raise StoppedError(f"the training was stopped after step {step}, as it was asked to")


def part(group: Group, membership: Membership, leaving: Sequence[int], step: int) -> NoReturn:
    """All have kept the same step: those that leave go, once the others have what only they had. Every device calls it.

    Raises:
        LeftError: on those that leave.
        DeviceLostError: on the others.
    """
    share_number(group, 0.0)  # everybody has
    if group.device in leaving:
        me = membership.me
        error = LeftError(me, f"device {me} has left the job after step {step}, as it was asked to")
        membership.depart(error)
        raise error
    left = group.ids[leaving[0]]
    raise DeviceLostError(left, f"device {left} left the job")


def let_in(group: Group, membership: Membership) -> None:
    """All have kept the same step: those that are wanted come in, if they are still there. Every device calls it.

    Raises:
        GrownError: they do: all meet anew.
        DeviceLostError: a device was lost.
    """
    rows = from_first(group, "who comes in", lambda: membership.number(membership.applicants.wanted()))
    if rows:
        membership.grant(rows)
        raise GrownError(group.device, "newcomers are let in")


LEAVES, GROWS, ENDS = 1, 2, 4
"""What a device says after each step: that it leaves; that somebody is to come in; that all are to end."""
