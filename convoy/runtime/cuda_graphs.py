"""Replay regions of layers as CUDA graphs: `cuda_graphs=True`. The host launches one graph instead of each kernel.

A region is a run of consecutive layers in one segment (`convoy.plan.compile`). It ends where backward starts a gradient sum,
which a graph would delay, and at every layer that is not a plain torch call (random numbers, user code, hooks) or frees its
weights after use. Forward and backward of a region are two graphs. They run the same kernels as the layers.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from convoy.errors import InputError, shortened
from convoy.model.graph import Layer
from convoy.model.operation import Operation, Ref, TracedModel, arguments
from convoy.model.tracing.copies import hooked
from convoy.plan.device_program import Compute, Fused, Pack
from convoy.runtime.program import Program

WARM_UP = 3
"""Runs of a region before it is captured: a batch size that occurs once per epoch is not worth it."""

MOST_GRAPHS = 64
"""Most regions that are captured per model and device: each keeps the memory of its activations."""

KINDS = ("conv", "conv_transpose", "linear", "filters", "batch_norm", "elementwise", "pool", "flatten", "parts", "join")
"""Kinds of layers that are captured."""

TOLERANCE: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Allowed difference from the layers, relative to the largest entry: a library may choose another kernel during capture.
Other dtypes: 0.1."""

Key = tuple[torch.dtype | None, bool]
"""Dtype of the layers' arithmetic (None: their own), and whether backward follows."""

Regions = Mapping[tuple[int, int], "GraphRegion"]
"""Regions by segment number and index of their first layer."""

_Place = tuple[dict[str, Any], str]
"""A parameter or buffer: the module's dict that holds it, and its name there."""


@dataclass
class CudaGraphs:
    """The CUDA graphs of one model on this device.

    Attributes:
        waits: capture nothing now, because Convoy is trying plans.
        captured: number of regions captured.
        refused: why the last refused region is not captured; "" if none was.
    """

    waits: bool = False
    captured: int = 0
    refused: str = ""

    def regions(self, program: Program, traced: TracedModel, model: nn.Module, key: Key) -> Regions:
        """Return the regions of a program."""
        if key not in program.regions:
            program.regions[key] = regions_of(self, program, traced, model, key)
        found: Regions = program.regions[key]
        return found

    def summary(self) -> str:
        line = f"CUDA graphs: {self.captured} regions of layers"
        return f"{line}; {self.refused}" if self.refused else line


@dataclass(slots=True)
class GraphRegion:
    """Consecutive layers of a segment that run as one graph.

    Attributes:
        stop: index, within the segment, of the first layer after the region.
        reads, writes: names of its inputs, and of its outputs that later layers use.
        plain: the layers, as a torch.fx graph on this device's modules.
        key: dtype of the layers' arithmetic, and whether backward follows.
        runs: number of runs without a graph; negative: the region is not captured.
    """

    graphs: CudaGraphs
    stop: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    plain: fx.GraphModule
    key: Key
    runs: int = 0
    graph: "CapturedGraph | None" = None

    def run(self, values: dict[str, Any]) -> int:
        """Replay the graph, if there is one for these inputs. Return the index of the next layer to compute."""
        inputs = [values[name] for name in self.reads]
        if self.graph is None and self.runs >= 0 and not self.graphs.waits:
            self.runs += 1
            if self.runs > WARM_UP:
                self._capture(inputs)
        if self.graph is None or not self.graph.fits(inputs):
            return 0
        values.update(zip(self.writes, self.graph.replay(inputs), strict=True))
        return self.stop

    def _capture(self, inputs: Sequence[Tensor]) -> None:
        self.runs = -1
        if self.graphs.captured >= MOST_GRAPHS:
            return
        try:
            self.graph = CapturedGraph(self.plain, inputs, *self.key)
            self.graphs.captured += 1
        except (RuntimeError, InputError) as error:
            self.graphs.refused = shortened(next(iter(str(error).strip().splitlines()), type(error).__name__))
            warnings.warn(f"CUDA graph: {self.graphs.refused}. These layers run without it", stacklevel=2)


