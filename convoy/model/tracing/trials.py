"""Runs a layer on random numbers, to find out how it can be computed.

Functions and modules of torch have no Python state, so one comparison shows whether samples are independent (`per_sample`).
Other code may behave differently later, so it is never a layer unless it is registered. `check_cuts` compares shards of a
registered layer with the whole layer.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.errors import InputError
from convoy.model.graph import Cut, Layer
from convoy.model.nested import map_tensors, tensors_of
from convoy.model.operation import Operation, call_operation
from convoy.model.tracing.copies import release, shared_copy, written
from convoy.model.tracing.python_state import random_kept

_PARTS = ([2, 3], [1, 4])
"""Numbers of samples in the parts of a batch of five, which is computed at once and in these parts."""
_WHOLE = ", so it runs whole on one device"


@dataclass(frozen=True, slots=True)
class TrialInputs:
    """The inputs of a layer in a trial.

    Attributes:
        like: one tensor per input, for shape and dtype.
        batched: per input, whether it has a batch axis.
        registered: whether the layer's class was registered.
    """

    like: Sequence[Tensor]
    batched: Sequence[bool]
    registered: bool = False

    def random(self, samples: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return random inputs; floating-point ones have `dtype` if given."""
        own = torch.Generator().manual_seed(samples)
        made = [random_like(t, own, samples if b else None) for t, b in zip(self.like, self.batched, strict=True)]
        return [t.to(dtype) if dtype is not None and is_floating(t) else t for t in made]


