"""Refuse changes to a distributed model that a step would ignore: hooks; replaced, converted or frozen parameters.

Three kinds of hooks act as on one device: hooks on the distributed model, whose outputs are those of the global batch;
forward hooks registered on modules before `distribute`, which every device then computes for the global batch; and hooks on
parameters that every device holds whole, because autograd gets their summed gradients. Any other hook would see a shard or
not run.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch.nn.modules.module as modules_of_torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.tracing import TracedModel
from convoy.model.tracing.copies import KINDS, ON_PARAMETERS, on_weights
from convoy.runtime.shards import CallGuard

_GLOBAL = tuple(getattr(modules_of_torch, f"_global{kind}") for kind in KINDS)


class ModelChecks:
    """The checks of one model before every step.

    Args:
        model: this device's module tree.
        traced: the traced model, by mode (True: training).
        devices: number of devices.

    Attributes:
        trained: parameters that require a gradient, by key.
    """

    def __init__(self, model: nn.Module, traced: Mapping[bool, TracedModel], devices: int) -> None:
        self._model = model
        held = dict(model.named_parameters())
        self._dtypes = {key: p.dtype for key, p in held.items()}
        self.trained = {key: p for key, p in held.items() if p.requires_grad}
        self._parameters = [
            (model.get_submodule(key.rpartition(".")[0])._parameters, key.rpartition(".")[2], key, p)
            for key, p in held.items()
        ]
        self.use_devices(traced, devices)

    def use_devices(self, traced: Mapping[bool, TracedModel], devices: int) -> None:
        self._tables = {mode: _hook_tables(self._model, trace, devices) for mode, trace in traced.items()}

    def check(self, training: bool, whole: Mapping[str, bool]) -> None:
        """Raise InputError if hooks or parameters have changed.

        Args:
            whole: for each parameter, whether every device holds all of it.
        """
        _check_hooks(self._model, *self._tables[training])
        for holder, name, key, parameter in self._parameters:
            if holder.get(name) is not parameter:
                raise InputError(
                    f"parameter {key!r} was replaced after distribute(): change its values, by load_state_dict() or "
                    "parameter.data, or change the model before and distribute it again"
                )
            if parameter.dtype is not self._dtypes[key]:
                raise InputError(
                    f"parameter {key!r} became {parameter.dtype} after distribute(), and was {self._dtypes[key]}: change the "
                    "model before, or give prepare a precision"
                )
            if parameter.requires_grad != (key in self.trained):
                raise InputError(
                    f"parameter {key!r} was {'thawed' if parameter.requires_grad else 'frozen'} after distribute(): set "
                    "requires_grad on the model before, and distribute it again"
                )
            if (parameter._backward_hooks or parameter._post_accumulate_grad_hooks) and not whole[key]:
                what = next(name for kind, name in ON_PARAMETERS.items() if getattr(parameter, kind))
                raise InputError(
                    f"parameter {key!r} has a {what}, and each device has only a shard of its gradient: "
                    "change .grad between backward() and step() instead (see gradients_changed()), or use a plan that copies "
                    "the parameter to every device"
                )


def carry_over(new: nn.Parameter, old: Tensor) -> None:
    """Let the hooks of one parameter act on another until they are removed."""
    for kind in ON_PARAMETERS:
        if hooks := getattr(old, kind, None):
            setattr(new, kind, hooks)


_Tables = list[dict[int, Any]]


def _hook_tables(model: nn.Module, traced: TracedModel, devices: int) -> tuple[_Tables, _Tables]:
    """Return the hook tables of modules that must be empty, and those that may contain torch's own hooks on weights.

    Any other hook in them would not run, or would see a shard.
    """
    called = [
        (path, layer.everywhere)
        for name, layer in traced.graph.layers.items()
        if layer.kind == "opaque"
        for path in traced.operations[name].modules
    ]
    never: _Tables = []
    of_torch: _Tables = []
    for path, module in model.named_modules():
        live = [everywhere for whole, everywhere in called if whole in ("", path) or path.startswith(f"{whole}.")]
        for kind in KINDS:
            if live and (devices == 1 or (any(live) and "forward" in kind)):
                continue  # the module is called as the user wrote it, with the global batch
            (of_torch if live else never).append(getattr(module, kind))
    return never, of_torch


def _check_hooks(model: nn.Module, never: _Tables, of_torch: _Tables) -> None:
    for hooks in filter(None, never):
        if not all(isinstance(hook, CallGuard) for hook in list(hooks.values())):
            _refuse_on_module(model, hooks)
    for hooks in filter(None, of_torch):
        if not all(map(on_weights, list(hooks.values()))):
            _refuse_on_module(model, hooks)
    for kind, hooks in zip(KINDS.values(), _GLOBAL, strict=True):
        # torch's own module tracker, which counts FLOP, changes nothing.
        owners = [type(getattr(hook, "__self__", None)) for hook in list(hooks.values())]
        if not all(owner.__module__.startswith("torch.") for owner in owners):
            raise InputError(
                f"a {kind} was registered for all modules: a distributed model does not call its modules one by one; "
                "register it on the distributed model, or on single modules before distribute()"
            )


def _refuse_on_module(model: nn.Module, hooks: dict[int, Any]) -> NoReturn:
    path, kind = next((p, k) for p, m in model.named_modules() for k in KINDS if getattr(m, k) is hooks)
    what = f"module {path!r} has" if path else "the model that was distributed has"
    if "backward" in kind or not path:
        remedy = "register it on the distributed model itself, or train on one device"
    else:
        remedy = (
            "register it before distribute(): then every device computes that module for the global batch (impossible for a "
            "module with dropout); or register it on the distributed model itself"
        )
    raise InputError(f"{what} a {KINDS[kind]}, which would see a part of the batch, or not run: {remedy}")
