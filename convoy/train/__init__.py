"""Tools for training loops: loader, clipping, weight averages, mixed precision, rebalancing, observers, `Members`."""

from convoy.elastic.members import LeftError, Members, StoppedError
from convoy.runtime.optimizer import WeightAverage, clip_grad_norm_, full_optimizer_state
from convoy.runtime.precision import GradScaler
from convoy.runtime.reshard import reshard
from convoy.runtime.shards import ELEMENTWISE
from convoy.train.controller import Rebalancer
from convoy.train.loader import Loader
from convoy.train.loss import DiceLoss
from convoy.train.record import EpochResult, Evaluation, Observer, StepResult

__all__ = [
    "ELEMENTWISE",
    "DiceLoss",
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
