"""Carries out the decisions of `autotune.py` and `rebalance.py`: exchanges step times, and changes plans."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from convoy.comm.control_messages import share_tensor
from convoy.comm.group import Pending
from convoy.errors import InputError, PlanError
from convoy.plan.plan import Plan
from convoy.runtime.module import Distributed, not_distributed
from convoy.runtime.reshard import reshard
from convoy.train import autotune, rebalance
from convoy.train.autotune import Autotune
from convoy.train.rebalance import Balancer, Decision, Keep, Reshard


class Rebalancer:
    """A controller that changes a model's plan and shares while it trains, if that makes steps faster. Every device has one.

    Given other plans, it first trains a few steps with each in turn, and continues with the fastest (`autotune.py`). Then it
    moves shares of that plan between devices as their speeds change. In both cases the loss curve is that of one device.

    After every `every` steps each device sends its step times, eight bytes per layer and step, during the next step. Then all
    devices make the same decision. A step with another batch size than the plan's (the last of an epoch) is ignored.

    Args:
        optimizers: all that work on the model's parameters.
        tell: called with the number of the step, from 0, and the decision: a change, or the end of autotuning.
        every: steps between two exchanges.
        others: further plans to try, as from `make_plans`; the same on every device.
    """

    def __init__(
        self,
        model: Distributed,
        *optimizers: Optimizer,
        tell: Callable[[int, Decision], None] | None = None,
        every: int = 2,
        others: Sequence[Plan] = (),
    ) -> None:
        if not isinstance(model, Distributed):
            raise not_distributed("Rebalancer", model)
        if every < 1:
            raise InputError(f"every={every}: the number of steps between two exchanges of times; give 1 or more")
        for plan in others:
            plan.check(model.traced[True].graph, model.group.devices)
            if plan.outputs != model.plan.outputs:
                raise PlanError(
                    f"plan {plan.name!r} has outputs {plan.outputs!r}, and the model's own {model.plan.outputs!r}: try plans "
                    "with the same outputs, because the training loop handles only one kind"
                )
        self.model, self.optimizers, self.tell, self.every = model, optimizers, tell, every
        self.autotune = Autotune.start([model.plan, *others])
        self.state: Balancer | None = None
        self.decision: Decision = Keep("nothing was timed yet")
        self.steps = 0
        self._layers: list[str] = []
        self._rows: list[Tensor] = []
        self._pending: tuple[Tensor, Pending] | None = None
        if model.cuda_graphs is not None:
            model.cuda_graphs.waits = True
        if self.autotune.is_over:
            self._balance()
        self.begin()

    def begin(self) -> None:
        """Restart the clock, so that the next step is timed from here. Call it after an evaluation between steps."""
        self.model.clock.settle()
        self._before = self._so_far()

    def restart(self) -> None:
        """Drop all times: the model continues by another plan, on other devices."""
        self.autotune = Autotune.start([self.model.plan])
        self._rows, self._pending = [], None
        self._balance()
        self.begin()

    def step(self, batch: float) -> None:
        """Count a step, and move shares between the devices if that is worth it. Call it after each step.

        Args:
            batch: samples in the global batch, or in each micro-batch. If outputs stay with their samples: `output.batch`.

        Raises:
            DeviceLostError: a device did not take part.
        """
        now = self._so_far()
        if batch == self.model.plan.batch and (self.state is None or self.state.axes):
            self._rows.append(now - self._before)
        self._before = now
        if self._pending is not None:
            # Waiting in the previous step would have delayed every device until the slowest had ended that step.
            table, pending = self._pending
            pending.wait()
            self._pending = None
            self._decide(table)
        if len(self._rows) >= self.every:
            self._pending = share_tensor(self.model.group, torch.stack(self._rows))
            self._rows = []
        self.steps += 1

    def _decide(self, table: Tensor) -> None:
        """Decide from the times of some steps: seconds by device, step and row of `_so_far`."""
        for step in table.permute(1, 2, 0).tolist():
            if self.state is None:
                # Devices end a step at different times: use the mean.
                self.autotune, self.decision = autotune.observe(self.autotune, sum(step[0]) / len(step[0]))
            else:
                self.state, self.decision = rebalance.observe(self.state, dict(zip(self._layers, step, strict=True)))
            decided = self.state is None and self.autotune.is_over
            if isinstance(self.decision, Reshard):
                reshard(self.model, self.decision.plan, *self.optimizers)
            if self.tell is not None and (decided or isinstance(self.decision, Reshard)):
                self.tell(self.steps, self.decision)
            if decided:
                self._balance()
            if decided or isinstance(self.decision, Reshard):
                # The later steps in the table, and those since, ran with the old shares.
                self._rows = []
                self.begin()
                return

    def _balance(self) -> None:
        if self.model.cuda_graphs is not None:
            self.model.cuda_graphs.waits = False
        self.state = Balancer.start(self.model.plan, self.model.traced[True].graph, self.model.group.ids)
        self._layers = sorted({name for axes in self.state.axes for name in axes.layers})

    def _so_far(self) -> Tensor:
        """Return this device's seconds so far: of wall time while plans are tried, else of each layer, forward and backward."""
        if self.state is None:
            return torch.tensor([time.perf_counter()], dtype=torch.float64)
        layers_s = self.model.clock.layers_s
        rows = [layers_s.get((name, "forward"), 0.0) + layers_s.get((name, "backward"), 0.0) for name in self._layers]
        return torch.tensor(rows, dtype=torch.float64)
