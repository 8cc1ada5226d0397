"""The way in: from an nn.Module to a TracedModel."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from convoy.errors import InputError
from convoy.model.tracing.calls import TracedModel
from convoy.model.tracing.layers import Layering
from convoy.model.tracing.nodes import ONE_AT_A_TIME, Untraceable, first_line
from convoy.model.tracing.same_answer import require_same_answer
from convoy.model.tracing.whole import whole


def trace(
    model: nn.Module, example: Tensor | Sequence[Tensor], *, training: bool = True, like: TracedModel | None = None
) -> TracedModel:
    """Take a model apart. The model itself is left as it is.

    Args:
        model: an ordinary module on any device; its inputs are tensors whose first axis is the batch.
        example: one batch of each input; only shape and dtype matter.
        training: trace what the model does in training (dropout, batch statistics, auxiliary outputs) or in evaluation.
        like: a trace of the same model in the other mode; what is one layer there is one layer here, so that both
            modes keep parameters in the same layers.

    Raises:
        InputError: the model cannot be copied, does not run on the example, or returns something else than tensors.
    """
    examples = (example,) if isinstance(example, Tensor) else tuple(example)
    if not examples or any(e.dim() == 0 for e in examples):
        raise InputError("the example must be a batch: tensors whose first axis is the batch; give e.g. x[:2]")
    local = _copy(model)
    if not training:
        local.eval()
    elif not local.training:
        local.train()
    specs = [(tuple(e.shape[1:]), e.dtype) for e in examples]
    with ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        try:
            leaves = _opaque_modules(like) if like is not None else ()
            if "" in leaves:
                raise Untraceable("it is one layer in the other mode")
            traced = Layering(local, specs, leaves).run()
            require_same_answer(local, traced, specs)
            return traced
        except Untraceable as reason:
            return whole(local, specs, str(reason))


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model).cpu()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({first_line(error)}): what is computed from parameters is no state "
            "of a module; torch.nn.utils.parametrizations has forms that can be copied"
        ) from error


def _opaque_modules(traced: TracedModel) -> tuple[str, ...]:
    """Paths of the modules that a trace keeps whole; "" is the model itself."""
    calls = (traced.operations[layer.name] for layer in traced.graph.layers.values() if layer.kind == "opaque")
    return tuple(str(call.target) for call in calls if call.call == "module")
