"""Compile regions of layers with torch.compile: `compile=True`.

A region is a run of consecutive layers in one segment (`convoy.plan.compile`). It ends where backward starts a gradient sum,
which a compiled function would delay, and at every layer that is not a plain torch call (random numbers, user code, hooks) or
frees its weights after use. All devices compile at the same step. A compiled region runs only if its results match its layers'.
"""

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from convoy.comm.control_messages import gather
from convoy.comm.group import Group
from convoy.errors import InputError, shortened
from convoy.model.graph import Layer
from convoy.model.operation import Operation, Ref, TracedModel, arguments
from convoy.model.tracing.copies import hooked
from convoy.plan.device_program import Compute, Fused, Pack
from convoy.runtime.kernels import under_autocast
from convoy.runtime.program import Program

BACKEND = "inductor"

WARM_UP = 3
"""Runs of a program before its regions are compiled: a batch size that occurs once per epoch is not worth compiling."""

MOST_PROGRAMS = 8
"""Most programs that are compiled per model and device, over all batch sizes, modes and reshards."""

KINDS = ("conv", "conv_transpose", "linear", "filters", "batch_norm", "elementwise", "pool", "flatten", "parts", "join")
"""Kinds of layers that are compiled."""

LONGEST = 24  # layers in a region

MOST_S = 600.0
"""Least message timeout while devices compile: a compiling device does not answer."""

TOLERANCE: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Allowed difference from the layers, relative to the largest entry, because sums run in another order. Other dtypes: 0.1."""

_COMPILE_LOCK = threading.Lock()
"""Devices may be threads of one process, and torch compiles for one of them at a time."""


@dataclass(slots=True)
class CompiledRegion:
    """Consecutive layers of a segment that are compiled as one function.

    Attributes:
        stop: index, within the segment, of the first layer after the region.
        reads, writes: names of its inputs, and of its outputs that later layers use.
        plain: the uncompiled layers, as a torch.fx graph on this device's modules.
        seen: inputs of the last run, as meta tensors.
        function: the compiled function; None: run the layers.
    """

    stop: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    plain: fx.GraphModule
    seen: tuple[Tensor, ...] = ()
    function: Callable[..., tuple[Tensor, ...]] | None = None

    def run(self, own: dict[str, Any]) -> int:
        """Compute the outputs if compiled. Return the index of the next layer to compute."""
        inputs = [own[name] for name in self.reads]
        if self.function is None:
            self.seen = tuple(torch.empty_like(x, device="meta", requires_grad=x.requires_grad) for x in inputs)
            return 0
        own.update(zip(self.writes, self.function(*inputs), strict=True))
        return self.stop


Regions = Mapping[tuple[int, int], CompiledRegion]
"""Regions by segment number and index of their first layer."""


@dataclass
class Compiler:
    """A compiler of one model's regions on this device.

    Attributes:
        left: number of programs that may still be compiled.
        waits: compile nothing now, because Convoy is trying plans.
        tried, used: number of regions compiled, and number whose results matched.
        refused: why the last refused region is not used; "" if none was.
    """

    group: Group
    left: int = MOST_PROGRAMS
    waits: bool = False
    tried: int = 0
    used: int = 0
    refused: str = ""

    def regions(
        self, program: Program, traced: TracedModel, model: nn.Module, key: tuple[torch.dtype | None, bool]
    ) -> Regions:
        """Return the regions of a program; compile them at the first call after the warm-up. Every device must call it.

        Args:
            key: dtype of the layers' arithmetic, and whether backward follows.
        """
        if key not in program.compiled:
            program.compiled[key] = (regions_of(program, traced, model) if self.left else {}, 0)
        regions, calls = program.compiled[key]
        calls += not self.waits
        program.compiled[key] = (regions, calls)
        if calls == WARM_UP + 1 and self.left and not self.waits:
            self.left -= 1
            waiting = [region for region in regions.values() if region.seen]
            usual_s, self.group.timeout_s = self.group.timeout_s, max(self.group.timeout_s, MOST_S)
            try:
                while any(gather(self.group, "regions to compile", len(waiting))):
                    if waiting:
                        self._compile(waiting.pop(), *key)
            finally:
                self.group.timeout_s = usual_s
        return regions  # type: ignore[no-any-return]

    def summary(self) -> str:
        line = f"torch.compile: {self.used} of {self.tried} regions of layers run compiled"
        return f"{line}; {self.refused}" if self.refused else line

    def _compile(self, region: CompiledRegion, precision: torch.dtype | None, keep: bool) -> None:
        """Compile a region. Use it if its outputs and gradients match the layers' for random inputs."""
        self.tried += 1
        device = self.group.torch_device
        generator = torch.Generator().manual_seed(0)  # the global generator's state belongs to the training
        inputs = [torch.empty_like(x, device=device, requires_grad=False) for x in region.seen]
        for x, like in zip(inputs, region.seen, strict=True):
            random = torch.randn(x.shape, generator=generator) if x.is_floating_point() else torch.zeros(())
            x.copy_(random).requires_grad_(like.requires_grad)
        sources = [x for x in (*inputs, *region.plain.parameters()) if x.requires_grad]
        statistics = [(buffer, buffer.clone()) for buffer in region.plain.buffers()]

        def run(function: Callable[..., Sequence[Tensor]]) -> list[Tensor | None]:
            outputs = [*function(*inputs)]
            graded = [y for y in outputs if y.requires_grad]
            given = [y.detach() for y in graded]
            found = torch.autograd.grad(graded, sources, given, allow_unused=True) if graded and sources else ()
            return [*outputs, *found]

        try:
            with _COMPILE_LOCK, torch.set_grad_enabled(keep), under_autocast(precision, device.type):
                function = compiled_by_torch(region.plain)
                _check_same_numbers(run(function), run(region.plain))
        except Exception as error:
            self.refused = shortened(next(iter(str(error).strip().splitlines()), type(error).__name__))
            warnings.warn(f"torch.compile: {self.refused}. These layers run uncompiled", stacklevel=2)
            return
        finally:
            with torch.no_grad():
                for buffer, value in statistics:
                    buffer.copy_(value)
        self.used += 1
        region.function = function


