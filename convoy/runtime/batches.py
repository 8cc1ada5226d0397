"""Take local batches from a distributed model's inputs, and wrap or mark its outputs."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.layout.layout import Box, Boxes, Layout, Replicated, Shape, box, everywhere, holders, local_shape
from convoy.model.graph import Graph
from convoy.model.nested import CallForm
from convoy.model.operation import TracedModel
from convoy.plan.steps import InputGradient, StepList
from convoy.runtime.exchange import redistribute

# --- inputs ------------------------------------------------------------------------------------------------------------

_ROWS, _BATCH = "_convoy_rows", "_convoy_batch"
"""Attributes of a tensor's storage, which views share: rows of a global batch; (global shape, local shape) of a local one."""


def mark_whole(y: Tensor) -> None:
    """Mark a tensor as a global batch, which every device holds."""
    setattr(y.untyped_storage(), _ROWS, y.shape[:1])


def mark_part(x: Tensor, shape: Shape) -> None:
    """Mark a tensor as this device's part of a global batch of this shape."""
    setattr(x.untyped_storage(), _BATCH, (shape, x.shape))


class BatchPart(NamedTuple):
    """This device's part of a global batch.

    Attributes:
        box: a range per axis; or only that of the samples, if devices have whole samples.
        shape: of the global batch; empty if devices have whole samples.
    """

    box: Box
    shape: Shape = ()

    @classmethod
    def of(cls, layout: Layout, shape: Shape, device: int) -> "BatchPart":
        here = box(layout, device, shape) or ((0, 0), *((0, n) for n in shape[1:]))
        return cls(here, shape) if isinstance(layout, Boxes) else cls(here[:1])

    @property
    def rows(self) -> range:
        return range(*self.box[0])

    def spans(self, shape: Shape, *, whole: bool = True) -> Box:
        """Return the part in each sample of another tensor, such as labels, which may have no axis for channels.

        Args:
            whole: the tensor has the global batch; else it may also be this device's tile.

        Raises:
            InputError: the tensor has the axes of images, but another size.
        """
        box, whole_shape = self
        if len(shape) == len(whole_shape) - 1:
            box, whole_shape = (box[0], *box[2:]), (whole_shape[0], *whole_shape[2:])
        if len(shape) != len(whole_shape):
            return tuple((0, size) for size in shape[1:])
        axes = list(zip(box[1:], whole_shape[1:], shape[1:], strict=True))
        for (first, last), extent, size in axes[len(axes) + 2 - len(self.shape) :]:
            if size not in ((extent, 1) if whole else (extent, 1, last - first)):
                raise InputError(
                    f"a tensor of shape {tuple(shape)}, where images have the shape {self.shape[2:]}: all images, label maps "
                    "and outputs of tiles must be as large as in the example; crop or resize them in the data set"
                )
        return tuple(span if extent == size else (0, size) for span, extent, size in axes)


class StepInputs(NamedTuple):
    """The inputs of one call.

    Attributes:
        wholes: for each input, whether it is a global batch; else it is a local batch.
        batch: samples in the global batch.
        announced: the size of the global batch comes from the loader, not from the caller.
        wanted: for each input, the gradient to return: none, whole (global batch) or part (local); empty if none needs one.
    """

    tensors: Sequence[Tensor]
    wholes: tuple[bool, ...]
    batch: int
    announced: bool
    wanted: tuple[InputGradient, ...]


