"""The effect around `rebalance.py`: after each step the devices tell each other what they computed, and move their shares."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from convoy.execute.group import Message, Pending
from convoy.execute.module import Distributed
from convoy.execute.reshare import reshare
from convoy.rebalance import Balancer, Keep, Reshare, observe


class Rebalancer:
    """Keeps the shares of a model right while it trains. Every device has one, and calls it after every step.

    Every `every` steps the devices exchange one small message each, eight bytes per layer and step, which travels during the
    next step; after that they come to the same decision. A step with a batch other than the plan's own (the last of an epoch)
    is not looked at.

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
        self._travelling: tuple[Tensor, Pending] | None = None
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
        if self._travelling is not None:
            # Awaited at once, it would hold up every device until the slowest has ended its step.
            table, travels = self._travelling
            travels.wait()
            self._travelling = None
            self._decide(table)
        if len(self._rows) >= self.every:
            self._travelling = self._sent(torch.stack(self._rows))
            self._rows = []
        self.steps += 1

    def _decide(self, table: Tensor) -> None:
        by_step = table.permute(1, 2, 0).tolist()
        for step in by_step:
            self.state, self.decision = observe(self.state, dict(zip(self._layers, step, strict=True)))
            if isinstance(self.decision, Reshare):
                # The steps after it ran with the old shares, in the table and since: the next are seen afresh.
                reshare(self.model, self.decision.plan, *self.optimizers)
                if self.tell is not None:
                    self.tell(self.steps, self.decision)
                self._rows = []
                self.begin()
                return

    def _so_far(self) -> Tensor:
        """Seconds of each layer on this device since the start, forward and backward."""
        layers_s = self.model.clock.layers_s
        rows = [layers_s.get((name, "forward"), 0.0) + layers_s.get((name, "backward"), 0.0) for name in self._layers]
        return torch.tensor(rows, dtype=torch.float64)

    def _sent(self, own: Tensor) -> tuple[Tensor, Pending]:
        """A table (device, step, layer) that fills with what every device computed; the same numbers on every device."""
        group = self.model.group
        table = torch.zeros(group.devices, *own.shape, dtype=own.dtype, device=group.torch_device)
        table[group.device] = own
        others = [device for device in range(group.devices) if device != group.device]
        mine = table[group.device].clone()
        return table, group.start([Message(d, mine) for d in others], [Message(d, table[d]) for d in others])
