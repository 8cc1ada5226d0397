"""A trace must compute what the model computes: outputs, gradients and what is noted in buffers."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.trace.calls import Traced, evaluate, without_in_place
from convoy.trace.nodes import Untraceable, first_line
from convoy.trace.samples import close, random_like, tensors_of
from convoy.trace.values import BATCHES, Spec


def require_same_answer(model: nn.Module, traced: Traced, specs: Sequence[Spec]) -> None:
    """Run model and trace on the same random numbers: Python that a trace does not see must not change them silently.

    Raises:
        Untraceable: they differ (`x += y` under another name, say).
        InputError: the model itself does not run on inputs of these shapes.
    """
    if any(p.is_meta for p in model.parameters()):
        return
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        like = [torch.empty((BATCHES[0], *shape), dtype=dtype, device="meta") for shape, dtype in specs]
        inputs = [random_like(t, None) for t in like]
        reference, pure = copy.deepcopy(model), without_in_place(copy.deepcopy(model))
        try:
            expected = _answer(reference, lambda x: reference(*x), inputs)
        except Exception as error:
            raise InputError(
                f"{type(model).__name__} does not run on the example ({first_line(error)}): "
                "give one batch of each of its inputs, as its forward takes them"
            ) from error
        try:
            found = _answer(pure, lambda x: evaluate(pure, traced, x), inputs)
        except Exception as error:
            raise Untraceable(f"its trace does not run: {first_line(error)}") from None
    for what in ("outputs", "gradients", "buffers"):
        if not _same(getattr(expected, what), getattr(found, what)):
            raise Untraceable(f"its trace gives other {what} (in-place changes seen under two names, say)")


@dataclass(frozen=True, slots=True)
class _Answer:
    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    buffers: Sequence[Tensor]


def _answer(model: nn.Module, call: Callable[[list[Tensor]], Any], inputs: Sequence[Tensor]) -> _Answer:
    torch.manual_seed(1)
    outputs = tensors_of(call([x.clone() for x in inputs]))
    trainable = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(2)
    weights = [torch.randn_like(y) if y.requires_grad else None for y in outputs]
    pairs = [(y, w) for y, w in zip(outputs, weights, strict=True) if w is not None]
    gradients: Sequence[Tensor | None] = [None] * len(trainable)
    if pairs and trainable:
        gradients = torch.autograd.grad([y for y, _ in pairs], trainable, [w for _, w in pairs], allow_unused=True)
    return _Answer([y.detach() for y in outputs], gradients, list(model.buffers()))


def _same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    return len(a) == len(b) and all(
        (x is None and y is None) or (x is not None and y is not None and close(x, y))
        for x, y in zip(a, b, strict=True)
    )
