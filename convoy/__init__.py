"""Convoy: train one CNN on all the devices you have, as fast as their speeds add up.

    group = convoy.join()
    plan = convoy.make_plan("master", model, example, batch=64, group=group)
    model = convoy.distribute(model, plan, group, example)
    loader = convoy.loader(dataset, 64, model)

Names are loaded when they are first used, so that `import convoy` costs no more than importing torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from convoy._version import __version__

# PyTorch reads this at its first tensor: ones of 2 MB or more then come in pages of 2 MB where the kernel allows that.
# Gradients of a wide Linear are fresh memory in every step; in pages of 4 KB that alone took a third of a step.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_HOMES = {
    "join": "convoy.comm.processes",
    "make_plan": "convoy.api",
    "make_plans": "convoy.api",
    "distribute": "convoy.api",
    "loader": "convoy.api",
    "clip_grad_norm_": "convoy.runtime.clip",
    "GradScaler": "convoy.runtime.precision",
    "WeightAverage": "convoy.runtime.average",
    "reshare": "convoy.runtime.reshard",
    "Rebalancer": "convoy.train.controller",
    "full_optimizer_state": "convoy.runtime.optimizer",
    "ELEMENTWISE": "convoy.runtime.optimizer",
    "Checkpointer": "convoy.checkpoint",
    "Progress": "convoy.checkpoint",
    "load_checkpoint": "convoy.checkpoint",
    "save_checkpoint": "convoy.checkpoint",
    "Plan": "convoy.plan.plan",
    "ConvoyError": "convoy.errors",
    "InputError": "convoy.errors",
    "PlanError": "convoy.errors",
    "DataError": "convoy.errors",
    "MismatchError": "convoy.errors",
    "DeviceLostError": "convoy.errors",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from convoy.api import distribute, loader, make_plan, make_plans
    from convoy.checkpoint import Checkpointer, Progress, load_checkpoint, save_checkpoint
    from convoy.comm.processes import join
    from convoy.errors import ConvoyError, DataError, DeviceLostError, InputError, MismatchError, PlanError
    from convoy.plan.plan import Plan
    from convoy.runtime.average import WeightAverage
    from convoy.runtime.clip import clip_grad_norm_
    from convoy.runtime.optimizer import ELEMENTWISE, full_optimizer_state
    from convoy.runtime.precision import GradScaler
    from convoy.runtime.reshard import reshare
    from convoy.train.controller import Rebalancer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'convoy' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
