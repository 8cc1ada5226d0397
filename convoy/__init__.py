"""Convoy: train one CNN on all the devices you have, as fast as their speeds add up.

    model, optimizer, loader = convoy.prepare(model, optimizer, loader)

That is `join`, `make_plan`, `distribute` and `loader` in one. More is in `convoy.train` (averages, clipping, rebalancing),
`convoy.checkpoint`, `convoy.data`, `convoy.errors` and `convoy.api`. All load at first use: importing costs as much as torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from convoy._version import __version__

_HOMES = {
    "convoy.api": ("prepare", "is_first", "print", "wait_for_everyone", "make_plan", "distribute", "loader"),
    "convoy.launch.local": ("notebook",),
    "convoy.elastic.entrance": ("join",),
    "convoy.train.loss": ("loss",),
    "convoy.model.tracing": ("register_layer",),
    "convoy.plan.plan": ("Plan",),
    "convoy.train": ("Rebalancer", "WeightAverage", "GradScaler", "clip_grad_norm_"),
    "convoy.runlog.recorder": ("record",),
    "convoy.checkpoint": ("Checkpointer", "save_checkpoint", "load_checkpoint"),
    "convoy.errors": ("ConvoyError", "InputError", "DeviceLostError"),
}

__all__ = ["__version__", *(name for names in _HOMES.values() for name in names), "device"]

if TYPE_CHECKING:
    from convoy import api, checkpoint, data, errors, train
    from convoy.api import distribute, is_first, loader, make_plan, prepare, print, wait_for_everyone
    from convoy.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
    from convoy.elastic.entrance import join
    from convoy.errors import ConvoyError, DeviceLostError, InputError
    from convoy.launch.local import notebook
    from convoy.model.tracing import register_layer
    from convoy.plan.plan import Plan
    from convoy.runlog.recorder import record
    from convoy.train import GradScaler, Rebalancer, WeightAverage, clip_grad_norm_
    from convoy.train.loss import loss


def __getattr__(name: str) -> Any:
    if name == "device":  # not kept: it is known better after `join`
        return import_module("convoy.api").own_device()
    if name in ("api", "checkpoint", "data", "errors", "train"):
        return import_module(f"convoy.{name}")
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = getattr(import_module(home), name)
            return globals()[name]
    raise AttributeError(f"module 'convoy' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Load the magics, for `%load_ext convoy`."""
    import_module("convoy.launch.local").load_ipython_extension(shell)


def __dir__() -> list[str]:
    return sorted(__all__)
