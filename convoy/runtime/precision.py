"""Computing in fewer bits: layers multiply in bf16 or fp16, everything else stays in float32.

Each layer rounds its inputs and weights before it computes, and gives its outputs and gradients in float32. So weights,
optimizer state, gradients, their sums over devices and what travels are float32, whatever the plan; each rounding is one that
torch.autocast makes on one device, too.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from convoy.comm.agreement import difference, gather, share_number
from convoy.comm.group import Group
from convoy.errors import InputError, MismatchError, unknown_name
from convoy.model.graph import Graph
from convoy.plan.steps import Part
from convoy.runtime.kernels import Arithmetic, Convolution, FullyConnected, Gradients, widened
from convoy.runtime.module import Distributed

PRECISIONS: Mapping[str, torch.dtype | None] = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What layers compute in; None: in the type that the model has."""


def check_kinds(precision: str, devices: Sequence[str]) -> None:
    """Refuse what these devices cannot compute in, by their names on the command line, before anything starts.

    Raises:
        InputError: unknown precision, or fp16 where one of the devices is a CPU.
    """
    _dtype(precision)
    on_cpu = [name for name in devices if name.startswith("cpu") or (name == "auto" and not torch.cuda.is_available())]
    if precision == "fp16" and on_cpu:
        raise InputError("--precision fp16 on a CPU, which does not gain from it: use bf16, or GPUs only")


def compute_in(model: Distributed, precision: str) -> None:
    """From now on the layers of a model compute in this precision. Every device must call it, with the same.

    Raises:
        InputError: unknown name; fp16 where one of the devices is a CPU; a model that is not float32.
        MismatchError: the devices were given different precisions.
    """
    agree_on_precision(model.group, model.traced[True].graph, precision)
    for executor in model._executors.values():
        executor.lowered_to = _dtype(precision)
        for name, run in executor.arithmetic.items():
            executor.arithmetic[name] = lowered(run, precision, model.group.torch_device.type)


def agree_on_precision(group: Group, graph: Graph, precision: str) -> None:
    """Whether all devices were given this precision, and they and the model can compute in it. Every device must call it.

    Raises:
        InputError, MismatchError: see `compute_in`.
    """
    dtype = _dtype(precision)
    rows = gather(group, "precision", [precision, group.torch_device.type])
    if found := difference([row[0] for row in rows]):
        raise MismatchError(f"the devices compute in different precisions: {found}; give all the same")
    processors = [str(d) for d, row in enumerate(rows) if row[1] == "cpu"]
    if dtype is torch.float16 and processors:
        raise InputError(
            f"precision fp16, but device {', '.join(processors)} is a CPU, and CPUs do not gain from fp16: use bf16, or GPUs "
            "only"
        )
    if dtype is not None:
        _check_float32(graph, precision)


def _dtype(precision: str) -> torch.dtype | None:
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    return PRECISIONS[precision]


def _check_float32(graph: Graph, precision: str) -> None:
    for layer in graph.weighted:
        if layer.dtype != "float32":
            raise InputError(
                f"precision {precision}, but layer {layer.name!r} is {layer.dtype}: mixed precision starts from a float32 "
                "model; use model.float(), or precision float32, which leaves a model as it is"
            )


def lowered(run: Arithmetic, precision: str, device: str) -> Arithmetic:
    """A layer's arithmetic in this precision, on this kind of device.

    Raises:
        InputError: unknown name.
    """
    dtype = _dtype(precision)
    if dtype is None:
        return run
    if isinstance(run, Convolution | FullyConnected):
        return _Rounded(run, dtype)
    return _Autocast(run, dtype, device)


class _Rounded:
    """A convolution or a fully connected layer. It calls torch's backward kernels itself, which autocast does not see."""

    def __init__(self, run: Convolution | FullyConnected, dtype: torch.dtype) -> None:
        self.run, self.dtype = run, dtype

    def forward(self, inputs: Sequence[Tensor], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:
        y, saved = self._run().forward([x.to(self.dtype) for x in inputs], batch, keep, wants)
        return y.float(), saved

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all") -> Gradients:
        inputs, own = self._run().backward(saved.to(self.dtype), g.to(self.dtype), wants, part)
        return [_float(x) for x in inputs], {key: _float(w) for key, w in own.items()}

    def _run(self) -> Arithmetic:
        """The same on rounded weights, which are made anew: the weights change with every step."""
        run, module = copy.copy(self.run), copy.copy(self.run.module)
        module._parameters = {
            name: None if p is None else nn.Parameter(p.detach().to(self.dtype), p.requires_grad)
            for name, p in module._parameters.items()
        }
        run.module = module
        return run


class _Autocast:
    """Any other layer: autocast decides what in it is safe to compute in fewer bits."""

    def __init__(self, run: Arithmetic, dtype: torch.dtype, device: str) -> None:
        self.run, self.dtype, self.device = run, dtype, device

    def forward(self, inputs: Sequence[Any], batch: int, keep: bool, wants: Sequence[bool]) -> tuple[Any, Any]:
        with torch.autocast(self.device, self.dtype):
            y, saved = self.run.forward(inputs, batch, keep, wants)
        return widened(y, self.dtype), saved

    def backward(self, saved: Any, g: Any, wants: Sequence[bool], part: Part = "all") -> Gradients:
        return self.run.backward(saved, g, wants, part)


def _float(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.float()


class UnderAutocast(nn.Module):
    """An ordinary model that computes in a precision as torch itself does it: what a distributed one is compared with.

    Raises:
        InputError: unknown name.
    """

    def __init__(self, model: nn.Module, precision: str, device: str = "cpu") -> None:
        super().__init__()
        self.module, self.dtype, self.device = model, _dtype(precision), device

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(self.device, self.dtype, enabled=self.dtype is not None):
            return widened(self.module(x), self.dtype)


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, for fp16: gradients too large for fp16 on one device count on all of them.

    torch's own looks at the pieces on its device: one device would leave out a step that the others make. It is used in the
    same way. Every device has one, and calls it at the same places.

    Args:
        model: a distributed model, or an ordinary one.
        options: those of torch.amp.GradScaler.

    Attributes:
        skips: whether the gradients that were unscaled last were too large, so that the step is left out.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.group = model.group if isinstance(model, Distributed) else None
        super().__init__(next(iter(model.parameters())).device.type, **options)
        self.skips = False

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        found = float(sum(each.item() for each in state["found_inf_per_device"].values()))
        if self.group is not None:
            found = max(share_number(self.group, found))
        assert self._scale is not None
        # Also where this device has no gradients at all, and torch would find nothing to check.
        state["found_inf_per_device"] = {self._scale.device: torch.tensor(found, device=self._scale.device)}
        self.skips = found > 0
