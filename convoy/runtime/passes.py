"""Several passes that make one step: their gradients stay on each device until the last pass sums them, once.

A gradient that is to be summed is a pending sum: the whole gradient is that of all devices' `.grad` together. A whole one, of a
pass before that was summed, becomes such a sum by staying on one device alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count

import torch
from torch import nn

from convoy.errors import InputError
from convoy.plan.steps import MicroBatch
from convoy.runtime.gradients import Found
from convoy.runtime.marks import is_unsummed, mark_unsummed

_KINDS: Mapping[tuple[bool, bool], MicroBatch] = {
    (True, True): "only",
    (False, True): "first",
    (False, False): "middle",
    (True, False): "last",
}
"""By whether a pass sums gradients, and whether it gathers weights that are kept in shares."""


class Passes:
    """Which pass of a step the next one is, and what those of one model have left to be summed, as marks on its parameters.

    Args:
        counts_here: of a parameter's key, whether this device is the one to keep what all devices have whole.

    Attributes:
        sums: whether the next pass sums gradients over the devices.
        stages: counts backward passes, for inexact mixing.
    """

    def __init__(self, counts_here: Callable[[str], bool]) -> None:
        self._counts_here = counts_here
        self.sums = True
        self.stages = count()
        self._backward: tuple[int, bool] = (-1, True)  # the last, and whether it summed

    def kind(self, *, gathers: bool) -> MicroBatch:
        """The kind of the next pass, which gathers weights that are kept in shares, or has them still."""
        return _KINDS[self.sums, gathers]

    @contextmanager
    def left_unsummed(self) -> Iterator[None]:
        """Within it, passes leave their gradients on each device."""
        outside, self.sums = self.sums, False
        try:
            yield
        finally:
            self.sums = outside

    def begin(self, parameters: Mapping[str, nn.Parameter], reached: Iterable[str], *, sums: bool) -> Found:
        """A backward begins: what passes before have left of each gradient, taken out of `.grad`. The new ones are added to it,
        and summed if this backward sums; what autograd then gets is that of all passes.

        Args:
            parameters: those that have a gradient, by key.
            reached: the keys of those that this backward gives one.
            sums: whether it sums gradients over the devices.

        Raises:
            InputError: one backward goes through passes of both kinds.
        """
        task = torch._C._current_graph_task_id()
        if self._backward == (task, not sums):
            raise InputError(
                "one backward goes through a forward inside no_sync() and one outside: call the model for all parts of a loss "
                "inside, or for all of them outside"
            )
        self._backward = (task, sums)
        for key in () if sums else reached:
            parameter = parameters.get(key)
            if parameter is not None and not is_unsummed(parameter):
                if not self._counts_here(key):
                    parameter.grad = None
                mark_unsummed(parameter, True)
        left: Found = {}
        for key, parameter in parameters.items():
            if is_unsummed(parameter):
                left[key], parameter.grad = parameter.grad, None
                mark_unsummed(parameter, not sums)
        return left


def check_added(given: Sequence[nn.Parameter], *, to_each: bool) -> None:
    """After a backward in which each of these had no gradient before, and was given one.

    Raises:
        InputError: autograd has set it for none, or not for each: it handed gradients to somebody else, or left them out.
    """
    added = [p.grad is not None for p in given]
    if added and not (all(added) if to_each else any(added)):
        raise InputError(
            "torch.autograd.grad, or backward(inputs=...), of parameters with passes in no_sync(), which leave a part of the "
            "sum on each device: leave no_sync() out"
        )
