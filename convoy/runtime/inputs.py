"""What a model is called with: how large the whole batch is, and this device's part of each input."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.layout.layout import box, local_shape
from convoy.model.graph import Graph
from convoy.plan.steps import InputGradient, StepList

_ROWS, _BATCH = "_convoy_rows", "_convoy_batch"


def mark_whole(y: Tensor) -> None:
    """Remember that this output is whole on every device. Its memory bears the mark, so that `y.detach()` has it, too."""
    setattr(y.untyped_storage(), _ROWS, y.shape[0])


def is_whole(x: Tensor) -> bool:
    """Whether a tensor is an output of a distributed model, as it came or detached; not some rows of it."""
    return x.dim() > 0 and getattr(x.untyped_storage(), _ROWS, None) == x.shape[0]


def mark_part(x: Tensor, batch: int) -> None:
    """Remember of how large a batch these are a part."""
    setattr(x.untyped_storage(), _BATCH, (batch, x.shape[0]))


def batch_of(x: Tensor) -> int | None:
    """How large the batch is of which a loader handed these out as a part; None for other tensors, and for rows of it."""
    batch, rows = getattr(x.untyped_storage(), _BATCH, (None, 0))
    return batch if x.dim() > 0 and x.shape[0] == rows else None


class Inputs(NamedTuple):
    """Those of one call.

    Attributes:
        wholes: of each, whether it is the whole batch; else it is this device's part.
        batch: samples in the whole batch.
        handed_out: how large the batch is, the loader has said.
        wanted: where gradients of them have to be brought; nothing where there are none.
    """

    tensors: tuple[Tensor, ...]
    wholes: tuple[bool, ...]
    batch: int
    handed_out: bool
    wanted: tuple[InputGradient, ...]


def read_inputs(
    tensors: tuple[Tensor, ...], others: Mapping[str, Any], batch: int | None, whole: bool, announced: Sequence[int]
) -> Inputs:
    """What the arguments of a call say.

    Args:
        tensors, others: by position, and by name.
        batch: as the caller gave it.
        whole: all are whole batches; else those that a distributed model returned.
        announced: how large the batch is that the loader handed out last, if there is one.

    Raises:
        InputError: no tensors; a call under hooks that would see a part of what backward needs; nothing says the size.
    """
    _check_call(tensors, others)
    wholes = tuple([whole or is_whole(x) for x in tensors])
    handed_out = batch is None and not any(wholes)
    if batch is None:
        known = [len(x) for x, w in zip(tensors, wholes, strict=True) if w and x.dim()]
        known = known or [size for x in tensors if (size := batch_of(x)) is not None] or [*announced]
        if not known:
            raise InputError(
                "the size of the whole batch is not known: use convoy.loader, or the loader that convoy.prepare returned, or "
                "call model(x, batch=64); where every device has the whole batch, model(x, whole=True)"
            )
        batch = known[0]
    wanted: tuple[InputGradient, ...] = ()
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        wanted = tuple(
            "none" if not x.requires_grad else "whole" if w else "part" for x, w in zip(tensors, wholes, strict=True)
        )
    return Inputs(tensors, wholes, batch, handed_out, wanted)


def _check_call(tensors: Sequence[Any], others: Mapping[str, Any]) -> None:
    if others or not all(isinstance(x, Tensor) for x in tensors):
        odd = [*others, *(f"a {type(x).__name__}" for x in tensors if not isinstance(x, Tensor))]
        raise InputError(
            f"the distributed model was called with {', '.join(odd)}: it takes the tensors of the example, by "
            "position. Give other arguments their value in a module around the model, before distribute()"
        )
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and not hooks[0].__qualname__.startswith("save_on_cpu."):
        raise InputError(
            "the distributed model was called under saved_tensors_hooks, which would see a part of what backward needs, or "
            "nothing: use them inside a module of the model, before distribute()"
        )


def parts_of(inputs: Inputs, steps: StepList, graph: Graph, group: Group) -> list[Tensor]:
    """This device's part of each input, as the steps want it.

    Raises:
        InputError: their number, a shape or a type is not that of the model.
    """
    if len(inputs.tensors) != len(steps.inputs):
        raise InputError(f"the model takes {len(steps.inputs)} inputs, got {len(inputs.tensors)}")
    device, parts = group.device, []
    for x, value, whole in zip(inputs.tensors, steps.inputs, inputs.wholes, strict=True):
        expected = value.shape if whole else local_shape(value.layout, device, value.shape)
        if tuple(x.shape) != expected:
            raise _misshapen(group.ids[device], tuple(x.shape), expected, inputs, whole)
        dtype = graph[value.layer].dtype
        casts = x.is_floating_point() and torch.is_autocast_enabled(x.device.type)
        if x.dtype != getattr(torch, dtype) and not casts:
            raise InputError(
                f"device {group.ids[device]} got an input of {str(x.dtype).removeprefix('torch.')}, and the example that the "
                f"model was distributed with was {dtype}: give such inputs, or that kind of example"
            )
        if whole:
            here = box(value.layout, device, value.shape)
            x = x.detach()[tuple(slice(*span) for span in here) if here is not None else (slice(0, 0),)]
        parts.append(x)
    return parts


def _misshapen(
    device: int, shape: tuple[int, ...], expected: tuple[int, ...], inputs: Inputs, whole: bool
) -> InputError:
    what = f"device {device} got an input of shape {shape}"
    if shape == expected[1:]:
        return InputError(f"{what}, one sample without the axis of the batch: give x[None]")
    if shape[1:] != expected[1:]:
        return InputError(
            f"{what}, and the samples of the example that the model was distributed with have the shape {expected[1:]}: "
            "give distribute() an example of the shape of the data, such as a batch of the loader"
        )
    if whole:
        return InputError(f"{what}; the whole batch is {expected}: give all inputs as many samples")
    if inputs.handed_out:
        return InputError(
            f"{what}; the loader handed out a batch of {inputs.batch} last, and this device's part of that is {expected}. If "
            "these samples are of a DataLoader of your own, let convoy.prepare or convoy.loader serve them, too; if every "
            "device has this same whole batch: model(x, whole=True)"
        )
    return InputError(
        f"{what}; its part of a batch of {inputs.batch} is {expected}: use convoy.loader, or tell the size of the whole batch: "
        "model(x, batch=n); if every device has all of it: model(x, whole=True)"
    )
