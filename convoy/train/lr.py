"""How the learning rate changes from step to step: a factor for step k of n, written out.

torch's own schedulers give the same curves (the tests compare them). Written out, a curve is one number per step, without
the memory of the step before: every device has the same, and a run that goes on elsewhere needs to know k and nothing else.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from convoy.errors import unknown_name

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
        """What the learning rate is multiplied by in a step, counted from 0."""
        if self.name != "one-cycle" and step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        return SCHEDULES[self.name](self, step)


def _constant(_schedule: Schedule, _step: int) -> float:
    return 1.0


def _cosine(schedule: Schedule, step: int) -> float:
    """Loshchilov & Hutter 2017, one period without restarts: (1 + cos(pi t)) / 2."""
    return _glide(1.0, 0.0, (step - schedule.warmup_steps) / max(1, schedule.steps - schedule.warmup_steps))


def _step(schedule: Schedule, step: int) -> float:
    return schedule.drop_factor ** (step // schedule.drop_steps)


def _one_cycle(schedule: Schedule, step: int) -> float:
    """Smith & Topin 2019, as torch's OneCycleLR: up on half a cosine, down on another."""
    top = schedule.warmup_steps or ONE_CYCLE_RISE * schedule.steps - 1
    if step < top:
        return _glide(ONE_CYCLE_START, 1.0, step / top)
    return _glide(1.0, ONE_CYCLE_END, (step - top) / max(1.0, schedule.steps - 1 - top))


def _glide(start: float, end: float, part: float) -> float:
    """Half a cosine from one number to another, at 0 to 1 of the way."""
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, part))) / 2


SCHEDULES: Mapping[str, Callable[[Schedule, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "step": _step,
    "one-cycle": _one_cycle,
}


def build_schedule(optimizer: Optimizer, schedule: Schedule) -> LambdaLR:
    """A scheduler whose `step()` follows every step of the optimizer.

    Raises:
        InputError: unknown name; the choices are listed.
    """
    if schedule.name not in SCHEDULES:
        raise unknown_name("schedule", schedule.name, SCHEDULES)
    return LambdaLR(optimizer, schedule.factor)
