"""A trace must compute what the model computes: outputs, gradients and what is noted in buffers."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.tracing.calls import TracedModel, disable_in_place, run_traced
from convoy.model.tracing.nodes import Untraceable, first_line
from convoy.model.tracing.samples import close, random_like, tensors_of
from convoy.model.tracing.values import BATCHES, Spec


def require_same_answer(model: nn.Module, traced: TracedModel, specs: Sequence[Spec]) -> None:
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
        reference, pure = copy.deepcopy(model), disable_in_place(copy.deepcopy(model))
        try:
            torch.manual_seed(1)
            expected = tensors_of(reference(*[x.clone() for x in inputs]))
        except Exception as error:
            raise InputError(
                f"{type(model).__name__} does not run on the example ({first_line(error)}): "
                "give one batch of each of its inputs, as its forward takes them"
            ) from error
        try:
            torch.manual_seed(1)
            found = tensors_of(run_traced(pure, traced, inputs))
        except Exception as error:
            raise Untraceable(f"its trace does not run: {first_line(error)}") from None
        _require_same(expected, found, "outputs")
        _require_same(list(reference.buffers()), list(pure.buffers()), "buffers")
        try:
            gradients = _gradients(reference, expected)
        except RuntimeError:
            return  # it cannot be trained on one device either
        _require_same(gradients, _gradients(pure, found), "gradients")


def _gradients(model: nn.Module, outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of all parameters for a loss that weighs every number of the outputs differently."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    reached = [y for y in outputs if y.requires_grad]
    if not trainable or not reached:
        return [None] * len(trainable)
    torch.manual_seed(2)
    return torch.autograd.grad(reached, trainable, [torch.randn_like(y) for y in reached], allow_unused=True)


def _require_same(a: Sequence[Tensor | None], b: Sequence[Tensor | None], what: str) -> None:
    for x, y in zip(a, b, strict=False):
        if (x is None) != (y is None) or (x is not None and y is not None and not close(x, y)):
            break
    else:
        if len(a) == len(b):
            return
    raise Untraceable(f"its trace gives other {what} (in-place changes seen under two names, say)")
