"""Opaque layers: calls that no rule splits. torch's own are split by samples where that is right, others are not.

Functions and modules of torch keep nothing in Python, so one comparison on random numbers shows whether they treat each sample
by itself. A module of the user may do anything later, so it is always given the whole batch. `observe` looks at one call, to
know what such a layer needs; `per_sample` compares.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.errors import InputError
from convoy.model.tracing.python_state import CHANCE, REGISTERED, State, random_kept
from convoy.model.tracing.shared_copy import is_shared, shared

Call = Callable[[nn.Module, int, Sequence[Tensor]], Any]
"""(what holds its modules, samples, inputs) -> outputs."""
_PARTS = ((2, 3), (1, 4))
"""A batch of five is computed together and in these parts."""
_WHOLE = ", so it runs whole on one device"


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a layer is tried with.

    Attributes:
        like: one tensor per input, for shape and dtype.
        batched: which of them have a batch axis.
        samples: how many the user's Python is tried with.
        registered: the layer's class was registered.
    """

    like: Sequence[Tensor]
    batched: Sequence[bool]
    samples: int = 2
    registered: bool = False

    def random(self, samples: int, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return random inputs of so many samples; floating-point ones of `dtype` where that is given."""
        own = torch.Generator().manual_seed(samples)
        made = [random_like(t, own, samples if b else None) for t, b in zip(self.like, self.batched, strict=True)]
        return [t.to(dtype) if dtype is not None and is_floating(t) else t for t in made]

    def rows(self, tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """Return the inputs of some of the samples."""
        return [t[start:stop] if b else t for t, b in zip(tensors, self.batched, strict=True)]


# --- modules of the user ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """What one call of a layer with Python of the user has shown.

    Attributes:
        changes: the Python state that it changed; `hidden`: what it reads that cannot be compared. "" where nothing.
        draws: it drew random numbers, or names a function that does.
        writes: it changed parameters or buffers.
        alone: torch.autograd.grad refuses to go through it (a reentrant checkpoint).
        blocked: inputs, by their place, that no gradient passes to.
    """

    changes: str = ""
    hidden: str = ""
    draws: bool = False
    writes: bool = False
    alone: bool = False
    blocked: tuple[int, ...] = ()


def observe(call: Call, model: nn.Module, modules: dict[str, nn.Module], inputs: Inputs) -> Seen:
    """Call a layer once, forward and backward, on a copy of the model that nobody else uses.

    Args:
        modules: those that it runs, by path, with all in them.
    """
    state = State(modules)
    hidden, before = state.hidden(), state.forms()
    parameters = [p for m in modules.values() for p in m.parameters(recurse=False)]
    held = [(t, shared(t)) for t in (*parameters, *(b for m in modules.values() for b in m.buffers(recurse=False)))]
    with random_kept() as drawn, torch.enable_grad(), state.kept():
        given = [t.requires_grad_() if is_floating(t) else t for t in inputs.random(inputs.samples)]
        try:
            # A copy of each, since autograd forbids in-place calls on leaves.
            outputs = tensors_of(call(model, inputs.samples, [t.clone() if t.requires_grad else t for t in given]))
        except Exception:  # two samples of random numbers are not for it: what it changes is unknown
            return Seen(changes="its state, perhaps", hidden=hidden, draws=drawn(), writes=True)
        draws, after = drawn() or bool(state.names & CHANCE), state.forms()
        writes = not all(is_shared(t, old) or torch.equal(t, old) for t, old in held)
        alone, blocked = _backward(outputs, given, parameters)
    for t, _ in held:
        if not t.is_leaf:
            t.detach_()  # a buffer that took in what has a gradient
    changed = [name for name in (*before, *after) if before.get(name) != after.get(name)]
    if made := next((name.removesuffix(REGISTERED) for name in changed if name.endswith(REGISTERED)), None):
        raise InputError(
            f"the forward of module {made or 'the model itself'!r} makes or removes parameters, buffers or submodules: call "
            "the model once on a batch before it is distributed; if it does so in every call, make them in __init__"
        )
    return Seen(repr(changed[0]) if changed else "", hidden, draws, writes, alone, blocked)


def _backward(
    outputs: Sequence[Tensor], given: Sequence[Tensor], parameters: Sequence[nn.Parameter]
) -> tuple[bool, tuple[int, ...]]:
    reached = [y for y in outputs if y.requires_grad]
    wanted = [t for t in (*given, *parameters) if t.requires_grad]
    if not reached or not wanted:
        return False, tuple(i for i, t in enumerate(given) if t.requires_grad)
    try:
        found = torch.autograd.grad(reached, wanted, [torch.ones_like(y) for y in reached], allow_unused=True)
    except RuntimeError as error:  # other faults show in training
        return "checkpoint" in str(error), ()
    missing = {id(t) for t, g in zip(wanted, found, strict=True) if g is None}
    return False, tuple(i for i, t in enumerate(given) if id(t) in missing)


# --- calls of torch --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Samples:
    """How a call of torch treats samples.

    Attributes:
        dependence: why it must see the whole batch at once; "" where samples are independent.
        each: a call changes its buffers, alike for every batch.
        overwrites: it changes its inputs in place.
    """

    dependence: str = ""
    each: bool = False
    overwrites: bool = False


def per_sample(
    call: Call, model: nn.Module, precise: Callable[[], nn.Module], inputs: Inputs, modules: Sequence[nn.Module]
) -> Samples:
    """Compare a batch with its parts, on random numbers.

    Args:
        model: a copy that nobody else uses.
        precise: makes another one in float64, where rounding cannot be taken for a dependence.
        modules: of torch, that the call runs.
    """
    norm = next((m for module in modules for m in module.modules() if isinstance(m, _BatchNorm)), None)
    if norm is not None and (norm.training or norm.running_mean is None):
        return Samples(f"its {type(norm).__name__} looks at the whole batch{_WHOLE}")
    try:
        with random_kept(), torch.no_grad():
            each = _changes_buffers(call, model, inputs, modules)
            with _without_dropout(modules):
                found = _in_parts(call, model, inputs, None)
    except Exception as error:
        return Samples(f"it cannot take samples one by one ({first_line(error)}){_WHOLE}")
    if found.dependence and not found.overwrites:
        try:
            held = precise()
            paths = {id(m): path for path, m in model.named_modules()}
            with random_kept(), torch.no_grad(), _without_dropout([held.get_submodule(paths[id(m)]) for m in modules]):
                found = _in_parts(call, held, inputs, torch.float64)
        except Exception:  # it has no float64
            return found
    return (
        found if not each or found.dependence else Samples(each, each=True) if each != "alike" else Samples(each=True)
    )


def _changes_buffers(call: Call, model: nn.Module, inputs: Inputs, modules: Sequence[nn.Module]) -> str:
    """Return "" where a call changes no buffer, "alike" where it does so alike for every batch, else why not."""
    parameters = [p for module in modules for p in module.parameters()]
    held = [*parameters, *(b for module in modules for b in module.buffers())]
    before, left = [shared(t) for t in held], []
    for samples in (2, 3):
        call(model, samples, inputs.random(samples))
        left.append([t.clone() for t in held])
        for t, old in zip(held, before, strict=True):
            if not torch.equal(t, old):
                t.data.copy_(old)
    if all(map(torch.equal, left[0], before)):
        return ""
    weights = range(len(parameters))
    alike = all(map(is_close, *left)) and all(torch.equal(left[0][i], before[i]) for i in weights)
    return "alike" if alike else f"it notes what a batch was like{_WHOLE}"


def _in_parts(call: Call, model: nn.Module, inputs: Inputs, dtype: torch.dtype | None) -> Samples:
    batch = inputs.random(sum(_PARTS[0]), dtype)
    given = [t.clone() for t in batch]
    together = tensors_of(call(model, len(range(5)), given))
    if not all(map(torch.equal, batch, given)):
        return Samples(f"it overwrites its input{_WHOLE}", overwrites=True)
    depends = Samples(f"a sample's answer depends on the others{_WHOLE}")
    for parts in _PARTS:
        start = 0
        for samples in parts:
            some = tensors_of(call(model, samples, inputs.rows(batch, start, start + samples)))
            if not _equal([t[start : start + samples] for t in together], some):
                return depends
            start += samples
    # What one sample has must not reach the others, however large it is: comparisons with a bound, say. Python of the user that
    # refuses odd numbers may do so.
    for odd in () if inputs.registered else (float("nan"), float("inf"), float("-inf")):
        poisoned = [t.clone() for t in batch]
        for t, batched in zip(poisoned, inputs.batched, strict=True):
            if batched and is_floating(t):
                t[0] = odd
        found = tensors_of(call(model, 5, poisoned))
        if not _equal([t[1:] for t in together], [t[1:] for t in found]):
            return depends
    return Samples()


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(is_close, a, b))


@contextmanager
def _without_dropout(modules: Sequence[nn.Module]) -> Iterator[None]:
    modes = {m: m.training for module in modules for m in module.modules()}
    try:
        for module in modules:
            module.eval()
        yield
    finally:
        for m, training in modes.items():
            m.training = training


def has_dropout(module: nn.Module) -> bool:
    """Whether a module holds a dropout layer in training mode that drops anything (`StateWatch` keeps the others so)."""
    return any("Dropout" in type(m).__name__ and m.training and getattr(m, "p", 1.0) != 0 for m in module.modules())


# --- nests of tensors ------------------------------------------------------------------------------------------------


def run_on_random(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a module that nobody else uses on random inputs; return its outputs on the meta device (shapes and dtypes only)."""
    with random_kept(), torch.no_grad(), State(dict(module.named_modules())).kept():
        value = module(*on_random(args), **on_random(kwargs))
    return map_tensors(value, lambda t: t.to("meta"))


def on_random(value: Any) -> Any:
    """Return the same nest with random tensors."""
    own = torch.Generator().manual_seed(0)
    return map_tensors(value, lambda t: random_like(t, own))


def random_like(like: Tensor, generator: torch.Generator, batch: int | None = None) -> Tensor:
    """Return a random CPU tensor of the same dtype and shape; its first axis has `batch` entries where that is given."""
    shape = like.shape if batch is None else (batch, *like.shape[1:])
    if is_floating(like):
        return torch.randn(shape, dtype=like.dtype, generator=generator, device="cpu")
    return torch.randint(0, 2, shape, generator=generator, device="cpu").to(like.dtype)


def is_floating(t: Tensor) -> bool:
    """Whether a tensor holds numbers that can have a gradient."""
    return t.dtype.is_floating_point or t.dtype.is_complex


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a nest of tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in fields(value)]
    return [t for each in value for t in tensors_of(each)] if isinstance(value, tuple | list) else []


def map_tensors(value: Any, f: Callable[[Tensor], Any]) -> Any:
    """Return the same nest with `f` applied to each tensor."""
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, f) for v in value))
    if isinstance(value, tuple | list):
        return value if isinstance(value, torch.Size) else type(value)(map_tensors(v, f) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f_.name: map_tensors(getattr(value, f_.name), f) for f_ in fields(value) if f_.init})
    if isinstance(value, dict):
        return {k: map_tensors(v, f) for k, v in value.items()}
    return value


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding: kernels round differently for different numbers of samples."""
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
