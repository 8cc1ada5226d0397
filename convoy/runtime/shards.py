"""Mark the parameters of distributed models, and refuse operations that would be wrong on shards: module calls, optimizer
steps, changed gradients, saved states. Uses torch's official hooks only."""

import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from convoy.errors import InputError

SHARD, ORIGINAL, UNSUMMED = "_convoy_shard", "_convoy_original", "_convoy_unsummed"
"""Names of the marks: a distributed model's local shard or copy; a parameter of the model before it was distributed; a
`.grad` that is not yet summed over the devices, but only over this device's micro-batches."""

SCALED = "_convoy_scaled"
"""Mark of a shard whose gradient was computed in fp16, so that `convoy.train.GradScaler` must unscale it."""

_reading: ContextVar[bool] = ContextVar("reading", default=False)


def is_shard(parameter: object) -> bool:
    return getattr(parameter, SHARD, False)


def is_unsummed(parameter: object) -> bool:
    return getattr(parameter, UNSUMMED, False)


def check_summed(what: str, parameters: Iterable[nn.Parameter]) -> None:
    """Raise InputError if a gradient is not yet summed over the devices."""
    if any(is_unsummed(p) and p.grad is not None for p in parameters):
        raise InputError(
            f"{what} after micro-batches in no_sync(), whose gradients are not summed over the devices: run forward and "
            "backward of a step's last micro-batch outside of no_sync(), or clear the gradients with zero_grad()"
        )


def check_not_distributed(model: nn.Module) -> None:
    if any(hasattr(parameter, SHARD) for parameter in model.parameters()):
        raise InputError(
            f"this {type(model).__name__} is distributed already, or shares parameters with a model that is: prepare replaces "
            "the model it is given. Use the model that prepare returned; to start again (a notebook cell that runs twice), "
            "first create model, optimizer and loader again"
        )


class CallGuard:
    """A forward-pre hook that refuses calls of a module with sharded parameters outside of a step.

    Attributes:
        working: number of forward and backward computations in progress.
    """

    def __init__(self) -> None:
        self.working = 0

    def __call__(self, module: nn.Module, _inputs: object) -> None:
        if not self.working and any(map(is_shard, module._parameters.values())):
            raise InputError(
                f"a {type(module).__name__} inside a distributed model was called directly, but this device has only shards "
                "of its parameters: call the model that prepare or distribute returned, or use a plan that copies "
                "parameters, such as 'data-by-speed'"
            )

    def __deepcopy__(self, _memo: object) -> NoReturn:
        raise InputError(
            "a module inside a distributed model was copied, but this device has only shards of its parameters: copy the "
            "distributed model itself, on every device, or load its full_state_dict() into a new model"
        )

    def watch(self, model: nn.Module, split: Collection[str]) -> None:
        """Guard the modules that have shards now. `split`: paths of modules whose call is a step."""
        for module in [module for path, module in model.named_modules() if path not in split]:
            if any(map(is_shard, module._parameters.values())) and self not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(self)


class Retired(Tensor):
    """A tensor that refuses every operation."""

    key: str

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        rows = [*args, *(kwargs or {}).values()]
        held = [t for row in rows for t in (row if isinstance(row, list | tuple) else [row])]
        key = next((vars(t)["key"] for t in held if type(t) is cls), "?")
        raise InputError(
            f"{getattr(func, '__name__', 'an operation')} on {key!r} of the model before prepare: the plan splits it over "
            "devices. Take parameters from the prepared model (model.named_parameters() has the local shards, "
            "model.full_state_dict() whole ones), give prepare their optimizer, or use a plan that copies them, such as "
            "'data-by-speed'"
        )


@torch.no_grad()
def retire(tensor: Tensor, key: str) -> None:
    """Free a tensor's memory, and make every later operation on it raise InputError. Autograd may still hold it."""
    tensor.grad = None
    if not tensor.is_meta:
        tensor.data = tensor.new_empty(0)
    vars(tensor)["key"] = key
    tensor.__class__ = Retired


# --- state_dict() of modules inside a distributed model ----------------------------------------------------------------


