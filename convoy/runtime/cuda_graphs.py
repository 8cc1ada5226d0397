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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from convoy.errors import InputError, shortened
from convoy.model.graph import Layer
from convoy.model.operation import Operation, Ref
from convoy.model.tracing.copies import hooked
from convoy.plan.device_program import Compute, Fused, Pack
from convoy.runtime.program import LayerCall, Program

if TYPE_CHECKING:
    from convoy.runtime.executor import Executor

WARM_UP = 3  # runs of a region before it is captured: a batch size that occurs once per epoch is not worth it

MOST_GRAPHS = 64  # per model and device: each keeps the memory of its activations

KINDS = ("conv", "conv_transpose", "linear", "filters", "batch_norm", "elementwise", "pool", "flatten", "parts", "join")
"""Kinds of layers that are captured."""

TOLERANCE: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Allowed difference from the layers, relative to the largest entry: libraries may choose another kernel. Others: 0.1."""

Key = tuple[torch.dtype | None, bool]
"""Dtype of the layers' arithmetic (None: their own), and whether backward follows."""

Regions = Mapping[tuple[int, int], "GraphRegion"]
"""Regions by segment number and index of their first layer."""

_Place = tuple[dict[str, Any], str]  # of a parameter or buffer: the module's dict that holds it, and its name


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

    def summary(self) -> str:
        line = f"CUDA graphs: {self.captured} regions of layers"
        return f"{line}; {self.refused}" if self.refused else line


