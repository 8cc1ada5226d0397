"""What a user does to a distributed model beside training it: hooks, frozen and replaced parameters. It acts, or is refused.

Hooks act as on one device: those on the distributed model, and forward hooks on the model that was distributed, since outputs
are whole everywhere; forward hooks on its modules, which every device then computes for the whole batch; hooks on parameters
that every device has whole, since a step gives autograd their summed gradients. Any other one would see parts, or nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch.nn.modules.module as modules_of_torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.tracing import TracedModel
from convoy.model.tracing.hooks import KINDS, ON_PARAMETERS, on_weights, table
from convoy.runtime.shard_guards import CallGuard

_GLOBAL = tuple(getattr(modules_of_torch, f"_global{kind}") for kind in KINDS)


class Watch:
    """Refuses, before every step, what the step would not follow.

    Args:
        model: this device's copy of the model.
        original: the model that was distributed. A hook that is taken off it is taken off here, too.
        traced: by mode.

    Attributes:
        trained: the parameters that have a gradient, by key.
    """

    def __init__(self, model: nn.Module, original: nn.Module, traced: Mapping[bool, TracedModel], devices: int) -> None:
        self._model = model
        held = dict(model.named_parameters())
        self._dtypes = {key: p.dtype for key, p in held.items()}
        self.trained = {key: p for key, p in held.items() if p.requires_grad}
        self._parameters = [(_holder(model, key), key.rpartition(".")[2], key, p) for key, p in held.items()]
        self.follow(traced, devices)
        self._carried = []
        for path, module in original.named_modules():
            for kind in KINDS:
                if ours := table(model.get_submodule(path), kind):
                    self._carried.append((ours, table(module, kind), frozenset(ours)))

    def follow(self, traced: Mapping[bool, TracedModel], devices: int) -> None:
        """From now on there are so many devices."""
        self._devices = devices
        self._tables = {mode: _Tables(self._model, trace, devices) for mode, trace in traced.items()}

    def check(self, training: bool, whole: Mapping[str, bool]) -> None:
        """Refuse to go on where something has changed that the steps depend on.

        Args:
            whole: of each parameter, whether every device holds all of it, and has all of its gradient at once.

        Raises:
            InputError: what it is, and what to do instead.
        """
        for ours, theirs, numbers in self._carried:
            for number in numbers - theirs.keys():
                ours.pop(number, None)
        self._tables[training].check(self._model)
        for holder, name, key, parameter in self._parameters:
            if holder.get(name) is not parameter:
                raise InputError(
                    f"parameter {key!r} was replaced after distribute(): change its numbers, by load_state_dict() or "
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
                _refuse_on_parameter(key, parameter)

    def returned(self, result: Any, inputs: Sequence[Tensor], training: bool) -> Any:
        """What the model returns, after the forward hooks of the model that was distributed."""
        if not self._model._forward_hooks or self._tables[training].is_one_layer:
            return result
        arguments = tuple(inputs) if self._devices == 1 else _InParts()
        for number, hook in list(self._model._forward_hooks.items()):
            with_keywords = number in self._model._forward_hooks_with_kwargs
            found = hook(self._model, arguments, *([{}] if with_keywords else []), result)
            result = result if found is None else found
        return result


def carry_over(new: nn.Parameter, old: Tensor) -> None:
    """Let the hooks of one parameter act on another, as long as they are not removed."""
    for kind in ON_PARAMETERS:
        if hooks := getattr(old, kind, None):
            setattr(new, kind, hooks)


class _Tables:
    """The tables of hooks of all modules, by whether what is in them acts in one mode."""

    def __init__(self, model: nn.Module, traced: TracedModel, devices: int) -> None:
        called = [
            (path, layer.everywhere)
            for name, layer in traced.graph.layers.items()
            if layer.kind == "opaque"
            for path in traced.operations[name].modules
        ]
        self.is_one_layer = any(path == "" for path, _ in called)
        self.never: list[dict[int, Any]] = []  # a hook there would not be called, or with a part
        self.of_torch: list[dict[int, Any]] = []  # only those of torch, which compute weights
        for path, module in model.named_modules():
            live = [everywhere for whole, everywhere in called if _is_inside(path, whole)]
            for kind in KINDS:
                by_hand = path == "" and kind == "_forward_hooks" and not live
                if by_hand or (live and (devices == 1 or (any(live) and "forward" in kind))):
                    continue
                (self.of_torch if live else self.never).append(table(module, kind))

    def check(self, model: nn.Module) -> None:
        if any(self.never):
            for hooks in self.never:
                if not all(isinstance(hook, CallGuard) for hook in list(hooks.values())):
                    _refuse_on_module(model, hooks)
        for hooks in filter(None, self.of_torch):
            if not all(map(on_weights, list(hooks.values()))):
                _refuse_on_module(model, hooks)
        if any(_GLOBAL):
            for kind, hooks in zip(KINDS.values(), _GLOBAL, strict=True):
                # torch's own module tracker, with which FLOP are counted, changes nothing.
                if not all(_is_of_torch(hook) for hook in list(hooks.values())):
                    raise InputError(
                        f"a {kind} was registered for all modules: a distributed model does not call its modules one by one; "
                        "register it on the distributed model, or on single modules before distribute()"
                    )


def _is_inside(path: str, whole: str) -> bool:
    return whole == "" or path == whole or path.startswith(f"{whole}.")


def _is_of_torch(hook: Any) -> bool:
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.")


def _holder(model: nn.Module, key: str) -> dict[str, nn.Parameter | None]:
    return model.get_submodule(key.rpartition(".")[0])._parameters


def _refuse_on_module(model: nn.Module, hooks: dict[int, Any]) -> NoReturn:
    path, kind = next((p, k) for p, m in model.named_modules() for k in KINDS if table(m, k) is hooks)
    what = f"module {path!r} has" if path else "the model that was distributed has"
    if "backward" in kind or not path:
        remedy = "register it on the distributed model itself, or train on one device"
    else:
        remedy = (
            "register it before distribute(), which then has every device compute that module for the whole batch (a module "
            "with dropout in it cannot), or register it on the distributed model itself"
        )
    raise InputError(f"{what} a {KINDS[kind]}, which would see a part of the batch, or not be called: {remedy}")


def _refuse_on_parameter(key: str, parameter: nn.Parameter) -> NoReturn:
    what = next(name for kind, name in ON_PARAMETERS.items() if getattr(parameter, kind))
    raise InputError(
        f"parameter {key!r} has a {what}, of which each device has a piece of the gradient, or a reentrant checkpoint gives a "
        "part: change .grad between backward() and step() instead, where each entry is treated by itself, or use a plan that "
        "copies the parameter to every device and use_reentrant=False"
    )


class _InParts(tuple[Any, ...]):
    """Stands for the inputs of a model in its forward hooks, where each device has a part of them."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise InputError(
            "a forward hook of the model reads its inputs, of which each device has a part: register the hook on the "
            "distributed model, which hands it this device's part"
        )

    __getitem__ = __iter__ = __len__ = _refuse
