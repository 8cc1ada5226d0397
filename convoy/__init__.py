"""Convoy: train one CNN on all the devices you have, as fast as their speeds add up.

    model, optimizer, loader = convoy.prepare(model, optimizer, loader)

That is `join`, `make_plan`, `distribute` and `loader` in one. More stands in `convoy.train` (averages, clipping, which
optimizers work on pieces, moving shares), `convoy.checkpoint`, `convoy.data`, `convoy.errors` and `convoy.api`. Names and
these modules are loaded when they are first used, so that `import convoy` costs no more than importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from convoy._version import __version__

_HOMES = {
    "prepare": "convoy.api",
    "is_first": "convoy.api",
    "print": "convoy.api",
    "notebook": "convoy.launch.notebook",
    "join": "convoy.elastic.entrance",
    "make_plan": "convoy.api",
    "distribute": "convoy.api",
    "loader": "convoy.api",
    "loss": "convoy.train.loss",
    "register_layer": "convoy.model.tracing",
    "Plan": "convoy.plan.plan",
    "Rebalancer": "convoy.train",
    "WeightAverage": "convoy.train",
    "GradScaler": "convoy.train",
    "record": "convoy.runlog.recorder",
    "Checkpointer": "convoy.checkpoint",
    "save_checkpoint": "convoy.checkpoint",
    "load_checkpoint": "convoy.checkpoint",
    "ConvoyError": "convoy.errors",
    "InputError": "convoy.errors",
    "DeviceLostError": "convoy.errors",
}

_ALIASES = {
    "make_plans": "convoy.api",
    "clip_grad_norm_": "convoy.train",
    "full_optimizer_state": "convoy.train",
    "reshard": "convoy.train",
    "ELEMENTWISE": "convoy.train",
    "Progress": "convoy.checkpoint",
    "PlanError": "convoy.errors",
    "DataError": "convoy.errors",
    "MismatchError": "convoy.errors",
}
"""Names that stood here before, and are found in these modules now. Kept for one release after 0.1."""

_UNLISTED = {"load_ipython_extension": "convoy.launch.notebook"}
"""What others look for by name: `%load_ext convoy` in a notebook."""

_MODULES = ("api", "checkpoint", "data", "errors", "train")

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from convoy import api, checkpoint, data, errors, train
    from convoy.api import distribute, is_first, loader, make_plan, make_plans, prepare, print
    from convoy.checkpoint import Checkpointer, Progress, load_checkpoint, save_checkpoint
    from convoy.elastic.entrance import join
    from convoy.errors import ConvoyError, DataError, DeviceLostError, InputError, MismatchError, PlanError
    from convoy.launch.notebook import notebook
    from convoy.model.tracing import register_layer
    from convoy.plan.plan import Plan
    from convoy.runlog.recorder import record
    from convoy.train import (
        ELEMENTWISE,
        GradScaler,
        Rebalancer,
        WeightAverage,
        clip_grad_norm_,
        full_optimizer_state,
        reshard,
    )
    from convoy.train.loss import loss


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"convoy.{name}")
    home = _HOMES.get(name) or _ALIASES.get(name) or _UNLISTED.get(name)
    if home is None:
        raise AttributeError(f"module 'convoy' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
