"""What a training loop uses beside the four lines: clipping, averages, mixed precision, moving shares.

::

    loop.py        the loop of the command line: steps, tests, results per epoch
    loader.py      this device's part of every batch
    lr.py          learning-rate schedules
    controller.py  Rebalancer: watches step times, changes plans and shares
"""

from convoy.runtime.average import WeightAverage
from convoy.runtime.clip import clip_grad_norm_
from convoy.runtime.elementwise import ELEMENTWISE
from convoy.runtime.optimizer import full_optimizer_state
from convoy.runtime.precision import GradScaler
from convoy.runtime.reshard import reshare
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader

__all__ = [
    "ELEMENTWISE",
    "GradScaler",
    "Loader",
    "Rebalancer",
    "WeightAverage",
    "clip_grad_norm_",
    "full_optimizer_state",
    "reshare",
]