@contextmanager
def reading_shards() -> Iterator[None]:
    """Let Convoy call `state_dict` of modules with shards inside the block."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


def guard_state_dicts(model: nn.Module) -> None:
    """Refuse `state_dict` of modules with shards: scripts save `model.module.state_dict()`, as with DDP."""
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # it accepts no hooks, and has no parameters (see `trace`)
            module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    if not _reading.get() and any(map(is_shard, module._parameters.values())):
        raise InputError(
            "state_dict() would hold only local shards: call full_state_dict() of the distributed model on every device, "
            "which returns the whole model under its ordinary keys"
        )


# --- optimizers --------------------------------------------------------------------------------------------------------

ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
}  # fmt: skip
"""Optimizers that update each entry of a parameter by itself, so that shards train like the whole parameter.

Add your own class if it does: `convoy.train.ELEMENTWISE.add(Lion)`. LBFGS (products over all parameters), Adafactor (row
and column means) and Muon (whole matrices) do not; they are exact if every device has whole copies."""

_VERSION = "_convoy_version"
"""Mark of a shard and of its gradient: its `_version` when Convoy or an optimizer last changed it."""

_with_guarded_state: WeakSet[Optimizer] = WeakSet()


def elementwise_names() -> str:
    return ", ".join(sorted(each.__name__ for each in ELEMENTWISE))


def works_on(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@functools.cache
def guard_optimizers() -> None:
    register_optimizer_step_pre_hook(check_step)
    register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: accept_weights(works_on(optimizer)))


def check_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Raise InputError if an optimizer step would train nothing, or would be wrong on local shards."""
    name, parameters = type(optimizer).__name__, works_on(optimizer)
    check_summed(f"{name}.step()", parameters)
    # The original model may be trained too: then it has gradients.
    originals = [p for p in parameters if p.requires_grad and getattr(p, ORIGINAL, False)]
    if originals and all(p.grad is None for p in originals):
        some = f"{len(originals)} of {len(parameters)} parameters of " if len(originals) < len(parameters) else ""
        raise InputError(
            f"{some}{name} are from the model before it was distributed, and get no gradients any more: "
            "create the optimizer from the distributed model's parameters(), also for add_param_group(), or give it "
            "to convoy.prepare(model, optimizer, loader)"
        )
    shards = [p for p in parameters if is_shard(p)]
    if not shards:
        return
    if type(optimizer) not in ELEMENTWISE:
        raise InputError(
            f"{name} is not known to treat each entry of a parameter by itself, and this plan splits parameters over "
            f"devices: use a plan that copies them ('data', 'data-by-speed'), use one of "
            f"{elementwise_names()}, or convoy.train.ELEMENTWISE.add({name}) if it does"
        )
    check_gradients(f"{name}.step()", shards)
    if any(getattr(p, SCALED, False) and p.grad is not None for p in shards):
        raise InputError(
            f"{name}.step() after a backward in fp16 without convoy.train.GradScaler(model). torch.amp.GradScaler sees only "
            "the local shards, so one device could skip a step that others take: use convoy.train.GradScaler(model) on every "
            "device"
        )
    guard_state(optimizer)


# --- gradients of shards -----------------------------------------------------------------------------------------------