def refuse_unregistered(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Refuse outputs whose gradient reaches an unknown parameter, which only one device or none would train."""
    leaves, found = {id(t) for t in known}, set[Any]()
    waiting: set[Any] = {y.grad_fn for y in outputs} - {None}
    while waiting:
        found |= waiting
        waiting = {each for node in waiting for each, _ in node.next_functions} - found - {None}
        for leaf in (node.variable for node in waiting if hasattr(node, "variable")):
            if isinstance(leaf, nn.Parameter) and id(leaf) not in leaves:
                raise InputError(
                    f"a forward trains a parameter of shape {tuple(leaf.shape)} that its module does not have (in a plain "
                    "list?): register it, e.g. in an nn.ModuleList, or set requires_grad_(False)"
                )


@dataclass(frozen=True, slots=True)
class SampleUse:
    """The result of the comparison whether a torch call treats samples independently.

    Attributes:
        dependence: why it needs the global batch at once; "" if samples are independent.
        each: whether each call changes its buffers in the same manner for any batch.
        overwrites: whether it changes its inputs in place.
    """

    dependence: str = ""
    each: bool = False
    overwrites: bool = False


def per_sample(
    model: nn.Module, operation: Operation, precise: Callable[[], nn.Module], inputs: TrialInputs, paths: Sequence[str]
) -> SampleUse:
    """Compare the results for a random batch with those for its parts.

    Args:
        model: a copy that is not used elsewhere.
        precise: makes a copy in float64, so that rounding is not mistaken for a dependence.
        paths: paths of the torch modules that the call runs.
    """
    modules = [model.get_submodule(path) for path in paths]
    norm = next((m for module in modules for m in module.modules() if isinstance(m, _BatchNorm)), None)
    if norm is not None and (norm.training or norm.running_mean is None):
        return SampleUse(f"its {type(norm).__name__} needs the global batch{_WHOLE}")
    try:
        buffers = _buffer_changes(model, operation, inputs, modules)
        found = _in_parts(model, operation, inputs, paths, None)
    except Exception as error:
        return SampleUse(f"it cannot take samples one by one ({first_line(error)}){_WHOLE}")
    if found.dependence and not found.overwrites:
        with suppress(Exception):  # the call may not support float64
            found = _in_parts(precise(), operation, inputs, paths, torch.float64)
    if not buffers or found.dependence:
        return found
    return SampleUse("" if buffers == "alike" else f"it records the batch in a buffer{_WHOLE}", each=True)


def _buffer_changes(model: nn.Module, operation: Operation, inputs: TrialInputs, modules: Sequence[nn.Module]) -> str:
    """Return "" if a call changes no buffer, "alike" if the change is the same for all batches, else "by batch"."""
    parameters = [p for module in modules for p in module.parameters()]
    buffers, left = [b for module in modules for b in module.buffers()], []
    for samples in (2, 3):
        with random_kept(), torch.no_grad(), written(parameters) as weights, written(buffers) as wrote:
            call_operation(model, operation, inputs.random(samples), samples)
            if weights():
                return "by batch"
            if not wrote():
                return ""
            left.append([b.clone() for b in buffers])
    return "alike" if all(map(is_close, *left)) else "by batch"


def _in_parts(
    model: nn.Module, operation: Operation, inputs: TrialInputs, paths: Sequence[str], dtype: torch.dtype | None
) -> SampleUse:
    """Compare a batch of five with its parts, without dropout."""
    modules = [m for path in paths for m in model.get_submodule(path).modules()]
    modes = {m: m.training for m in modules}
    try:
        for m in modules:
            m.training = False
        held = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        with random_kept(), torch.no_grad(), written(held):
            return _compared(model, operation, inputs, dtype)
    finally:
        for m, training in modes.items():
            m.training = training


def _compared(model: nn.Module, operation: Operation, inputs: TrialInputs, dtype: torch.dtype | None) -> SampleUse:
    def called(given: Sequence[Tensor], samples: int) -> list[Tensor]:
        return tensors_of(call_operation(model, operation, given, samples))

    def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
        return len(a) == len(b) and all(map(is_close, a, b))

    batch = inputs.random(5, dtype)
    given = [t.clone() for t in batch]
    together = called(given, 5)
    if not all(map(torch.equal, batch, given)):
        return SampleUse(f"it overwrites its input{_WHOLE}", overwrites=True)
    depends = SampleUse(f"a sample's answer depends on the others{_WHOLE}")
    for parts in _PARTS:
        for i, samples in enumerate(parts):
            some = [torch.split(t, parts)[i] if b else t for t, b in zip(batch, inputs.batched, strict=True)]
            if not equal([torch.split(t, parts)[i] for t in together], called(some, samples)):
                return depends
    # Even NaN or infinity in one sample must not change the others. Registered user code may refuse such numbers.
    for odd in () if inputs.registered else (float("nan"), float("inf"), float("-inf")):
        poisoned = [t.clone() for t in batch]
        for t, batched in zip(poisoned, inputs.batched, strict=True):
            if batched and is_floating(t):
                t[0] = odd
        if not equal([t[1:] for t in together], [t[1:] for t in called(poisoned, 5)]):
            return depends
    return SampleUse()


def has_dropout(module: nn.Module | None) -> bool:
    """Return whether a module contains dropout that is active in its current mode (`StateWatch` refuses later changes)."""
    return module is not None and any(
        "Dropout" in type(m).__name__ and m.training and getattr(m, "p", 1.0) != 0 for m in module.modules()
    )


def check_cuts(
    model: nn.Module, layer: Layer, operation: Operation, inputs: TrialInputs, like: type[nn.Module] | None = None
) -> None:
    """Raise InputError unless a registered layer computes the same in shards as a whole, and as the class `like` does."""
    if any(p.is_meta for p in model.parameters()):
        return
    cuts = layer.cuts
    if layer.kind == "elementwise":
        cuts = tuple(Cut(axis, extent, (axis,)) for axis, extent in enumerate(layer.shape, 1))
    local, of_module = shared_copy(model), operation.call == "module"
    module = local.get_submodule(str(operation.target)) if of_module else nn.Module()
    if layer.random:
        module.eval()  # dropout would hide differences
    before = copy.deepcopy(module.double().state_dict())

    def check(same: bool, how: str) -> None:
        if not same:
            raise InputError(
                f"layer {layer.name!r}: {type(module).__name__ if of_module else layer.name} was registered with "
                f"register_layer, but {how}: correct the axes, groups, parameters and attributes given there, or do not "
                "register it"
            )

    def call(cut: Cut | None = None, start: int = 0, stop: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer, or a shard of it. Return the output, and the buffers after the call."""

        def shard(t: Tensor, axis: int | None) -> Tensor:
            entries = t.shape[axis] // cut.parts if cut is not None and axis is not None else 0
            return t.narrow(axis or 0, start * entries, (stop - start) * entries).clone() if entries else t.clone()

        for key, tensor in before.items():
            path, _, name = key.rpartition(".")
            holder, own = module.get_submodule(path), shard(tensor, cut.parameters.get(key) if cut else None)
            setattr(holder, name, nn.Parameter(own, requires_grad=False) if name in holder._parameters else own)
        own_inputs = [shard(t, axis) for t, axis in zip(given, cut.inputs if cut else [None] * len(given), strict=True)]
        y = call_operation(local, operation, own_inputs, len(given[0]))
        return y, {key: b.clone() for key, b in module.named_buffers()}

    with random_kept(), torch.no_grad():
        given = inputs.random(2, torch.float64)
        expected = [] if like is None else [like.forward(module, *(t.clone() for t in given))]
        whole, buffers = call()
        check(
            all(is_close(whole, y) for y in expected), f"it gives other numbers as {like and like.__name__} computes it"
        )
        for cut in (cut for cut in cuts if cut.parts > 1):
            middle = (cut.parts + 1) // 2
            try:
                halves = [call(cut, 0, middle), call(cut, middle, cut.parts)]
            except Exception as error:
                check(False, f"it does not run in parts of axis {cut.axis} ({first_line(error)})")
            how = f"it gives other numbers in parts of axis {cut.axis}"
            check(is_close(whole, torch.cat([y for y, _ in halves], cut.axis)), how)
            for key, value in buffers.items():
                shards, axis = [each[key] for _, each in halves], cut.parameters.get(key)
                for found in shards if axis is None else [torch.cat(shards, axis)]:
                    check(is_close(value, found), f"{how}, in its buffer {key!r}")


def run_on_random(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a copy of a module, with random inputs for meta tensors. Return its outputs on the meta device."""
    made = shared_copy(module)
    with random_kept(), torch.no_grad(), written([*made.parameters(), *made.buffers()]):
        given = on_random((args, kwargs))
        value = made(*given[0], **given[1])
        for t, own in zip(tensors_of([args, kwargs]), tensors_of(list(given)), strict=True):
            if own._version:
                t.zero_()  # mark the argument as overwritten, by its version
        value = map_tensors(value, lambda t: t.to("meta"))
    release(made)
    return value


def on_random(value: Any) -> Any:
    """Return the same nested value, with random tensors in place of meta tensors."""
    own = torch.Generator().manual_seed(0)
    return map_tensors(value, lambda t: random_like(t, own) if t.is_meta else t.detach().cpu().clone())


def random_like(like: Tensor, generator: torch.Generator, batch: int | None = None) -> Tensor:
    """Return a random CPU tensor of the same dtype and shape; its first axis has `batch` entries if given."""
    shape = like.shape if batch is None else (batch, *like.shape[1:])
    if is_floating(like):
        return torch.randn(shape, dtype=like.dtype, generator=generator, device="cpu")
    return torch.randint(0, 2, shape, generator=generator, device="cpu").to(like.dtype)


def is_floating(t: Tensor) -> bool:
    """Return whether a tensor's dtype can have a gradient."""
    return t.dtype.is_floating_point or t.dtype.is_complex


def is_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, which differs between numbers of samples."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_sparse or b.is_sparse:
        return a.is_sparse and b.is_sparse and is_close(a.to_dense(), b.to_dense())
    if torch.equal(a, b):
        return True
    rtol, atol = (1e-9, 1e-11) if a.dtype in (torch.float64, torch.complex128) else (1e-3, 1e-5)
    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
