"""Checks numerically, on random inputs, whether a layer computes each sample independently of the others."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.model.tracing.decisions import decides_together, with_others
from convoy.model.tracing.nodes import first_line
from convoy.model.tracing.noting import Notes, restored
from convoy.model.tracing.shared_copy import shared_copy
from convoy.model.tracing.state import random_kept, seed_all
from convoy.model.tracing.turning_points import FAR, Undecided, turning_points

_PARTS = ((1, 1, 1), (2, 3), (1, 4), (3, 6))
"""Batches are computed together and in these parts. Several: a branch on values may go the same way for one of them."""
_SCALES = (1.0, 0.05, 20.0)
"""In every other batch samples have these sizes in turn: what asks for the largest value must not find the same everywhere."""
_ENTRIES = 1 << 25
"""Of the inputs, at most, where many samples are tried."""

Call = Callable[[nn.Module, int, Sequence[Tensor]], Any]
"""(what holds its modules, samples, inputs) -> outputs."""


@dataclass(frozen=True, slots=True)
class PerSample:
    """Whether a layer may be split by samples.

    Attributes:
        dependence: why the layer must see the whole batch at once; None where samples are independent.
        random: two calls with the same input gave different results.
        overwrites: it changes its inputs in place.
        alone: its backward does not work as a part of another (a reentrant checkpoint).
        notes: a call changes its Python state, its buffers or its parameters.
        python: a call changes Python state.
        blocked: inputs, by their place, that no gradient passes to.
    """

    dependence: str | None
    random: bool = False
    overwrites: bool = False
    alone: bool = False
    notes: bool = False
    python: bool = False
    blocked: tuple[int, ...] = ()


def check_per_sample(
    call: Call,
    holder: nn.Module,
    precise: Callable[[], nn.Module],
    like: Sequence[Tensor],
    batched: Sequence[bool],
    modules: Sequence[str],
) -> PerSample:
    """Run samples together and in parts, and compare.

    Args:
        call: the layer.
        holder: holds its modules, in the mode that is traced; left as it is.
        precise: makes a copy of the holder in float64, where rounding cannot be taken for a dependence.
        like: one tensor per input, for shape and dtype; those that are `batched` get other first axes.
        modules: paths of the layer's modules in the holder.
    """
    own = [holder.get_submodule(path) for path in modules]
    dropout = any(has_dropout(module) for module in own)
    alone, blocked = _backward_of(call, holder, like, batched, own)
    if (norm := _batch_norm_inside(own)) is not None:
        notes, python = _left_behind(call, holder, like, batched, own)
        why = f"its {norm} looks at the whole batch"
        return PerSample(why, dropout, alone=alone, blocked=blocked, notes=notes, python=python)
    found = _judged(call, holder, like, batched, modules)
    if found.dependence is not None and not found.overwrites and _in_float32(like):
        # Rounding to float32 depends on how many samples there are, and some layers magnify it.
        doubled = [t.double() if is_floating(t) else t for t in like]
        try:
            again = _judged(call, precise(), doubled, batched, modules)
        except Exception:  # a copy in another type that cannot be made, or does not run
            again = found
        if again.dependence is None:
            found = again
    return replace(found, random=found.random or dropout, alone=alone, blocked=blocked)


def check_later(first: PerSample, check: Callable[[nn.Module], PerSample], aged: nn.Module) -> PerSample:
    """What is known of a layer whose state changes when it was checked in a later state, too: at first a factor may be zero."""
    later = check(aged)
    return replace(
        first, dependence=first.dependence or later.dependence, random=first.random or later.random,
        overwrites=first.overwrites or later.overwrites, alone=first.alone or later.alone,
        notes=first.notes or later.notes, python=first.python or later.python,
        blocked=tuple(i for i in first.blocked if i in later.blocked),
    )  # fmt: skip


def aged(model: nn.Module, like: Sequence[Tensor]) -> nn.Module:
    """A copy of a model after some forwards in training, in the modes of the model."""
    older = shared_copy(model).train()
    with random_kept(1), torch.no_grad():
        try:
            for samples in _PARTS[0] + _PARTS[3]:
                older(*(random_like(t, samples + 1) for t in like))
        except Exception:  # whether it runs shows elsewhere
            return model
    for module, other in zip(older.modules(), model.modules(), strict=True):
        module.training = other.training
    return older


def _judged(
    call: Call, holder: nn.Module, like: Sequence[Tensor], batched: Sequence[bool], modules: Sequence[str]
) -> PerSample:
    own = [holder.get_submodule(path) for path in modules]
    with random_kept(0), torch.no_grad(), _modes_kept(own):
        for module in own:
            for inner in module.modules():
                if "Dropout" in type(inner).__name__:
                    inner.eval()
        try:
            return _compare(call, holder, like, batched, own)
        except Exception as error:
            why = f"it cannot take samples one by one ({first_line(error)}), so it runs whole on one device"
    notes, python = _left_behind(call, holder, like, batched, own)
    return PerSample(why, notes=notes, python=python)


def _left_behind(
    call: Call, holder: nn.Module, like: Sequence[Tensor], batched: Sequence[bool], own: Sequence[nn.Module]
) -> tuple[bool, bool]:
    """Whether a call of modules that look at the whole batch changes anything but running statistics; and Python state.

    Asked on both sides of every number of samples at which its Python decides otherwise: it may change something for many
    alone, or for one.
    """
    if all(type(module).__module__.startswith("torch.nn") for module in own):
        return False, False
    try:
        with random_kept(0), torch.no_grad():
            points = _turning_points(call, holder, like, batched, own)
            tried = (3, 2, *points, *(n - 1 for n in points))
            found = [_notes(call, holder, like, batched, own, samples) for samples in tried]
            found += _notes_of_others(call, holder, like, batched, own)
    except Exception:  # what it is shows elsewhere
        return True, True
    return any(each.any for each in found), any(each.python for each in found)


def _compare(
    call: Call, holder: nn.Module, like: Sequence[Tensor], batched: Sequence[bool], own: Sequence[nn.Module]
) -> PerSample:
    try:
        points = _turning_points(call, holder, like, batched, own)
    except Undecided as why:
        notes, python = _left_behind(call, holder, like, batched, own)
        return PerSample(f"{why}, so it runs whole on one device", notes=notes, python=python)
    weights = {key for key, _ in nn.ModuleList(own).named_parameters()}
    left: list[Notes] = []
    dependence = None
    for samples in (3, *points) if own else ():
        first, second = (_notes(call, holder, like, batched, own, n) for n in (samples, samples - 1))
        left += [first, second]
        if not _same_notes(first, second) or weights & first.tensors.keys():
            dependence = "it notes what a batch was like, so it runs whole on one device"
    others = _notes_of_others(call, holder, like, batched, own) if own else []
    if any(not _same_notes(left[0], each) for each in others):
        dependence = dependence or "what it notes goes by numbers of the batch, so it runs whole on one device"
    left += others
    found = PerSample(dependence) if dependence else _in_parts(call, holder, like, batched, own, points)
    if found.dependence is None and _decides_together(call, holder, like, batched, own):
        found = replace(
            found, dependence="its Python decides by numbers of the whole batch, so it runs whole on one device"
        )
    return replace(found, notes=any(each.any for each in left), python=any(each.python for each in left))


def _decides_together(
    call: Call, holder: nn.Module, like: Sequence[Tensor], batched: Sequence[bool], own: Sequence[nn.Module]
) -> bool:
    inputs = [random_like(t, 5 if b else None) for t, b in zip(like, batched, strict=True)]

    def run(samples: int, given: Sequence[Tensor]) -> tuple[list[Tensor], Notes]:
        with restored(own) as changes:
            seed_all(2)
            made: list[Tensor] = tensors_of(call(holder, samples, [t.clone() for t in given]))
            return made, changes()

    def same(a: tuple[list[Tensor], Notes], b: tuple[list[Tensor], Notes]) -> bool:
        return _equal(a[0], b[0]) and _same_notes(a[1], b[1])

    return decides_together(run, inputs, batched, same)


def _in_parts(
    call: Call,
    holder: nn.Module,
    like: Sequence[Tensor],
    batched: Sequence[bool],
    own: Sequence[nn.Module],
    points: Sequence[int],
) -> PerSample:
    random = False
    for number, parts in enumerate((*_PARTS, *((n - 1, 1) for n in points))):
        inputs = [random_like(t, sum(parts) if b else None) for t, b in zip(like, batched, strict=True)]
        if number % 2:
            inputs = [_of_other_sizes(t) if b and is_floating(t) else t for t, b in zip(inputs, batched, strict=True)]
        given = [t.clone() for t in inputs]
        with restored(own):
            together = tensors_of(call(holder, sum(parts), given))
        if not all(torch.equal(a, b) for a, b in zip(inputs, given, strict=True)):
            return PerSample("it overwrites its input, so it runs whole on one device", random, overwrites=True)
        with restored(own):
            again = tensors_of(call(holder, sum(parts), inputs))
        if own and not random and not _equal(together, again):
            # Random numbers hide whether samples are independent: compare in evaluation mode instead.
            random = True
            for module in own:
                module.eval()
        if random:
            with restored(own):
                together = tensors_of(call(holder, sum(parts), inputs))
        start = 0
        for n in parts:
            rows = slice(start, start + n)
            some = [t[rows] if b else t for t, b in zip(inputs, batched, strict=True)]
            with restored(own):
                found = tensors_of(call(holder, n, some))
            if not _equal([t[rows] for t in together], found):
                return PerSample("a sample's answer depends on the others, so it runs whole on one device", random)
            start += n
        if (number < 2 or number >= len(_PARTS)) and not _same_gradients(
            call, holder, inputs, batched, parts, together, own
        ):
            return PerSample("a sample's gradient depends on the others, so it runs whole on one device", random)
    return PerSample(None, random)


def _same_gradients(
    call: Call,
    holder: nn.Module,
    inputs: Sequence[Tensor],
    batched: Sequence[bool],
    parts: Sequence[int],
    outputs: Sequence[Tensor],
    own: Sequence[nn.Module],
) -> bool:
    """Whether the backwards of parts give the rows of the inputs' gradients, and together the gradients of the parameters.

    An optimizer leaves a parameter without a gradient alone, but lets one with zeros decay: which have none is compared, too.
    """
    given = [torch.randn_like(y) if is_floating(y) else y for y in outputs]
    whole = _gradients(call, holder, sum(parts), inputs, given, own)
    if whole is None:
        return True  # it has no backward
    found = []
    for end, n in zip(itertools.accumulate(parts), parts, strict=True):
        own_rows = slice(end - n, end)
        some = [t[own_rows] if b else t for t, b in zip(inputs, batched, strict=True)]
        part = _gradients(call, holder, n, some, [g[own_rows] for g in given], own)
        if part is None:
            return False
        found.append(part)
    for place, expected in enumerate(whole):
        each = [part[place] for part in found]
        if place < len(inputs) and batched[place]:
            rows = torch.split(inputs[place], list(parts))
            total = torch.cat([_or_zeros(g, x) for g, x in zip(each, rows, strict=True)])
            expected = _or_zeros(expected, inputs[place])
        else:
            there = [g for g in each if g is not None]
            if (expected is None) != (not there):
                return False
            if expected is None:
                continue
            total = sum(there[1:], there[0])
        if not is_close(total, expected):
            return False
    return True


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _gradients(
    call: Call,
    holder: nn.Module,
    samples: int,
    inputs: Sequence[Tensor],
    given: Sequence[Tensor],
    own: Sequence[nn.Module],
) -> list[Tensor | None] | None:
    """Those of inputs and parameters; None where backward does not work."""
    weights = [p for p in nn.ModuleList(own).parameters() if p.requires_grad]
    held = [p.grad for p in weights]
    with torch.enable_grad(), restored(own):
        roots = [t.detach().clone().requires_grad_(is_floating(t)) for t in inputs]
        try:
            for p in weights:
                p.grad = None
            made = tensors_of(call(holder, samples, [t.clone() if t.requires_grad else t for t in roots]))
            pairs = [(y, g) for y, g in zip(made, given, strict=True) if y.requires_grad]
            torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
            return [t.grad for t in (*roots, *weights)]
        except Exception:  # what it is shows in training
            return None
        finally:
            for p, g in zip(weights, held, strict=True):
                p.grad = g


def _turning_points(
    call: Call, holder: nn.Module, like: Sequence[Tensor], batched: Sequence[bool], own: Sequence[nn.Module]
) -> list[int]:
    """Numbers of samples at which its Python decides otherwise.

    Raises:
        Undecided: for more samples than can be tried.
    """

    def run(samples: int) -> None:
        call(holder, samples, [random_like(t, int(samples) if b else None) for t, b in zip(like, batched, strict=True)])

    try:
        with restored(own):
            points = turning_points(run, {extent for t in like for extent in t.shape[1:]})
    except Undecided:
        raise
    except Exception:  # a number that is more than a number; or what shows without it, too
        points = [FAR]
    each = sum(math.prod(t.shape[1:]) for t, b in zip(like, batched, strict=True) if b)
    if any(n != FAR and n * each > _ENTRIES for n in points):
        raise Undecided("it decides at more samples than can be tried")
    return [n for n in points if n * each <= _ENTRIES]


def _backward_of(
    call: Call, holder: nn.Module, like: Sequence[Tensor], batched: Sequence[bool], own: Sequence[nn.Module]
) -> tuple[bool, tuple[int, ...]]:
    """Whether torch.autograd.grad refuses to go through it (a reentrant checkpoint), and which inputs get no gradient."""
    if all(type(module).__module__.startswith("torch.nn") for module in own):
        return False, ()
    alone, blocked = False, {i for i, t in enumerate(like) if is_floating(t)}
    with random_kept(0), torch.enable_grad(), _modes_kept(own):
        for samples in (2, 3, 2, 5):
            roots = [random_like(t, samples if b else None) for t, b in zip(like, batched, strict=True)]
            roots = [
                (_of_other_sizes(t) if samples != 2 else t).requires_grad_() if is_floating(t) else t for t in roots
            ]
            wanted = [t for t in (*roots, *nn.ModuleList(own).parameters()) if t.requires_grad]
            try:
                with restored(own):
                    # A copy of each, since autograd forbids in-place calls on leaves, and on views of them.
                    given = [t.clone() if t.requires_grad else t for t in roots]
                    outputs = [y for y in tensors_of(call(holder, samples, given)) if y.requires_grad]
                    if outputs and wanted:
                        ones = [torch.ones_like(y) for y in outputs]
                        gradients = torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
                        reached = {id(t) for t, g in zip(wanted, gradients, strict=True) if g is not None}
                        blocked = {i for i in blocked if id(roots[i]) not in reached}
            except Exception as error:  # another fault shows elsewhere
                alone, blocked = alone or "checkpoint" in str(error), set()
    return alone, tuple(sorted(blocked))


def has_dropout(module: nn.Module) -> bool:
    """Whether a module holds a dropout layer in training mode that drops anything (`StateWatch` keeps the others so)."""
    return any("Dropout" in type(m).__name__ and m.training and getattr(m, "p", 1.0) != 0 for m in module.modules())


def run_on_random(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a module on random inputs of these shapes; returns its outputs on the meta device (shapes and dtypes only)."""
    with random_kept(), torch.no_grad(), restored([module]):
        value = module(*on_random(args), **on_random(kwargs))
    return map_tensors(value, lambda t: t.to("meta"))


