"""What a model returns: tensors of the whole batch, or an OutputPart, which is not a tensor, and never taken for the whole."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from convoy.comm.collectives import gather
from convoy.comm.group import Group
from convoy.errors import InputError
from convoy.layout.layout import Layout, Replicated, Shape, box, everywhere
from convoy.model.graph import Graph
from convoy.runtime.exchange import redistribute
from convoy.runtime.inputs import mark_whole
from convoy.runtime.program import Program

_REMEDY = (
    "convoy.loss(criterion)(output, y) is the loss of the whole batch, output.whole() the outputs of the whole batch on every "
    'device, output.own those of this device\'s samples; a plan with outputs "everywhere" returns tensors'
)


class Outputs:
    """Makes what the caller gets of the outputs that a program computed."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._types: dict[tuple[bool, torch.dtype], list[torch.dtype]] = {}

    def as_autocast(
        self, outputs: Sequence[Tensor], program: Program, training: bool, autocast: torch.dtype
    ) -> Sequence[Tensor]:
        """Outputs in the types that torch.autocast gives them, as a device tells that computed them: alike everywhere."""
        key = (training, autocast)
        if key not in self._types:
            natural = [str(program.natural.get(v.layer, "")) for v in program.steps.outputs]
            rows = gather(self._group, "autocast", natural)
            told = [next((row[i] for row in rows if row[i]), "torch.float32") for i in range(len(natural))]
            self._types[key] = [getattr(torch, name.removeprefix("torch.")) for name in told]
        return [y.to(dtype) for y, dtype in zip(outputs, self._types[key], strict=True)]

    def returned(self, outputs: Sequence[Tensor], program: Program, graph: Graph) -> list[Any]:
        """Outputs that every device has, marked as whole; and the parts of those that stay with their samples."""
        returned: list[Any] = []
        for value, y in zip(program.steps.outputs, outputs, strict=True):
            if not isinstance(value.layout, Replicated):
                returned.append(OutputPart(y, value.layout, value.shape, self._group))
                continue
            if graph[value.layer].batched:
                mark_whole(y)
            returned.append(y)
        return returned


class OutputPart:
    """One output of a distributed model whose plan has `outputs="where-computed"`: that of this device's samples.

    It is given to :func:`convoy.loss`. Whatever would take it for a tensor is refused: its mean would be that of a part.

    Args:
        tensor: of this device's samples, with the graph of autograd behind it.
        layout: of the whole output over the devices; `shape`: of the whole output.

    Attributes:
        batch: samples in the whole batch.
        rows: this device's samples, from and to, counted in the whole batch.
    """

    def __init__(self, tensor: Tensor, layout: Layout, shape: Shape, group: Group) -> None:
        self._tensor, self._layout, self._shape, self.group = tensor, layout, shape, group
        self.batch, self.rows = shape[0], rows_of(layout, shape, group.device)

    @property
    def own(self) -> Tensor:
        """The output of this device's samples. No gradient goes through it. Zero rows where the device has no samples."""
        return self._tensor.detach()

    @property
    def attached(self) -> Tensor:
        """As `own`, with its gradient: for a loss whose parts are added over the devices, and for nothing else."""
        return self._tensor

    def whole(self) -> Tensor:
        """The output of the whole batch. No gradient goes through it. Every device must call it."""
        everyone = everywhere(self.group.devices)
        return redistribute(self.group, self.own, self._layout, everyone, self._shape).clone()

    def rows_of(self, y: Tensor) -> Tensor:
        """This device's samples of a tensor: of the whole batch, or of this device's part of it already.

        Raises:
            InputError: it has another number of samples.
        """
        start, stop = self.rows
        if y.dim() and len(y) == self.batch:
            return y[start:stop]
        if y.dim() and len(y) == stop - start:
            return y
        raise InputError(
            f"a tensor of shape {tuple(y.shape)} beside an output of {self.batch} samples, of which {stop - start} are on "
            f"device {self.group.device}: give the labels of the whole batch, or those of this device's samples in their order"
        )

    def __repr__(self) -> str:
        start, stop = self.rows
        return f"OutputPart(samples {start} to {stop} of a batch of {self.batch}, shape {tuple(self._tensor.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:  # fmt: skip
        """Refuses every function of torch: its result would be that of a part of the batch."""
        name = getattr(func, "__name__", "a function of torch")
        raise InputError(f"{name} was given an output that is here in part: {_REMEDY}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"an output that is here in part has no {name!r}: {_REMEDY}")


def rows_of(layout: Layout, shape: Shape, device: int) -> tuple[int, int]:
    """A device's samples of a value, from and to."""
    here = box(layout, device, shape)
    return here[0] if here is not None else (0, 0)


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise InputError(f"{name} of an output that is here in part: {_REMEDY}")

    return refuse


_TWO = (
    "add", "sub", "mul", "truediv", "floordiv", "matmul", "pow", "mod", "and", "or", "xor", "iadd", "isub", "imul", "itruediv",
)  # fmt: skip
_ONE = ("neg", "abs", "invert", "len", "iter", "float", "int", "bool", "array")
_PAIRS = ("lt", "le", "gt", "ge", "eq", "ne", "getitem", "contains", *_TWO, *(f"r{n}" for n in _TWO if n[0] != "i"))
for _name in (*_ONE, *_PAIRS):
    setattr(OutputPart, f"__{_name}__", _refusing(_name))
OutputPart.__hash__ = object.__hash__  # type: ignore[method-assign]