def read_inputs(tensors: Sequence[Tensor], batch: int | None, whole: bool, announced: Sequence[int]) -> StepInputs:
    """Check the tensors of a model call, and find the size of the global batch.

    Args:
        batch: size of the global batch, if the caller gave it.
        whole: all inputs are global batches; False: only outputs of distributed models are.
        announced: sizes of global batches that the loader announced; the first one counts.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and not hooks[0].__qualname__.startswith("save_on_cpu."):
        raise InputError(
            "the distributed model was called under saved_tensors_hooks, which would see only a part of the saved tensors: "
            "use them inside a module of the model, before distribute()"
        )
    wholes = tuple([whole or getattr(x.untyped_storage(), _ROWS, None) == x.shape[:1] for x in tensors])
    from_loader = batch is None and not any(wholes)
    if batch is None:
        known = [len(x) for x, w in zip(tensors, wholes, strict=True) if w and x.dim()]
        if not known:
            known = [shape[0] for x in tensors if (shape := _marked(x))] or [*announced]
        if not known:
            raise InputError(
                "the size of the global batch is not known: use convoy.loader, or the loader that convoy.prepare returned, or "
                "call model(x, batch=64); if every device has the global batch, model(x, whole=True)"
            )
        batch = known[0]
    wanted: tuple[InputGradient, ...] = ()
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        wanted = tuple(
            "none" if not x.requires_grad else "whole" if w else "part" for x, w in zip(tensors, wholes, strict=True)
        )
    return StepInputs(tensors, wholes, batch, from_loader, wanted)


def _marked(x: Tensor) -> Shape:
    """Return the shape of the global batch that `x` is a part of. Of a view, only the samples are known, or nothing."""
    shape, local = getattr(x.untyped_storage(), _BATCH, ((), (-1,)))
    return shape if local == x.shape else shape[:1] if local[:1] == x.shape[:1] else ()


def sample_shapes(
    inputs: StepInputs, call: CallForm, traced: TracedModel, group: Group, boxed: Collection[str]
) -> tuple[Shape, ...]:
    """Return the shape of each input per sample. Raise InputError if there is no batch axis, or another number of axes.

    Args:
        boxed: inputs of which devices hold boxes of each sample. A tensor of unknown origin is a box of such samples.
    """
    axes: list[int] = [max(1, x.dim()) for x in inputs.tensors]
    examples: list[Shape] = [()] * len(axes)
    if call == traced.call:
        axes = [len(layer.shape) + 1 for layer in traced.graph.inputs]
        examples = [layer.shape if layer.name in boxed else () for layer in traced.graph.inputs]
    rows = zip(inputs.tensors, inputs.wholes, axes, strict=True)
    if any(x.dim() != wanted or (whole and len(x) != inputs.batch) for x, whole, wanted in rows):
        got = ", ".join(f"{name} of {tuple(x.shape)}" for name, x in zip(call.names, inputs.tensors, strict=True))
        raise InputError(
            f"device {group.ids[group.device]} got {got}: the tensors need {axes} axes, the first of them the "
            f"{inputs.batch} samples of the batch. Give a single sample as x[None]; keep tensors without that axis in buffers"
        )
    shapes = zip(inputs.tensors, inputs.wholes, examples, strict=True)
    return tuple([tuple(x.shape[1:] if w else _marked(x)[1:] or known or x.shape[1:]) for x, w, known in shapes])


def local_inputs(inputs: StepInputs, steps: StepList, graph: Graph, group: Group) -> list[Tensor]:
    """Return the local batch of each input. Raise InputError if the inputs do not fit the model."""
    device, parts = group.device, []
    for x, value, whole in zip(inputs.tensors, steps.inputs, inputs.wholes, strict=True):
        # Every device may also give whole images. Its gradient would then be of the wrong shape.
        whole = whole or (isinstance(value.layout, Boxes) and not inputs.wanted and tuple(x.shape) == value.shape)
        expected = value.shape if whole else local_shape(value.layout, device, value.shape)
        if tuple(x.shape) != expected:
            source = "the loader's last batch" if inputs.announced else "the global batch"
            raise InputError(
                f"device {group.ids[device]} got an input of shape {tuple(x.shape)}; {source} had {inputs.batch} samples, "
                f"and its local batch is {expected}. Give your own DataLoader to convoy.prepare or convoy.loader, or call "
                "model(x, batch=n) with the size of the global batch; if every device has all of it, model(x, whole=True)"
            )
        dtype = graph[value.layer].dtype
        casts = x.is_floating_point() and torch.is_autocast_enabled(x.device.type)
        if x.dtype != getattr(torch, dtype) and not casts:
            raise InputError(
                f"device {group.ids[device]} got an input of {str(x.dtype).removeprefix('torch.')}, but the example of "
                f"distribute() was {dtype}: convert the inputs, or give distribute() an example of their dtype"
            )
        if whole:
            here = box(value.layout, device, value.shape)
            x = x.detach()[tuple(slice(*span) for span in here) if here is not None else (slice(0, 0),)]
        parts.append(x)
    return parts


# --- outputs -----------------------------------------------------------------------------------------------------------

_REMEDY = (
    "use convoy.loss(criterion)(output, y) for the loss of the global batch, output.whole() for all its outputs, output.own "
    'for those of the local samples, or a plan with outputs "everywhere", which returns tensors'
)


def returned_outputs(
    outputs: Sequence[Tensor], steps: StepList, graph: Graph, group: Group, *, whole: bool
) -> list[Any]:
    """Return each replicated output marked as the global batch, and each local output as an `OutputPart`.

    Args:
        whole: the inputs were global batches, so labels are too.
    """
    returned: list[Any] = []
    for value, y in zip(steps.outputs, outputs, strict=True):
        if not isinstance(value.layout, Replicated):
            returned.append(OutputPart(y, value.layout, value.shape, group, whole=whole))
            continue
        if graph[value.layer].batched:
            mark_whole(y)
        returned.append(y)
    return returned


class OutputPart:
    """The local samples of one output, for a plan with `outputs="where-computed"`.

    Give it to :func:`convoy.loss`. torch's functions refuse it, because a mean over local samples only would be wrong.

    Attributes:
        attached: the output of the local samples, with its autograd graph. Use it only in a loss that is summed over devices.
        batch, rows: samples in the global batch; start and stop of the local ones in it.
        pixels: start and stop along each axis of the images, if devices have tiles of them; else empty.
        owners: the devices that have samples.
    """

    def __init__(self, tensor: Tensor, layout: Layout, shape: Shape, group: Group, *, whole: bool = False) -> None:
        self.attached, self._layout, self._shape, self.group, self._whole = tensor, layout, shape, group, whole
        self._part = BatchPart.of(layout, shape, group.device)
        self.batch, self.owners = shape[0], holders(layout)
        self.rows, self.pixels = self._part.box[0], self._part.box[2:]

    @property
    def own(self) -> Tensor:
        """The output of the local samples, detached; zero rows if the device has no samples."""
        return self.attached.detach()

    @property
    def samples(self) -> float:
        """The number of local samples, a fraction for tiles of images."""
        return self.attached.numel() / math.prod(self._shape[1:])

    def whole(self) -> Tensor:
        """Return the output of the global batch, detached. Every device must call it."""
        everyone = everywhere(self.group.devices)
        return redistribute(self.group, self.own, self._layout, everyone, self._shape).clone()

    def rows_of(self, y: Tensor) -> Tensor:
        """Return the part of `y` for this output; `y` has one row per sample of the global or the local batch."""
        start, stop = self.rows
        if y.dim() and len(y) in (self.batch, stop - start):
            own = y[start:stop] if len(y) == self.batch else y
            return own[(slice(None), *(slice(*span) for span in self._part.spans(own.shape, whole=self._whole)))]
        raise InputError(
            f"a tensor of shape {tuple(y.shape)} for an output of {self.batch} samples, {stop - start} of them on device "
            f"{self.group.device}: give the labels of the global batch, or those of the local samples in their order"
        )

    def __repr__(self) -> str:
        start, stop = self.rows
        return f"OutputPart(samples {start} to {stop} of a batch of {self.batch}, shape {tuple(self.attached.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:  # fmt: skip
        name = getattr(func, "__name__", "a function of torch")
        raise InputError(f"{name} was given an output, but this device has only its local samples: {_REMEDY}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"an output with only local samples has no {name!r}: {_REMEDY}")

    def _refuse(self, *_: object) -> NoReturn:
        raise InputError(f"an operator on an output with only local samples: {_REMEDY}")

    # Python's defaults would be silently wrong here; other operators raise TypeError anyway.
    __bool__ = __eq__ = __ne__ = __len__ = __iter__ = __getitem__ = __array__ = _refuse
    __hash__ = object.__hash__
