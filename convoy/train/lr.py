"""Learning-rate schedules: the factor of step k of n, in closed form.

The curves are those of torch's schedulers, which the tests compare them with. Those carry state from step to step; here a
factor depends on k alone, so a run that is resumed needs nothing else, and trainings of a few steps work, where OneCycleLR
divides by zero.
"""

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from convoy.errors import unknown_name

SCHEDULES = ("constant", "cosine", "step", "one-cycle")

ONE_CYCLE_START, ONE_CYCLE_END = 1 / 25, 1 / 25 / 1e4
"""Of the highest rate, at the first and the last step; the numbers of torch's OneCycleLR."""

ONE_CYCLE_RISE = 0.3
"""Part of the steps until the highest rate, where no warm-up says otherwise."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A curve for the learning rate.

    Attributes:
        name: one of `SCHEDULES`.
        steps: optimizer steps of the whole training.
        warmup_steps: the rate rises in a straight line for so many steps; of one-cycle, the steps of its own rise.
        drop_steps, drop_factor: for "step", every so many steps the rate is multiplied by this.
    """

    name: str
    steps: int
    warmup_steps: int = 0
    drop_steps: int = 1
    drop_factor: float = 0.1

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by in a step, counted from 0.

        Cosine: Loshchilov & Hutter 2017, one period without restarts. One-cycle: Smith & Topin 2019, up on half a cosine, down
        on another.
        """
        warmup = self.warmup_steps
        if self.name == "one-cycle":
            top = warmup or ONE_CYCLE_RISE * self.steps - 1
            if step < top:
                return _half_cosine(ONE_CYCLE_START, 1.0, step / top)
            return _half_cosine(1.0, ONE_CYCLE_END, (step - top) / max(1.0, self.steps - 1 - top))
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if self.name == "cosine":
            return _half_cosine(1.0, 0.0, (step - warmup) / max(1, self.steps - warmup))
        return self.drop_factor ** (step // self.drop_steps) if self.name == "step" else 1.0


def _half_cosine(start: float, end: float, part: float) -> float:
    """From one number to another, at 0 to 1 of the way."""
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, part))) / 2


def build_schedule(optimizer: Optimizer, schedule: Schedule) -> LambdaLR:
    """A scheduler whose `step()` follows every step of the optimizer.

    Raises:
        InputError: unknown name; the choices are listed.
    """
    if schedule.name not in SCHEDULES:
        raise unknown_name("schedule", schedule.name, SCHEDULES)
    return LambdaLR(optimizer, schedule.factor)