def on_random(value: Any) -> Any:
    """The same with random tensors."""
    return map_tensors(value, lambda t: random_like(t, None))


def random_like(like: Tensor, batch: int | None) -> Tensor:
    """A random CPU tensor of the same dtype and shape; its first axis has `batch` entries where that is given."""
    shape = like.shape if batch is None else (batch, *like.shape[1:])
    if is_floating(like):
        return torch.randn(shape, dtype=like.dtype)
    return torch.randint(0, 2, shape).to(like.dtype)


def _of_other_sizes(x: Tensor) -> Tensor:
    scales = torch.tensor([_SCALES[i % len(_SCALES)] for i in range(len(x))], dtype=x.dtype)
    return x * scales.view(-1, *[1] * (x.dim() - 1))


def is_floating(t: Tensor) -> bool:
    """Whether a tensor holds numbers that can have a gradient."""
    return t.dtype.is_floating_point or t.dtype.is_complex


def _in_float32(like: Sequence[Tensor]) -> bool:
    return any(is_floating(t) and t.dtype != torch.float64 for t in like)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a nest of tuples, lists, dicts and dataclasses, in order."""
    return [each for each in _inside(value) if isinstance(each, Tensor)]


def plain_values_of(value: Any) -> list[Any]:
    """The numbers, texts and Nones in such a nest, in order."""
    return [each for each in _inside(value) if isinstance(each, bool | int | float | complex | str | None)]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [each for v in value for each in _inside(v)]
    if isinstance(value, dict):
        return [each for v in value.values() for each in _inside(v)]
    if is_dataclass(value) and not isinstance(value, type):
        return [each for f in fields(value) for each in _inside(getattr(value, f.name))]
    return [value]


def map_tensors(value: Any, f: Callable[[Tensor], Any]) -> Any:
    """The same nest with `f` applied to each tensor."""
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
    """Equal up to rounding: kernels round differently for different numbers of samples."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_sparse or b.is_sparse:
        return a.is_sparse and b.is_sparse and is_close(a.to_dense(), b.to_dense())
    if torch.equal(a, b):
        return True
    rtol, atol = (1e-9, 1e-11) if a.dtype in (torch.float64, torch.complex128) else (1e-3, 1e-5)
    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(is_close(x, y) for x, y in zip(a, b, strict=True))


