"""Inputs and outputs of a distributed model: global batches, local batches, and the marks that tell them apart."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.layout.layout import Layout, Replicated, Shape, box, everywhere, local_shape
from convoy.model.graph import Graph
from convoy.plan.steps import InputGradient, StepList
from convoy.runtime.exchange import redistribute

# --- inputs ------------------------------------------------------------------------------------------------------------

_ROWS, _BATCH = "_convoy_rows", "_convoy_batch"
"""Marks on the memory of tensors, which views and `detach()` share: rows of a global batch; global size of a local batch."""


def mark_whole(y: Tensor) -> None:
    """Mark an output that is the global batch on every device."""
    setattr(y.untyped_storage(), _ROWS, y.shape[0])


def mark_part(x: Tensor, batch: int) -> None:
    """Mark a local batch of a global batch of this size."""
    setattr(x.untyped_storage(), _BATCH, (batch, x.shape[0]))


class StepInputs(NamedTuple):
    """The inputs of one call.

    Attributes:
        wholes: for each, whether it is the global batch; else it is the local batch.
        batch: samples in the global batch.
        announced: the size of the global batch is what the loader said.
        wanted: where gradients of inputs have to be brought; empty if none has one.
    """

    tensors: tuple[Tensor, ...]
    wholes: tuple[bool, ...]
    batch: int
    announced: bool
    wanted: tuple[InputGradient, ...]


def read_inputs(
    tensors: tuple[Tensor, ...], others: Mapping[str, Any], batch: int | None, whole: bool, announced: Sequence[int]
) -> StepInputs:
    """Interpret the arguments of a call.

    Args:
        tensors, others: by position, and by name.
        batch: as the caller gave it.
        whole: all are global batches; else those that a distributed model returned.
        announced: the size of the global batch that the loader announced last, if any.

    Raises:
        InputError: no tensors; hooks on what autograd saves; an unknown size.
    """
    if others or not all(isinstance(x, Tensor) for x in tensors):
        odd = [*others, *(f"a {type(x).__name__}" for x in tensors if not isinstance(x, Tensor))]
        raise InputError(
            f"the distributed model was called with {', '.join(odd)}: it takes the tensors of the example, by "
            "position. Give other arguments their value in a module around the model, before distribute()"
        )
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and not hooks[0].__qualname__.startswith("save_on_cpu."):
        raise InputError(
            "the distributed model was called under saved_tensors_hooks, which would see only a part of what backward needs: "
            "use them inside a module of the model, before distribute()"
        )
    wholes = tuple(
        [whole or (x.dim() > 0 and getattr(x.untyped_storage(), _ROWS, None) == x.shape[0]) for x in tensors]
    )
    from_loader = batch is None and not any(wholes)
    if batch is None:
        known = [len(x) for x, w in zip(tensors, wholes, strict=True) if w and x.dim()] or _marked_sizes(tensors)
        known = known or [*announced]
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
    return StepInputs(tensors, wholes, batch, from_loader, wanted)


def _marked_sizes(tensors: Sequence[Tensor]) -> list[int]:
    """Return the global sizes of marked local batches; of some rows of one, nothing is known."""
    marks = [(x, getattr(x.untyped_storage(), _BATCH, (0, -1))) for x in tensors if x.dim()]
    return [batch for x, (batch, rows) in marks if rows == x.shape[0]]


def local_inputs(inputs: StepInputs, steps: StepList, graph: Graph, group: Group) -> list[Tensor]:
    """Return the local batch of each input.

    Raises:
        InputError: the number of inputs, a shape or a type is not that of the model.
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


def _misshapen(device: int, shape: Shape, expected: Shape, inputs: StepInputs, whole: bool) -> InputError:
    what = f"device {device} got an input of shape {shape}"
    if shape == expected[1:]:
        return InputError(f"{what}, one sample without the axis of the batch: give x[None]")
    if shape[1:] != expected[1:]:
        return InputError(
            f"{what}, and the samples of the example that the model was distributed with have the shape {expected[1:]}: "
            "give distribute() an example of the shape of the data, such as a batch of the loader"
        )
    if whole:
        return InputError(f"{what}; the whole batch is {expected}: give all inputs the same number of samples")
    if inputs.announced:
        return InputError(
            f"{what}; the loader handed out a batch of {inputs.batch} last, and the local batch of that is {expected}. If "
            "these samples are of a DataLoader of your own, let convoy.prepare or convoy.loader serve them, too; if every "
            "device has this same whole batch: model(x, whole=True)"
        )
    return InputError(
        f"{what}; the local batch of {inputs.batch} samples is {expected}: use convoy.loader, or give the size of the whole "
        "batch: model(x, batch=n); if every device has all of it: model(x, whole=True)"
    )


