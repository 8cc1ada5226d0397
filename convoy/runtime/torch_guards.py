"""Has torch's own tools refuse a distributed model where they would be wrong on this device's pieces, without a word.

They are wrapped once in a process, when the first model is distributed; whatever else they are used for stays as it is.
"""

import copy
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from convoy.errors import InputError
from convoy.runtime.elementwise import check_step
from convoy.runtime.marks import check_summed, is_piece

_LOCK = threading.Lock()
_guarded = False


def guard(distributed: type[nn.Module]) -> None:
    """Guard torch's tools from now on; a second call does nothing.

    Args:
        distributed: the class of distributed models.
    """
    global _guarded
    with _LOCK:
        if not _guarded:
            _guarded = True
            _guard(distributed)


def _guard(distributed: type[nn.Module]) -> None:
    register_optimizer_step_pre_hook(check_step)
    _guard_clipping()
    _guard_scaler()
    _guard_states()
    _guard_average()
    _guard_wrappers(distributed)
    _guard_compile(distributed)


def _guard_clipping() -> None:
    clip: Any = torch.nn.utils.clip_grad
    scale = clip._clip_grads_with_norm_

    def clip_grads(parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check_summed("torch.nn.utils.clip_grad_norm_", parameters)
        if any(map(is_piece, parameters)):
            raise InputError(
                "torch.nn.utils.clip_grad_norm_ sees this device's pieces of the gradients, and each device would scale its "
                "own by another factor: use convoy.train.clip_grad_norm_(model, max_norm), on every device"
            )
        scale(parameters, *args, **kwargs)

    clip._clip_grads_with_norm_ = clip_grads


def _guard_scaler() -> None:
    scaler: Any = torch.amp.GradScaler
    unscale = scaler._unscale_grads_

    def unscale_grads(self: Any, optimizer: Optimizer, *args: Any) -> Any:
        if not getattr(self, "asks_all_devices", False) and _works_on_pieces(optimizer):
            raise InputError(
                "torch.amp.GradScaler sees this device's pieces of the gradients, and would leave out a step that other "
                "devices make: use convoy.train.GradScaler(model), on every device"
            )
        return unscale(self, optimizer, *args)

    scaler._unscale_grads_ = unscale_grads


def _guard_states() -> None:
    optimizer: Any = Optimizer
    save, load = optimizer.state_dict, optimizer.load_state_dict

    @functools.wraps(save)
    def state_dict(self: Optimizer) -> Any:
        """It may be looked at (learning rates), and cannot be saved while the optimizer works on pieces."""
        state = save(self)
        return state | {"state": _OfPieces(state["state"])} if _works_on_pieces(self) else state

    @functools.wraps(load)
    def load_state_dict(self: Optimizer, state_dict: Any) -> None:
        if _works_on_pieces(self) and not isinstance(state_dict.get("state"), _OfPieces):
            raise InputError(
                f"{type(self).__name__}.load_state_dict() after the model was distributed, where this device has pieces of "
                "the parameters: load it before convoy.prepare, which cuts it as the parameters, or use convoy.Checkpointer"
            )
        load(self, state_dict)

    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict


def _guard_average() -> None:
    average: Any = AveragedModel
    update = average.update_parameters

    @functools.wraps(update)
    def update_parameters(self: Any, model: nn.Module) -> None:
        rows = zip(self.parameters(), model.parameters(), strict=False)
        if any(is_piece(p) and not is_piece(own) for own, p in rows):
            raise InputError(
                "this AveragedModel was made from the model before it was distributed, and has whole parameters, of which "
                "the distributed model has pieces here: make it from the distributed model, on every device"
            )
        update(self, model)

    average.update_parameters = update_parameters


def _guard_wrappers(distributed: type[nn.Module]) -> None:
    wrappers: tuple[Any, ...] = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for wrapper in wrappers:
        wrapper.__init__ = _refusing(wrapper.__name__, wrapper.__init__, distributed)


def _refusing(name: str, make: Callable[..., None], distributed: type[nn.Module]) -> Callable[..., None]:
    @functools.wraps(make)
    def init(self: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(each, distributed) for each in module.modules()):
            raise InputError(
                f"{name} around a distributed model, which adds up the gradients of all devices itself: leave {name} out"
            )
        make(self, module, *args, **kwargs)

    return init


def _guard_compile(distributed: Any) -> None:
    """torch.compile would follow the messages between devices line by line, for minutes: it leaves such models as they are."""
    compile_of_torch: Any = torch.compile

    def disable() -> None:
        if not getattr(distributed.forward, "_torchdynamo_disable", False):
            distributed.forward = torch._dynamo.disable(distributed.forward)  # type: ignore[no-untyped-call]

    @functools.wraps(compile_of_torch)
    def compile_around(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, distributed):
            warnings.warn(
                "torch.compile leaves a distributed model as it is: its layers are computed in pieces, between messages",
                stacklevel=2,
            )
            return model
        disable()
        return compile_of_torch(model, *args, **kwargs)

    torch.compile = compile_around
    if getattr(sys.modules.get("torch._dynamo"), "__spec__", None) is not None:
        disable()


def _works_on_pieces(optimizer: Optimizer) -> bool:
    return any(is_piece(p) for group in optimizer.param_groups for p in group["params"])


class _OfPieces(dict[Any, Any]):
    """What an optimizer remembers of this device's pieces; torch.save and pickle refuse it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_OfPieces":
        return _OfPieces({key: copy.deepcopy(value, memo) for key, value in self.items()})

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise InputError(
            "the optimizer's state_dict() holds what it remembers of this device's pieces alone: save model and optimizer with "
            "convoy.save_checkpoint(folder, model, optimizer), on every device, or leave the optimizer out"
        )


# --- state_dict() of the modules inside of a distributed model -------------------------------------------------------


_reading: ContextVar[bool] = ContextVar("reading", default=False)


@contextmanager
def reading_pieces() -> Iterator[None]:
    """Within it Convoy itself may ask for the `state_dict` of pieces."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


def guard_module(model: nn.Module) -> None:
    """Scripts save `model.module.state_dict()`, as they do with DDP: refused where this device has pieces."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it takes no hooks, and has no parameters (see `trace`)
        module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    if not _reading.get() and any(map(is_piece, module._parameters.values())):
        raise InputError(
            "state_dict() would hold only this device's pieces: call full_state_dict() of the distributed model on every "
            "device, which gives the whole model under its ordinary keys"
        )