def _batch_norm_inside(modules: Sequence[nn.Module]) -> str | None:
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, _BatchNorm) and (inner.training or inner.running_mean is None):
                return type(inner).__name__
    return None


# --- what a call leaves behind ---------------------------------------------------------------------------------------


def _notes(
    call: Call,
    holder: nn.Module,
    like: Sequence[Tensor],
    batched: Sequence[bool],
    own: Sequence[nn.Module],
    samples: int,
) -> Notes:
    inputs = [random_like(t, samples if b else None) for t, b in zip(like, batched, strict=True)]
    return _noted(call, holder, inputs, own, samples)


def _notes_of_others(
    call: Call, holder: nn.Module, like: Sequence[Tensor], batched: Sequence[bool], own: Sequence[nn.Module]
) -> list[Notes]:
    """Of calls in which Python reads other numbers of a batch: random ones may never be so large that it changes anything."""
    inputs = [random_like(t, 3 if b else None) for t, b in zip(like, batched, strict=True)]
    return list(with_others(lambda n, x: _noted(call, holder, [t.clone() for t in x], own, n), 3, inputs))


def _noted(call: Call, holder: nn.Module, inputs: Sequence[Tensor], own: Sequence[nn.Module], samples: int) -> Notes:
    with restored(own):
        seed_all(1)
        for weight in nn.ModuleList(own).parameters():
            if is_floating(weight):  # a teacher that equals its student is not seen to follow it
                weight.data.add_(torch.randn_like(weight), alpha=0.01)
        with restored(own) as changes:
            seed_all(1)
            call(holder, samples, inputs)
            return changes()


def _same_notes(a: Notes, b: Notes) -> bool:
    keys = a.tensors.keys()
    return a.python == b.python and keys == b.tensors.keys() and all(is_close(a.tensors[k], b.tensors[k]) for k in keys)


@contextmanager
def _modes_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    modes = {m: m.training for module in modules for m in module.modules()}
    try:
        yield
    finally:
        for m, training in modes.items():
            m.training = training
