"""What a training loop uses beside `convoy.prepare`: clipping, averages, mixed precision, moving shares.

::

    loop.py        the loop of the command line: steps, tests, results per epoch
    loader.py      this device's part of every batch
    late_losses.py losses that are read some steps later, so that no accelerator is waited for
    loss.py        the loss of a batch whose outputs stay with their samples
    lr.py          learning-rate schedules
    observer.py    what a training tells of itself, and whom
    controller.py  Rebalancer: watches step times, changes plans and shares
    members.py     Members: goes on without the devices that are lost; a loop of one's own puts it around its steps
    going_on.py    what Members builds on: after a step the state is kept, after a loss brought to those that are left
    between.py     what was done between steps, for who was behind or comes later
    others.py      the state beside the model: taken and brought back
    wishes.py      who leaves, comes in or ends after a step
    newcomers.py   who comes in, and what they are told
    changed.py     the errors that end a training, or let its devices meet anew, and the line that tells it
    replan.py      the plan for the next devices
"""

from convoy.runtime.average import WeightAverage
from convoy.runtime.elementwise import ELEMENTWISE
from convoy.runtime.optimizer import clip_grad_norm_, full_optimizer_state
from convoy.runtime.precision import GradScaler
from convoy.runtime.reshard import reshare
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.members import Members
from convoy.train.observer import EpochResult, Evaluation, Observer, StepResult

__all__ = [
    "ELEMENTWISE",
    "EpochResult",
    "Evaluation",
    "GradScaler",
    "Loader",
    "Members",
    "Observer",
    "Rebalancer",
    "StepResult",
    "WeightAverage",
    "clip_grad_norm_",
    "full_optimizer_state",
    "reshare",
]
