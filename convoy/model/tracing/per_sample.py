"""Checks numerically, on random inputs, whether a layer computes each sample independently of the others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.model.tracing.nodes import first_line

_TRIES = 3
"""Repetitions with other inputs: a branch on values may go the same way for one set of samples."""

Call = Callable[[int, Sequence[Tensor]], Any]
"""(samples, inputs) -> outputs."""


@dataclass(frozen=True, slots=True)
class PerSample:
    """Whether a layer may be split by samples.

    Attributes:
        dependence: why the layer must see the whole batch at once; None where samples are independent.
        random: two calls with the same input gave different results.
        overwrites: it changes its inputs in place.
    """

    dependence: str | None
    random: bool = False
    overwrites: bool = False


def check_per_sample(
    call: Call, like: Sequence[Tensor], batched: Sequence[bool], module: nn.Module | None
) -> PerSample:
    """Run three samples together and one by one, and compare.

    Args:
        call: the layer.
        like: one tensor per input, for shape and dtype; those that are `batched` get other first axes.
        module: the layer's module, in the mode that is traced; left as it is. None: a function.
    """
    if module is not None and (norm := _batch_norm_inside(module)) is not None:
        return PerSample(f"its {norm} looks at the whole batch", has_dropout(module))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _restored(module):
        torch.manual_seed(0)
        for inner in module.modules() if module is not None else ():
            if "Dropout" in type(inner).__name__:
                inner.eval()
        try:
            return _compare(call, like, batched, module)
        except Exception as error:
            return PerSample(f"it cannot take samples one by one ({first_line(error)}), so it runs whole on one device")


def _compare(call: Call, like: Sequence[Tensor], batched: Sequence[bool], module: nn.Module | None) -> PerSample:
    random = module is not None and has_dropout(module)
    before = _buffers(module)
    for _ in range(_TRIES):
        inputs = [random_like(t, 3 if b else None) for t, b in zip(like, batched, strict=True)]
        given = [t.clone() for t in inputs]
        together = tensors_of(call(3, given))
        if not all(torch.equal(a, b) for a, b in zip(inputs, given, strict=True)):
            return PerSample("it overwrites its input, so it runs whole on one device", random, overwrites=True)
        if not all(torch.equal(a, b) for a, b in zip(before, _buffers(module), strict=True)):
            return PerSample("it notes in its buffers what a batch was like, so it runs whole on one device", random)
        if module is not None and not _equal(together, tensors_of(call(3, inputs))):
            # Random numbers hide whether samples are independent: compare in evaluation mode instead.
            random = True
            module.eval()
            together = tensors_of(call(3, inputs))
        for i in range(3):
            one = [t[i : i + 1] if b else t for t, b in zip(inputs, batched, strict=True)]
            if not _equal([t[i : i + 1] for t in together], tensors_of(call(1, one))):
                return PerSample("a sample's answer depends on the others, so it runs whole on one device", random)
    return PerSample(None, random)


def has_dropout(module: nn.Module) -> bool:
    """Whether a module holds a dropout layer in training mode."""
    return any("Dropout" in type(m).__name__ and m.training for m in module.modules())


def run_on_random(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a module on random inputs of these shapes; returns its outputs on the meta device (shapes and dtypes only)."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _restored(module):
        real = fx.node.map_aggregate((args, kwargs), lambda a: random_like(a, None) if isinstance(a, Tensor) else a)
        value = module(*real[0], **real[1])
    return fx.node.map_aggregate(value, lambda a: a.to("meta") if isinstance(a, Tensor) else a)


def random_like(like: Tensor, batch: int | None) -> Tensor:
    """A random CPU tensor of the same dtype and shape; its first axis has `batch` entries where that is given."""
    shape = like.shape if batch is None else (batch, *like.shape[1:])
    if is_floating(like):
        return torch.randn(shape, dtype=like.dtype)
    return torch.randint(0, 2, shape).to(like.dtype)


def is_floating(t: Tensor) -> bool:
    """Whether a tensor holds numbers that can have a gradient."""
    return t.dtype.is_floating_point or t.dtype.is_complex


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a tuple or list, in order."""
    if isinstance(value, tuple | list):
        return [t for v in value for t in tensors_of(v)]
    return [value] if isinstance(value, Tensor) else []


def is_close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding: kernels round differently for different numbers of samples."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    rtol, atol = (1e-9, 1e-11) if a.dtype in (torch.float64, torch.complex128) else (1e-3, 1e-5)
    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(is_close(x, y) for x, y in zip(a, b, strict=True))


def _batch_norm_inside(module: nn.Module) -> str | None:
    for inner in module.modules():
        if isinstance(inner, _BatchNorm) and (inner.training or inner.running_mean is None):
            return type(inner).__name__
    return None


def _buffers(module: nn.Module | None) -> list[Tensor]:
    return [b.detach().clone() for b in module.buffers()] if module is not None else []


@contextmanager
def _restored(module: nn.Module | None) -> Iterator[None]:
    """Restore the training modes and buffers of a module at the end."""
    modes = {m: m.training for m in module.modules()} if module is not None else {}
    buffers = _buffers(module)
    try:
        yield
    finally:
        for m, training in modes.items():
            m.training = training
        if module is not None:
            for buffer, value in zip(module.buffers(), buffers, strict=False):
                buffer.copy_(value)