@dataclass(slots=True)
class GraphRegion:
    """Consecutive layers of a segment that run as one graph.

    Attributes:
        layers, modules: the layers, and their modules.
        reads, writes: names of its inputs, and of its outputs that later layers use.
        key: dtype of the layers' arithmetic, and whether backward follows.
        runs: number of runs without a graph; negative: the region is not captured.
    """

    layers: Sequence[LayerCall]
    modules: Sequence[nn.Module]
    reads: Sequence[str]
    writes: Sequence[str]
    key: Key
    runs: int = 0
    graph: "CapturedGraph | None" = None

    def run(self, values: dict[str, Any], graphs: CudaGraphs) -> int:
        """Replay the graph, if there is one for these inputs. Return the number of layers that this has computed."""
        inputs = [values[name] for name in self.reads]
        if self.graph is None and self.runs >= 0 and not graphs.waits:
            self.runs += 1
            if self.runs > WARM_UP:
                self.runs = -1
                if graphs.captured < MOST_GRAPHS:
                    self._capture(inputs, graphs)
        if self.graph is None or not self.graph.fits(inputs):
            return 0
        values.update(zip(self.writes, self.graph.replay(inputs), strict=True))
        return len(self.layers)

    def _capture(self, inputs: Sequence[Tensor], graphs: CudaGraphs) -> None:
        try:
            with torch.inference_mode(False):  # the graph's memory is also used outside of inference mode
                self.graph = CapturedGraph(self, inputs)
            graphs.captured += 1
        except (RuntimeError, InputError) as error:
            graphs.refused = shortened(next(iter(str(error).strip().splitlines()), type(error).__name__))
            warnings.warn(f"CUDA graph: {graphs.refused}. These layers run without it", stacklevel=2)

    def compute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Compute the layers one by one."""
        values = dict(zip(self.reads, inputs, strict=True))
        for layer in self.layers:
            values[layer.write] = layer.call([values[name] for name in layer.reads], layer.samples)
            for name in layer.drops:
                values.pop(name, None)
        return [values[name] for name in self.writes]


class CapturedGraph:
    """A captured region: kernels that read and write fixed memory.

    Raises:
        RuntimeError: CUDA cannot capture the layers, or has too little memory.
        InputError: the graph computes other values than the layers.
    """

    def __init__(self, region: GraphRegion, inputs: Sequence[Tensor]) -> None:
        precision, keep = region.key
        held: list[_Place] = [
            (m._parameters, n) for m in region.modules for n, p in m._parameters.items() if p is not None
        ]
        buffers: list[_Place] = [
            (m._buffers, n) for m in region.modules for n, b in m._buffers.items() if b is not None
        ]
        self._fixed, self._memory = [*held, *buffers], [holder[name].data_ptr() for holder, name in (*held, *buffers)]
        self._attributes = [(vars(m), dict(vars(m))) for m in region.modules]
        self._expected = [(x.shape, x.dtype, x.requires_grad) for x in inputs]
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        self._inputs = [x.detach() for x in leaves]
        # Aliases of the parameters: hooks that users registered must not run during capture. Tied parameters have one alias.
        self._weights = [*{id(holder[name]): (holder, name) for holder, name in held}.values()]
        aliases = {id(h[n]): h[n].detach().requires_grad_(h[n].requires_grad) for h, n in self._weights}
        # Kept, so that no other tensor gets their memory.
        self._kept = [*aliases.values(), *(holder[name] for holder, name in buffers)]
        self.wants = [keep and x.requires_grad for x in (*leaves, *aliases.values())]
        sources = [x for x, wanted in zip((*leaves, *aliases.values()), self.wants, strict=True) if wanted]
        made: list[Tensor] = []

        def forward() -> list[Tensor]:
            # Without its cache, because autocast would reuse a weight that was cast outside of the graph.
            device = leaves[0].device.type
            cast = torch.autocast(device, precision or torch.bfloat16, precision is not None, cache_enabled=False)
            with _replaced(held, aliases), torch.set_grad_enabled(keep), cast:
                made[:] = region.compute(leaves)
            return [y.detach() for y in made]

        def backward() -> list[Tensor | None]:
            graded = [y for y in made if y.requires_grad]
            return [*torch.autograd.grad(graded, sources, self._given, allow_unused=True)]

        with _restored([holder[name] for holder, name in buffers]):
            wanted: list[Tensor | None] = [y.clone() for y in forward()]
            self.graded = [y.requires_grad for y in made]
            self._given = [y.detach().clone() for y in made if y.requires_grad]
            wanted += backward() if sources and self._given else []
            made.clear()  # autograd's nodes of the weights must be made during the capture, on its stream
            record = recorder()
            self._forward, self._outputs = record(forward)
            self._gradients: Sequence[Tensor | None] = ()
            if sources and self._given:
                self._backward, self._gradients = record(backward)
            made.clear()  # and autograd's graph
            self._forward()
            if self._gradients:
                self._backward()
            for a, b in zip((*self._outputs, *self._gradients), wanted, strict=True):
                if a is not None and b is not None and b.numel():
                    limit = TOLERANCE.get(b.dtype, 0.1) * float(b.abs().amax()) + 1e-12
                    if not torch.allclose(a, b, rtol=0.0, atol=limit, equal_nan=True):
                        raise InputError("the CUDA graph computed other values than the layers")
        self._versions: list[tuple[int, int]] = []
        self.pending: weakref.ref[Any] | None = None
        """The autograd node of a replay whose backward has not run. Another replay would overwrite its activations."""

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Return whether a replay is right: same inputs' form, weights' memory and attributes, and no backward to come."""
        return (
            (self.pending is None or self.pending() is None)
            and [(x.shape, x.dtype, x.requires_grad) for x in inputs] == self._expected
            and [holder[name].data_ptr() for holder, name in self._fixed] == self._memory
            and all(now == before for now, before in self._attributes)
        )

    def replay(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        if not self._gradients:
            return self.run_forward(inputs)
        weights = [holder[name] for holder, name in self._weights]
        self._versions = [(p.data_ptr(), p._version) for p in weights]
        return _Replay.apply(self, *inputs, *weights)  # type: ignore[no-any-return, no-untyped-call]

    def run_forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for own, x in zip(self._inputs, inputs, strict=False):
            own.copy_(x)
        self._forward()
        return tuple(y.clone() for y in self._outputs)  # the next replay overwrites them

    def run_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs and parameters marked in `wants`; None: the outputs do not depend on it."""
        if [(holder[name].data_ptr(), holder[name]._version) for holder, name in self._weights] != self._versions:
            raise InputError(
                "weights in a CUDA graph changed between forward and backward, which would use the new values: change them "
                "(optimizer.step(), load_state_dict()) after backward"
            )
        graded = [g for g, wanted in zip(gradients, self.graded, strict=True) if wanted]
        for own, g in zip(self._given, graded, strict=True):
            own.zero_() if g is None else own.copy_(g)
        self._backward()
        self.pending = None
        copies = iter(torch._foreach_mul([g for g in self._gradients if g is not None], 1.0))
        found = iter([g if g is None else next(copies) for g in self._gradients])
        return [next(found) if wanted else None for wanted in self.wants]


class _Replay(torch.autograd.Function):
    """A region in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, graph: CapturedGraph, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.graph, graph.pending = graph, weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        outputs = graph.run_forward(sources)
        ctx.mark_non_differentiable(*(y for y, graded in zip(outputs, graph.graded, strict=True) if not graded))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.graph.pending != weakref.ref(ctx):
            raise InputError("a second backward of one forward (retain_graph=True): leave out cuda_graphs")
        return None, *ctx.graph.run_backward(gradients)


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def recorder() -> Callable[[Callable[[], list[Any]]], tuple[Callable[[], None], list[Any]]]:
    """Return a function that captures work, and returns a function that repeats it and its results, in fixed memory."""
    pool, generator = torch.cuda.graph_pool_handle(), torch.cuda.default_generators[torch.cuda.current_device()]

    def record(work: Callable[[], list[Any]]) -> tuple[Callable[[], None], list[Any]]:
        graph, state = torch.cuda.CUDAGraph(), generator.clone_state()
        try:
            # "thread_local", because the threads of the loader and of messages call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                results = work()
        except BaseException:  # the generator believes that the capture continues
            generator.graphsafe_set_state(state)
            raise
        return graph.replay, results

    return record


@contextmanager
def _replaced(held: Sequence[_Place], aliases: Mapping[int, Tensor]) -> Iterator[None]:
    before = [(holder, name, holder[name]) for holder, name in held]
    try:
        for holder, name, parameter in before:
            holder[name] = aliases[id(parameter)]
        yield
    finally:
        for holder, name, parameter in before:
            holder[name] = parameter


@contextmanager
def _restored(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore the values of buffers after the block: running statistics count training batches only."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            # `.data`: an earlier forward may have saved the buffer for its backward, which does not use it.
            buffer.data.copy_(value)


# --- regions ---------------------------------------------------------------------------------------------------------


def regions_of(executor: "Executor", program: Program, key: Key) -> Regions:
    """Return the regions (two layers or more) of all segments of a program."""
    starts: set[str] = set()  # backward starts an all-reduce after these layers
    for fused in program.program.backward:
        last = ""
        for operation in fused.operations if isinstance(fused, Fused) else ():
            if isinstance(operation, Compute):
                last = operation.layer
            elif isinstance(operation, Pack):
                starts.add(last)
    found: dict[tuple[int, int], GraphRegion] = {}
    for fused in program.program.forward:
        if not isinstance(fused, Fused):
            continue
        calls = program.segments[fused.number].calls
        tiles = {op.layer for op in fused.operations if isinstance(op, Compute) and op.tile is not None}
        runs: list[list[LayerCall]] = [[]]
        for call in calls:
            layer = executor.traced.graph[call.layer]
            # Weights that are freed after use have no fixed memory.
            freed = any(p.key in program.freed for p in layer.parameters.values())
            usable = not freed and is_plain_call(layer, executor.traced.operations[call.layer], executor.model)
            usable = usable and call.layer not in tiles  # their calls make tensors of positions
            if not usable or call.layer in starts:
                runs.append([])
            if usable:
                runs[-1].append(call)
        for run in [run for run in runs if len(run) > 1]:
            start = calls.index(run[0])
            paths = [path for each in run for path in executor.traced.operations[each.layer].modules]
            modules = [*dict.fromkeys(m for path in paths for m in executor.model.get_submodule(path).modules())]
            inside = {each.write for each in run}
            reads = [*dict.fromkeys(name for each in run for name in each.reads if name not in inside)]
            used = {*fused.writes}.union(*(each.reads for each in calls[start + len(run) :]))
            writes = [each.write for each in run if each.write in used]
            found[fused.number, start] = GraphRegion(run, modules, reads, writes, key)
    return found


def is_plain_call(layer: Layer, operation: Operation, model: nn.Module) -> bool:
    """Return whether a layer is one torch call without side effects."""
    odd = layer.random or layer.several or operation.attributes
    again = layer.kind == "batch_norm" and layer.recomputed
    if odd or again or layer.kind not in KINDS or not layer.differentiable:
        return False
    constants = [*operation.args, *operation.kwargs.values()]
    if operation.kwargs.get("inplace") or not all(isinstance(x, Ref | int | float | str | None) for x in constants):
        return False
    if operation.call == "module":
        module = model.get_submodule(str(operation.target))
        return type(module).__module__.startswith("torch.nn.modules.") and not hooked(module)
    name = getattr(operation.target, "__name__", "_")
    return operation.call == "function" and not name.startswith("i") and not name.endswith("_")
