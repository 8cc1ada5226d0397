"""The effect around `rebalance.py`: after each step the devices tell each other what they computed, and move their shares."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from convoy.execute.group import Message
from convoy.execute.module import Distributed
from convoy.execute.reshare import reshare
from convoy.rebalance import Balancer, Keep, Reshare, Seconds, observe


class Rebalancer:
    """Keeps the shares of a model right while it trains. Every device has one, and calls it after every step.

    Every `every` steps the devices exchange one small message each, eight bytes per layer and step, and come to the same
    decision. A step with a batch other than the plan's own (the last of an epoch) is not looked at.

    ::

        rebalancer = convoy.Rebalancer(model, optimizer)
        for x, y in loader:
            ...
            optimizer.step()
            rebalancer.step(len(y))

    Args:
        optimizers: all that work on the model's parameters.
        tell: is called with the number of the step, from 0, and what was done.
        every: steps between two exchanges.

    Attributes:
        decision: the latest.
    """

    def __init__(
        self,
        model: Distributed,
        *optimizers: Optimizer,
        tell: Callable[[int, Reshare], None] | None = None,
        every: int = 2,
    ) -> None:
        self.model, self.optimizers, self.tell, self.every = model, optimizers, tell, every
        self.state = Balancer.start(model.plan, model.traced[True].graph)
        self.decision: Keep | Reshare = Keep("nothing was timed yet")
        self.steps = 0
        model.clock.waits = True
        self._layers = sorted({name for bond in self.state.bonds for name in bond.layers})
        self._rows: list[Tensor] = []
        self.begin()

    def begin(self) -> None:
        """What was computed until now is no training step: call it after an evaluation between steps."""
        self._before = self._so_far()

    def step(self, batch: int) -> None:
        """After each step. Moves shares between the devices where that is worth it.

        Args:
            batch: samples in the whole batch.

        Raises:
            DeviceLostError: a device did not take part.
        """
        now = self._so_far()
        if batch == self.state.plan.batch and self.state.bonds:
            self._rows.append(now - self._before)
        self._before = now
        if len(self._rows) == self.every:
            self._decide()
        self.steps += 1

    def _decide(self) -> None:
        table = self._exchanged(torch.stack(self._rows))
        self._rows = []
        for seconds in table:
            self.state, self.decision = observe(self.state, seconds)
            if isinstance(self.decision, Reshare):
                # The steps after it in the table ran with the old shares: the next are seen afresh.
                reshare(self.model, self.decision.plan, *self.optimizers)
                if self.tell is not None:
                    self.tell(self.steps, self.decision)
                self.begin()
                return

    def _so_far(self) -> Tensor:
        """Seconds of each layer on this device since the start, forward and backward."""
        layers_s = self.model.clock.layers_s
        rows = [layers_s.get((name, "forward"), 0.0) + layers_s.get((name, "backward"), 0.0) for name in self._layers]
        return torch.tensor(rows, dtype=torch.float64)

    def _exchanged(self, own: Tensor) -> list[Seconds]:
        """Of each step, what every device computed; the same numbers on every device."""
        group = self.model.group
        table = torch.zeros(group.devices, *own.shape, dtype=own.dtype, device=group.torch_device)
        table[group.device] = own
        others = [device for device in range(group.devices) if device != group.device]
        mine = table[group.device].clone()
        group.exchange([Message(d, mine) for d in others], [Message(d, table[d]) for d in others])
        by_step = table.permute(1, 2, 0).tolist()
        return [dict(zip(self._layers, step, strict=True)) for step in by_step]
