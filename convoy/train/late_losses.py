"""Losses of steps, read some steps after them: an accelerator is never waited for, and nobody learns of a NaN much later."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from convoy.comm.collectives import gather
from convoy.comm.group import Group
from convoy.machine.accelerator import in_host_memory, queued

LATE_STEPS = 2
"""So many steps after its own the loss of a step is read where an accelerator computes; by then it is there."""


class UnreadNumber:
    """One number on its way from the device that computes it: a sum of parts.

    Args:
        parts: one for each pass of the step; from an accelerator they are copied behind what it has to do, unawaited.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        row = torch.stack([part.detach().reshape(()) for part in parts])
        self._row = row
        self._copied: torch.Event | None = None
        if row.device.type != "cpu":
            self._row = in_host_memory(row)
            self._row.copy_(row, non_blocking=True)
            self._copied = queued(row.device)

    def read(self) -> float:
        """The number; waits for the device if it is not there yet."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return float(sum(self._row.tolist()))


@dataclass
class Unread:
    """A step whose loss was not read yet: as `StepResult`."""

    step: int
    epoch: int
    loss: UnreadNumber | float
    samples: int
    lr: float
    ended_s: float = 0.0


class LateLosses:
    """The steps whose losses are still to be read, in their order.

    Args:
        late: steps that a loss may wait for its reader.
    """

    def __init__(self, late: int) -> None:
        self.late = late
        self._unread: deque[Unread] = deque()

    def add(self, step: Unread) -> None:
        self._unread.append(step)

    def due(self) -> Iterator[tuple[Unread, float]]:
        """Steps with their losses, all but the latest `late`."""
        while len(self._unread) > self.late:
            yield self._next()

    def rest(self) -> Iterator[tuple[Unread, float]]:
        """All of them."""
        while self._unread:
            yield self._next()

    def known(self) -> list[tuple[Unread, float]]:
        """All of them, which stay."""
        return [(each, each.loss if isinstance(each.loss, float) else each.loss.read()) for each in self._unread]

    def forget(self, step: int) -> None:
        """Drop what was not read of this step and those behind it: they are made again."""
        while self._unread and self._unread[-1].step >= step:
            self._unread.pop()

    def _next(self) -> tuple[Unread, float]:
        first = self._unread.popleft()
        return first, first.loss if isinstance(first.loss, float) else first.loss.read()


def lateness(device: torch.device, group: Group | None = None) -> int:
    """How many steps late losses are read; the same on all devices of a group, which all call it.

    A NaN then ends the training at the same step on all of them.
    """
    kinds = [device.type] if group is None else gather(group, "what computes", device.type)
    return LATE_STEPS if any(kind != "cpu" for kind in kinds) else 0
