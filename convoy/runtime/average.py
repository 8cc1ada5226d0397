"""Keep a moving average of the local shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from convoy.errors import InputError
from convoy.runtime.shards import works_on


class WeightAverage:
    """An exponential moving average of weights: after every step, average = decay * average + (1 - decay) * weight.

    It computes the same numbers as torch's `AveragedModel`. The optimizer's state of each parameter contains the average, so
    the average moves with it: to other devices at a reshard, into `convoy.train.full_optimizer_state`, into checkpoints and
    back. The average of a parameter starts with its weights after its first step.

    Buffers are not averaged, as by torch's default: batch norm keeps the statistics of the trained weights. Compute those of
    the averages with `torch.optim.swa_utils.update_bn`, or use `AveragedModel(model, use_buffers=True)` between reshards.
    Both are exact under every plan.

    ::

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = convoy.WeightAverage(optimizer, 0.999)  # every optimizer.step() updates it
        ...
        with average.as_weights():
            update_bn(loader, model)
            weights = model.full_state_dict()

    Args:
        optimizer: of the weights; its class must be in `convoy.train.ELEMENTWISE`.
        decay: decay per step; 0 to 1.
    """

    STATE: ClassVar[str] = "average"  # the key of an average in the optimizer's state of a parameter

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise InputError(f"an average with a decay of {decay:g}: give a number from 0 to 1, e.g. 0.999")
        self.optimizer = optimizer
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        optimizer.register_step_post_hook(self._follow)

    @torch.no_grad()
    def _follow(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        parameters = works_on(optimizer)
        known = [p for p in parameters if self.STATE in optimizer.state.get(p, {})]
        if known:
            self._update([optimizer.state[p][self.STATE] for p in known], known, None)
        for parameter in parameters:
            # After its first gradient only, because optimizers initialise a state only if it is empty.
            if parameter.grad is not None and self.STATE not in optimizer.state.get(parameter, {}):
                optimizer.state[parameter][self.STATE] = parameter.detach().clone()

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """Use the averages as weights inside the block, to test or gather them."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for parameter, state in self.optimizer.state.items():
            if self.STATE in state:
                state[self.STATE], parameter.data = parameter.data, state[self.STATE]