def compiled_by_torch(module: nn.Module) -> Callable[..., Any]:
    # Compile in this process, because torch's helper processes would outlive the training.
    config: Any = importlib.import_module("torch._inductor.config")
    config.compile_threads = 1
    return torch.compile(module, backend=BACKEND, dynamic=False)


def _check_same_numbers(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    """Raise InputError if the results of a compiled region differ from those of its layers."""
    for a, b in zip(found, wanted, strict=True):
        a, b = (torch.zeros(()) if x is None else x.detach() for x in (a, b))
        limit = TOLERANCE.get(b.dtype, 0.1) * float(b.abs().amax()) if b.numel() and b.is_floating_point() else 0.0
        if a.numel() and not torch.allclose(a, b.to(a.device), rtol=0.0, atol=limit + 1e-12, equal_nan=True):
            raise InputError("torch.compile computed other values than the layers")


# --- regions ---------------------------------------------------------------------------------------------------------


def regions_of(program: Program, traced: TracedModel, model: nn.Module) -> Regions:
    """Return the regions (two layers or more) of all segments of a program."""
    starts: set[str] = set()  # backward starts an all-reduce after these layers
    for fused in program.program.backward:
        layer = ""
        for operation in fused.operations if isinstance(fused, Fused) else ():
            if isinstance(operation, Compute):
                layer = operation.layer
            elif isinstance(operation, Pack):
                starts.add(layer)
    return {
        (fused.number, start): region
        for fused in program.program.forward
        if isinstance(fused, Fused)
        for start, region in _regions_in(fused, starts, traced, model, program)
    }


def _regions_in(
    fused: Fused, starts: set[str], traced: TracedModel, model: nn.Module, program: Program
) -> Iterator[tuple[int, CompiledRegion]]:
    whole = program.fused[fused.number].whole
    computed = [op for op in fused.operations if isinstance(op, Compute)]

    def usable(op: Compute) -> bool:
        layer = traced.graph[op.layer]
        # Weights that are freed after use do not exist during a trial.
        freed = any(p.key in program.freed for p in layer.parameters.values())
        return not freed and is_plain_call(layer, traced.operations[op.layer], model, whole=op.layer in whole)

    start = 0
    while start < len(computed):
        stop = start
        while stop < min(len(computed), start + LONGEST) and usable(computed[stop]):
            stop += 1
            if stop < len(computed) and computed[stop].layer in starts:
                break
        if stop - start > 1:
            ops = computed[start:stop]
            inside = {op.writes[0] for op in ops}
            reads = tuple(dict.fromkeys(name for op in ops for name in op.reads if name not in inside))
            graph = fx.Graph()
            values = {name: graph.placeholder(f"x{i}") for i, name in enumerate(reads)}
            for op in ops:
                operation = traced.operations[op.layer]
                args, kwargs = arguments(operation, [values[name] for name in op.reads], op.size.samples, model)
                call: Any = graph.call_module if operation.call == "module" else graph.call_function
                values[op.writes[0]] = call(operation.target, args, kwargs)
            used = {*fused.writes}.union(*(op.reads for op in computed[stop:]))
            writes = tuple(op.writes[0] for op in ops if op.writes[0] in used)
            graph.output(tuple(values[name] for name in writes))
            yield start, CompiledRegion(stop, reads, writes, fx.GraphModule(model, graph))
        start = max(stop, start + 1)


def is_plain_call(layer: Layer, operation: Operation, model: nn.Module, *, whole: bool) -> bool:
    """Return whether a layer is one torch call without side effects. `whole`: this device has all its parameters."""
    odd = layer.random or layer.several or layer.everywhere or layer.no_gradient_to or operation.attributes
    keeps_state = layer.changes_state and layer.kind != "batch_norm"
    if odd or keeps_state or layer.kind not in KINDS or not layer.differentiable:
        return False
    constants = [*operation.args, *operation.kwargs.values()]
    if operation.kwargs.get("inplace") or not all(isinstance(x, Ref | int | float | str | None) for x in constants):
        return False
    if operation.call == "module":
        module = model.get_submodule(str(operation.target))
        bias = getattr(module, "bias", None)
        # A device may hold some of a convolution's groups; when devices sum partial outputs, one of them adds the bias.
        sharded = not whole and layer.multiplies and (layer.groups > 1 or (bias is not None and not bias.numel()))
        return type(module).__module__.startswith("torch.nn.modules.") and not sharded and not hooked(module)
    name = getattr(operation.target, "__name__", "_")
    return operation.call == "function" and not name.startswith("i") and not name.endswith("_")