# --- outputs -----------------------------------------------------------------------------------------------------------

_REMEDY = (
    "convoy.loss(criterion)(output, y) is the loss of the whole batch, output.whole() the outputs of the whole batch on every "
    'device, output.own those of the local samples; a plan with outputs "everywhere" returns tensors'
)


def returned_outputs(outputs: Sequence[Tensor], steps: StepList, graph: Graph, group: Group) -> list[Any]:
    """Return the outputs that every device has, marked as whole, and an `OutputPart` for each that stays distributed."""
    returned: list[Any] = []
    for value, y in zip(steps.outputs, outputs, strict=True):
        if not isinstance(value.layout, Replicated):
            returned.append(OutputPart(y, value.layout, value.shape, group))
            continue
        if graph[value.layer].batched:
            mark_whole(y)
        returned.append(y)
    return returned


class OutputPart:
    """One output of a distributed model whose plan has `outputs="where-computed"`: that of the local samples.

    It is given to :func:`convoy.loss`. It is no tensor, and functions of torch refuse it: its mean would be that of a part.

    Args:
        tensor: output of the local samples, with its autograd graph.
        layout, shape: of the whole output.

    Attributes:
        batch: samples in the global batch.
        rows: start and stop of the local samples in the global batch.
    """

    def __init__(self, tensor: Tensor, layout: Layout, shape: Shape, group: Group) -> None:
        self._tensor, self._layout, self._shape, self.group = tensor, layout, shape, group
        self.batch, self.rows = shape[0], rows_of(layout, shape, group.device)

    @property
    def own(self) -> Tensor:
        """The output of the local samples, detached. Zero rows if the device has no samples."""
        return self._tensor.detach()

    @property
    def attached(self) -> Tensor:
        """As `own`, with its gradient: only for a loss whose parts are added over the devices."""
        return self._tensor

    def whole(self) -> Tensor:
        """Return the output of the global batch, detached. Every device must call it."""
        everyone = everywhere(self.group.devices)
        return redistribute(self.group, self.own, self._layout, everyone, self._shape).clone()

    def rows_of(self, y: Tensor) -> Tensor:
        """Return the rows of a tensor that belong to the local samples.

        Args:
            y: of the global batch, or of the local samples already.

        Raises:
            InputError: it has another number of samples.
        """
        start, stop = self.rows
        if y.dim() and len(y) == self.batch:
            return y[start:stop]
        if y.dim() and len(y) == stop - start:
            return y
        raise InputError(
            f"a tensor of shape {tuple(y.shape)} for an output of {self.batch} samples, {stop - start} of them on device "
            f"{self.group.device}: give the labels of the whole batch, or those of the local samples in their order"
        )

    def __repr__(self) -> str:
        start, stop = self.rows
        return f"OutputPart(samples {start} to {stop} of a batch of {self.batch}, shape {tuple(self._tensor.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:  # fmt: skip
        name = getattr(func, "__name__", "a function of torch")
        raise InputError(f"{name} was given an output of which this device has a part: {_REMEDY}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"an output of which this device has a part has no {name!r}: {_REMEDY}")

    def _refuse(self, *_: object) -> NoReturn:
        raise InputError(f"an operator on an output of which this device has a part: {_REMEDY}")

    # Python's defaults would be silently wrong for these; without the others it raises TypeError.
    __bool__ = __eq__ = __ne__ = __len__ = __iter__ = __getitem__ = __array__ = _refuse
    __hash__ = object.__hash__


def rows_of(layout: Layout, shape: Shape, device: int) -> tuple[int, int]:
    """Return start and stop of a device's samples of a value."""
    here = box(layout, device, shape)
    return here[0] if here is not None else (0, 0)
