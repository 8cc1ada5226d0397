"""Tools for training loops: clipping, weight averages, mixed precision, rebalancing, observers.

::

    loop.py        the loop of the command line: steps, learning rates, tests, results per epoch
    loader.py      the local part of every batch
    adopt.py       takes over an ordinary optimizer and DataLoader
    loss.py        the loss of a global batch that is split over the devices
    record.py      results that can be rolled back, and losses that are read some steps late
    observer.py    observers: progress bars, the log, loggers
    controller.py  Rebalancer: watches step times, changes plans and shares

`Members`, for lost, leaving and joining devices, is in `convoy.elastic`.
"""

from convoy.elastic.members import LeftError, Members, StoppedError
from convoy.runtime.optimizer import WeightAverage, clip_grad_norm_, full_optimizer_state
from convoy.runtime.precision import GradScaler
from convoy.runtime.reshard import reshard
from convoy.runtime.shards import ELEMENTWISE
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
