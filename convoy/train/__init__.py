"""What a training loop uses beside `convoy.prepare`: clipping, averages, mixed precision, moving shares.

::

    loop.py        the loop of the command line: steps, tests, results per epoch
    loader.py      this device's part of every batch
    late_losses.py losses that are read some steps later, so that no accelerator is waited for
    loss.py        the loss of a batch whose outputs stay with their samples
    lr.py          learning-rate schedules
    observer.py    what a training tells of itself, and whom
    controller.py  Rebalancer: watches step times, changes plans and shares

Members, for devices that are lost, leave or join, is of `convoy.elastic`.
"""

from convoy.elastic.members import LeftError, Members, StoppedError
from convoy.runtime.average import WeightAverage
from convoy.runtime.elementwise import ELEMENTWISE
from convoy.runtime.optimizer import clip_grad_norm_, full_optimizer_state
from convoy.runtime.precision import GradScaler
from convoy.runtime.reshard import reshard
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.observer import EpochResult, Evaluation, Observer, StepResult

__all__ = [
    "ELEMENTWISE",
    "EpochResult",
    "Evaluation",
    "GradScaler",
    "LeftError",
    "Loader",
    "Members",
    "Observer",
    "Rebalancer",
    "StepResult",
    "StoppedError",
    "WeightAverage",
    "clip_grad_norm_",
    "full_optimizer_state",
    "reshard",
]