def accept_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Record the current version of sharded and unsummed gradients; `check_gradients` refuses later changes."""
    for p in parameters:
        if p.grad is not None and (is_shard(p) or is_unsummed(p)):
            setattr(p.grad, _VERSION, p.grad._version)


def check_gradients(what: str, parameters: Iterable[nn.Parameter]) -> None:
    """Raise InputError if anything but Convoy changed sharded or unsummed gradients. They may be set to zero."""
    gradients = [p.grad for p in parameters if p.grad is not None and (is_shard(p) or is_unsummed(p))]
    changed = [g for g in gradients if getattr(g, _VERSION, None) != g._version]
    if count := sum(bool(g.any()) for g in changed):
        raise InputError(
            f"{what}: {count} gradients that are shards or partial sums have changed since backward(). "
            "torch.nn.utils.clip_grad_norm_ sees only local shards, so each device would scale by another factor: use "
            "convoy.train.clip_grad_norm_(model, max_norm) on every device. After a change that treats each entry by itself "
            "(clip_grad_value_), call model.gradients_changed()"
        )


class OwnGradients:
    """A check that gradients of sharded or unsummed parameters come from the model only, and end in `.grad`.

    A penalty on a shard differs between devices; one on an unsummed parameter would be added once per device. Scripts that
    take gradients from `torch.autograd.grad` compute their norms and dot products, which are local for shards.

    Attributes:
        task: autograd's id of this backward.
        several: the loss uses several forwards, so the gradients cannot be compared.
    """

    def __init__(self, task: int, gradients: Iterable[Tensor], parameters: Sequence[nn.Parameter]) -> None:
        self.task, self.several = task, False
        self._versions = {g.data_ptr(): g._version for g in gradients}
        self._parameters, self._others = parameters, 0
        self._before, self._arrived = self._states(), 0
        self._hooks = {0: self._compare}
        for p in parameters:
            p._backward_hooks = self._hooks  # type: ignore[assignment]

    def _states(self) -> list[tuple[int, int]]:
        return [(id(p.grad), 0 if p.grad is None else p.grad._version) for p in self._parameters]

    def _compare(self, gradient: Tensor | None) -> None:
        self._arrived += gradient is not None
        # autograd adds another gradient in place, which changes the version, or in new memory.
        if gradient is not None and self._versions.get(gradient.data_ptr()) != gradient._version:
            self._others += gradient.numel() > 0

    def end(self) -> None:
        for p in self._parameters:
            if p._backward_hooks is self._hooks:
                p._backward_hooks = None
        self._parameters = ()

    def check(self) -> None:
        """End the comparison. Raise InputError if the loss used parameters directly, or gradients did not reach `.grad`."""
        added = sum(map(operator.ne, self._states(), self._before))
        self.end()
        if self._arrived > added:
            raise InputError(
                f"torch.autograd.grad of {self._arrived - added} parameters that not every device has whole, or whose "
                "gradients are not yet summed (no_sync): norms and dot products would be local. Use a plan that copies them "
                "('data', 'data-by-speed'), or backward() and .grad"
            )
        if self._others and not self.several:
            raise InputError(
                f"the loss uses {self._others} parameters directly (a penalty on weights?). They are shards here, or their "
                "gradients are not summed yet, so the loss would differ from that of one device. Use the optimizer's "
                "weight_decay; or use a plan that copies parameters ('data') and compute this loss outside no_sync()"
            )


# --- weights of shards -------------------------------------------------------------------------------------------------


def accept_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Record the current version of sharded parameters; `check_weights` refuses later changes."""
    for p in parameters:
        if is_shard(p):
            setattr(p, _VERSION, p._version)


def check_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Raise InputError if anything but Convoy and optimizers changed a sharded parameter in place."""
    if changed := sum(p._version != getattr(p, _VERSION, None) for p in parameters if is_shard(p) and p.numel()):
        raise InputError(
            f"{changed} sharded parameters have changed since the last optimizer step. A norm (max-norm, SAM) would be one of "
            "the local shard, so each device would change them by another factor: use a plan that copies parameters "
            "('data-by-speed'). After a change that treats each entry by itself (clamp_), call model.weights_changed() on "
            "every device"
        )


# --- optimizer state ---------------------------------------------------------------------------------------------------


def guard_state(optimizer: Optimizer) -> None:
    """Refuse `state_dict` and `load_state_dict` of an optimizer while it works on shards."""
    if optimizer not in _with_guarded_state:
        _with_guarded_state.add(optimizer)
        optimizer.register_state_dict_pre_hook(_refuse_state)
        optimizer.register_load_state_dict_pre_hook(_refuse_state)


def _refuse_state(optimizer: Optimizer, *_: Any) -> None:
    if any(map(is_shard, works_on(optimizer))):
        raise InputError(
            f"{type(optimizer).__name__}.state_dict() would hold the state of local shards only: save model and optimizer with "
            "convoy.save_checkpoint(folder, model, optimizer) on every device; for load_state_dict(), load it before "
            "convoy.prepare, which shards it like the parameters, or use convoy.Checkpointer"
        )
