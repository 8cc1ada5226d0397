"""Compares what a trace computes with what the model computes, over several steps of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.operation import TracedModel, disable_in_place, run_traced
from convoy.model.tracing.nodes import first_line
from convoy.model.tracing.outside import Outside
from convoy.model.tracing.per_sample import is_close, plain_values_of, random_like, tensors_of
from convoy.model.tracing.shared_copy import is_shared, shared_copy
from convoy.model.tracing.sizes import Spec
from convoy.model.tracing.sketch import Sketches, differing
from convoy.model.tracing.state import random_kept, seed_all, state_of

BATCHES = {True: (2, 3, 5), False: (2, 5)}
"""Samples of the batches of a comparison, in training and in evaluation: not only those that the trace was made for. The first
is computed without gradients, the others are steps of training."""

WHOLE_BYTES = 32 << 20
"""So much of the weights, from the smallest on, is trained in a trial, and their gradients are compared entry by entry. Those
that are larger stay as they are, shared by all, and of their gradients a thousandth is compared (`sketch.py`)."""
_RATE = 0.05


class Differs(Exception):  # noqa: N818 - it ends one way of tracing, not the program
    """A trace computes something else than the model; the text says what."""


class DoesNotRun(Exception):  # noqa: N818
    """The model itself does not run on inputs of these shapes."""


class _Side:
    """One of the two that are compared: the model, or what its trace runs on.

    Attributes:
        model: a copy, of which large weights take no memory of their own.
        large: keys of the weights that are not trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = shared_copy(model)
        self.large = _large(self.model)
        self.sketches = Sketches({key: p for key, p in self.model.named_parameters() if key in self.large})

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}


def _large(model: nn.Module) -> frozenset[str]:
    rows = sorted(model.named_parameters(), key=lambda row: row[1].numel())
    sums = accumulate(p.numel() * p.element_size() for _, p in rows)
    return frozenset(key for (key, _), total in zip(rows, sums, strict=True) if total > WHOLE_BYTES)


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a model whose trace is right.

    Attributes:
        overwrites: it overwrites its inputs, which a trace leaves as they are.
        changed: paths of the attributes that its forward changes.
    """

    overwrites: bool
    changed: frozenset[str]


def check_same(model: nn.Module, traced: TracedModel, specs: Sequence[Spec], *, training: bool) -> Seen:
    """Compare outputs, gradients, parameters, buffers and the Python state of modules, step by step.

    Python that a trace does not see (`x += y` under another name, a counter) must not change results silently.

    Args:
        model: left as it is.

    Raises:
        Differs: they are not the same.
        DoesNotRun: the model does not run on inputs of these shapes.
    """
    reference, twin, overwrites = _Side(model), _Side(model), False
    disable_in_place(twin.model)
    outside, before = Outside(model.modules()), state_of(reference.model)
    with random_kept(0), torch.enable_grad(), outside.kept():
        for step, batch in enumerate(BATCHES[training]):
            seed_all(10 * step)
            inputs = [
                random_like(torch.empty((batch, *shape), dtype=dtype, device="meta"), None) for shape, dtype in specs
            ]
            given = [x.clone() for x in inputs]
            _compare_step(reference, twin, traced, inputs, given, step, outside)
            overwrites = overwrites or not all(map(torch.equal, inputs, given))
    after = state_of(reference.model)
    return Seen(overwrites, frozenset(key for key, value in before.items() if after.get(key) != value))


def _compare_step(
    reference: _Side,
    twin: _Side,
    traced: TracedModel,
    inputs: Sequence[Tensor],
    given: Sequence[Tensor],
    step: int,
    outside: Outside,
) -> None:
    with torch.set_grad_enabled(step > 0):
        expected, found = _outputs(reference.model, twin.model, traced, inputs, given, step, outside)
    if step > 0 and _backward(expected, step) is None:
        _backward(found, step)
        _compare_gradients(reference, twin)
        _update(reference.model)
        _update(twin.model)
    rows = zip(reference.tensors().items(), (*twin.model.parameters(), *twin.model.buffers()), strict=True)
    for (key, tensor), other in rows:
        if not is_shared(tensor, other) and not is_close(tensor, other):
            raise Differs(f"its trace leaves another {key!r} behind")
    before, after = state_of(reference.model), state_of(twin.model)
    if before != after:
        changed = [key for key in before if before[key] != after.get(key) and not key.endswith("inplace")]
        if changed:
            raise Differs(f"its forward changes {changed[0]!r}, which its trace does not")


def _compare_gradients(reference: _Side, twin: _Side) -> None:
    rows = zip(reference.model.named_parameters(), twin.model.parameters(), strict=True)
    key = differing(reference.sketches.taken(), twin.sketches.taken(), reference.large)
    for own, p, q in ((own, p, q) for (own, p), q in rows if key is None):
        if (p.grad is None) != (q.grad is None) or (p.grad is not None and not is_close(p.grad, q.grad)):  # type: ignore[arg-type]
            key = own
    if key is not None:
        raise Differs(f"its trace gives other gradients (of {key!r}, say)")


def _outputs(
    reference: nn.Module,
    twin: nn.Module,
    traced: TracedModel,
    inputs: Sequence[Tensor],
    given: Sequence[Tensor],
    step: int,
    outside: Outside,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Those of the model, which gets a copy of the inputs, and those of the trace."""
    batch, before = len(inputs[0]), outside.values()
    try:
        seed_all(10 * step + 1)
        with outside.kept():
            returned = reference(*given)
            after = outside.values()
    except InputError:
        raise
    except Exception as error:
        raise DoesNotRun(first_line(error)) from error
    try:
        seed_all(10 * step + 1)
        retraced = run_traced(twin, traced, [x.clone() for x in inputs])
    except Exception as error:
        raise Differs(f"its trace does not run on {batch} samples: {first_line(error)}") from None
    if (now := outside.values()) != after:
        changed = next(key for key in after if now[key] != after[key])
        what = "does not" if now[changed] == before[changed] else "does otherwise"
        raise Differs(f"its forward changes {changed}, which its trace {what}")
    gradients = "" if torch.is_grad_enabled() else " without gradients"
    expected, found = tensors_of(returned), tensors_of(retraced)
    _require_same(expected, found, f"outputs for {batch} samples{gradients}")
    if repr(plain_values_of(returned)) != repr(plain_values_of(retraced)):  # of which NaN is equal to itself
        raise Differs("it returns a number or text beside its tensors that is another one at another call")
    return expected, found


def _backward(outputs: Sequence[Tensor], step: int) -> str | None:
    """Gradients of all parameters for a loss that weighs every number of the outputs differently; why not, else None."""
    reached = [y for y in outputs if y.requires_grad]
    torch.default_generator.manual_seed(10 * step + 2)
    try:
        # Not autograd.grad, which a reentrant checkpoint refuses.
        if reached:
            torch.autograd.backward(reached, [torch.randn_like(y) for y in reached])
    except RuntimeError as error:
        return first_line(error)
    return None


@torch.no_grad()
def _update(model: nn.Module) -> None:
    """A step of SGD, no longer than a part of each weight."""
    for p in model.parameters():
        if p.grad is not None:
            size = float(p.grad.norm())
            p.data.add_(p.grad, alpha=-_RATE * min(1.0, (float(p.norm()) + 1e-3) / (size + 1e-12)))
        p.grad = None


def _require_same(a: Sequence[Tensor], b: Sequence[Tensor], what: str) -> None:
    if len(a) != len(b) or not all(is_close(x, y) for x, y in zip(a, b, strict=False)):
        raise Differs(f"its trace gives other {what} (in-place changes seen under two names, say)")