class CapturedGraph:
    """A captured region: kernels that read and write fixed memory.

    Args:
        inputs: values to capture with.
        precision: dtype of the layers' arithmetic; None: their own.
        keep: also capture backward.

    Raises:
        RuntimeError: CUDA cannot capture the layers, or has too little memory.
        InputError: the graph computes other values than the layers.
    """

    def __init__(
        self, plain: fx.GraphModule, inputs: Sequence[Tensor], precision: torch.dtype | None, keep: bool
    ) -> None:
        modules = [*plain.modules()]
        own = {id(p): (m._parameters, name) for m in modules for name, p in m._parameters.items() if p is not None}
        self._weights: Sequence[_Place] = [*own.values()]
        buffers = [(m._buffers, name) for m in modules for name, b in m._buffers.items() if b is not None]
        self._fixed = [(holder, name, holder[name].data_ptr()) for holder, name in (*self._weights, *buffers)]
        self._inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        # Aliases of the parameters: hooks that users registered must not run during capture.
        weights = [holder[name].detach().requires_grad_(holder[name].requires_grad) for holder, name in self._weights]
        self.wants = [keep and x.requires_grad for x in (*self._inputs, *weights)]
        sources = [x for x, wanted in zip((*self._inputs, *weights), self.wants, strict=True) if wanted]
        made: list[Tensor] = []

        def forward() -> list[Tensor]:
            # Without its cache, because autocast would reuse a weight that was cast outside of the graph.
            device = self._inputs[0].device.type
            cast = torch.autocast(device, precision or torch.bfloat16, precision is not None, cache_enabled=False)
            with _in_place(self._weights, weights), torch.set_grad_enabled(keep), cast:
                made[:] = plain(*self._inputs)
            return [y.detach() for y in made]

        def backward() -> list[Tensor | None]:
            graded = [y for y in made if y.requires_grad]
            return [*torch.autograd.grad(graded, sources, self._given, allow_unused=True)]

        with _restored(buffers):
            wanted: list[Tensor | None] = [y.clone() for y in forward()]
            self.graded = [y.requires_grad for y in made]
            self._given = [y.detach().clone() for y in made if y.requires_grad]
            wanted += backward() if sources and self._given else []
            record = recorder()
            self._forward, self._outputs = record(forward)
            self._gradients: Sequence[Tensor | None] = ()
            if sources and self._given:
                self._backward, self._gradients = record(backward)
            made.clear()  # and autograd's graph
            self._forward()
            if self._gradients:
                self._backward()
            _check_same_numbers([*self._outputs, *self._gradients], wanted)
        self._pending: weakref.ref[Any] | None = None

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether a replay is right: same shapes, same memory of the weights, and no backward to come."""
        pairs = zip(inputs, self._inputs, strict=True)
        return (
            (self._pending is None or self._pending() is None)
            and all(x.shape == own.shape and x.requires_grad == own.requires_grad for x, own in pairs)
            and all(holder[name].data_ptr() == address for holder, name, address in self._fixed)
        )

    def replay(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self._gradients:
            return self.run_forward(inputs)
        return _Replay.apply(self, *inputs, *(holder[name] for holder, name in self._weights))  # type: ignore[no-any-return, no-untyped-call]

    def run_forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for own, x in zip(self._inputs, inputs, strict=False):
            own.copy_(x)
        self._forward()
        return tuple(y.clone() for y in self._outputs)  # the next replay overwrites them

    def begin(self, node: "_BackwardToCome") -> None:
        """Refuse replays, which overwrite saved activations, until `node` is deleted."""
        self._pending = weakref.ref(node)

    def run_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs and parameters marked in `wants`; None: the outputs do not depend on it."""
        graded = [g for g, wanted in zip(gradients, self.graded, strict=True) if wanted]
        for own, g in zip(self._given, graded, strict=True):
            own.zero_() if g is None else own.copy_(g)
        self._backward()
        copies = iter(torch._foreach_mul([g for g in self._gradients if g is not None], 1.0))
        found = iter([g if g is None else next(copies) for g in self._gradients])
        return [next(found) if wanted else None for wanted in self.wants]


class _BackwardToCome:
    """A mark on an autograd node, deleted when its backward runs."""


class _Replay(torch.autograd.Function):
    """A region in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, graph: CapturedGraph, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.graph, ctx.pending = graph, _BackwardToCome()
        graph.begin(ctx.pending)
        ctx.set_materialize_grads(False)
        outputs = graph.run_forward(sources)
        ctx.mark_non_differentiable(*(y for y, graded in zip(outputs, graph.graded, strict=True) if not graded))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.graph.run_backward(gradients)
        del ctx.pending
        return None, *found


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def recorder() -> Callable[[Callable[[], list[Any]]], tuple[Callable[[], None], list[Any]]]:
    """Return a function that captures work, and returns a function that repeats it and its results, in fixed memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
        graph = torch.cuda.CUDAGraph()
        # "thread_local", because the threads of the loader and of messages call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = work()
        return graph.replay, results

    return record


@contextmanager
def _in_place(places: Sequence[_Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    before = [holder[name] for holder, name in places]
    try:
        for (holder, name), tensor in zip(places, tensors, strict=True):
            holder[name] = tensor
        yield
    finally:
        for (holder, name), tensor in zip(places, before, strict=True):
            holder[name] = tensor


@contextmanager
def _restored(places: Sequence[_Place]) -> Iterator[None]:
    """Restore the values of buffers after the block: running statistics count training batches only."""
    before = [holder[name].clone() for holder, name in places]
    try:
        yield
    finally:
        with torch.no_grad():
            for (holder, name), value in zip(places, before, strict=True):
                holder[name].copy_(value)


def _check_same_numbers(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    """Raise InputError if the results of a graph differ from those of its layers."""
    for a, b in zip(found, wanted, strict=True):
        if a is None or b is None or not a.numel():
            continue
        limit = TOLERANCE.get(b.dtype, 0.1) * float(b.abs().amax())
        if not torch.allclose(a, b, rtol=0.0, atol=limit + 1e-12, equal_nan=True):
            raise InputError("the CUDA graph computed other values than the layers")


# --- regions ---------------------------------------------------------------------------------------------------------


def regions_of(graphs: CudaGraphs, program: Program, traced: TracedModel, model: nn.Module, key: Key) -> Regions:
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
        for start, region in _regions_in(fused, starts, traced, model, program, graphs, key)
    }


def _regions_in(
    fused: Fused,
    starts: set[str],
    traced: TracedModel,
    model: nn.Module,
    program: Program,
    graphs: CudaGraphs,
    key: Key,
) -> Iterator[tuple[int, GraphRegion]]:
    whole = program.fused[fused.number].whole
    computed = [op for op in fused.operations if isinstance(op, Compute)]

    def usable(op: Compute) -> bool:
        layer = traced.graph[op.layer]
        # Weights that are freed after use have no fixed memory.
        freed = any(p.key in program.freed for p in layer.parameters.values())
        return not freed and is_plain_call(layer, traced.operations[op.layer], model, whole=op.layer in whole)

    start = 0
    while start < len(computed):
        stop = start
        while stop < len(computed) and usable(computed[stop]):
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
            yield start, GraphRegion(graphs, stop, reads, writes, fx.GraphModule(model, graph), key)
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
