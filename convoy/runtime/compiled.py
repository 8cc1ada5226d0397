"""Rows of layers that torch.compile makes one function of, on a device where that is right and faster: `compile=True`.

A row lies within one fused stretch (`convoy.plan.compile`). It ends where a gradient sum begins in backward, which a compiled
function would delay, and at every layer that is no plain call of torch: it draws random numbers, is a module of one's own, or
hooks look at it. Those run as they are, and so do layers whose weights are freed after use (`convoy.plan.lower`).

Each row is tried once, on random numbers of the shapes that it had, forward and backward, beside the same layers as they are.
All devices try at the same step, and wait for each other row by row.
"""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from convoy.comm.collectives import gather
from convoy.comm.group import Group
from convoy.errors import InputError, shortened
from convoy.machine.accelerator import finish
from convoy.model.graph import Layer
from convoy.model.operation import Operation, TracedModel, arguments
from convoy.model.tracing.hooks import hooked
from convoy.plan.device_program import Compute, Fused, Pack
from convoy.runtime.program import Program

BACKEND = "inductor"

WARM_UP = 3
"""A program runs so often as it is before its rows are compiled: an epoch's last batch is not worth it at once."""

MOST_PROGRAMS = 8
"""Of so many programs rows are compiled, of one model on one device: batch sizes, modes and changes of shares together."""

LONGEST = 24
"""Layers in a row: others wait while it is compiled."""

MOST_S = 600.0
"""So long others wait for it."""

FASTER = 0.95
"""A row is used where it takes at most this part of the time of its layers as they are."""

TURNS = 3

TOLERANCE: Mapping[torch.dtype, float] = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Part of the largest entry by which a compiled row may differ, by rounding: sums are added in another order. Others: 0.1."""

_ONE_AT_A_TIME = threading.Lock()
"""Devices may be threads of one process, and torch compiles for one of them at a time."""


@dataclass(frozen=True, slots=True)
class Like:
    """What is needed to make a tensor like another."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wanted: bool

    @classmethod
    def of(cls, x: Tensor) -> "Like":
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device, x.requires_grad)

    def filled(self, generator: torch.Generator) -> Tensor:
        x = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        if not self.dtype.is_floating_point:
            return x.zero_()
        return x.copy_(torch.randn(self.shape, generator=generator)).requires_grad_(self.wanted)


@dataclass(slots=True)
class Row:
    """Computations of a stretch, one after another.

    Attributes:
        stop: the number, within the stretch, of the first computation behind it.
        reads, writes: values that come from outside, and those that are used outside.
        plain: its layers, as a graph of torch.fx on this device's modules.
        seen: what it read when it last ran.
        function: what runs in the place of its layers, where it does.
    """

    stop: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    plain: fx.GraphModule
    seen: tuple[Like, ...] = ()
    function: Callable[..., tuple[Tensor, ...]] | None = None

    def run(self, own: dict[str, Any]) -> int:
        """Compute what it writes where it is compiled; the number of the first computation that is still to be done."""
        inputs = [own[name] for name in self.reads]
        if self.function is None:
            self.seen = tuple(map(Like.of, inputs))
            return 0
        own.update(zip(self.writes, self.function(*inputs), strict=True))
        return self.stop

    @property
    def fingerprint(self) -> str:
        """Of two rows with the same, the one takes as long as the other."""
        weights = [(tuple(p.shape), p.dtype, p.requires_grad) for p in self.plain.parameters()]
        return f"{self.plain.code} {self.plain} {weights} {self.seen}"


Rows = Mapping[tuple[int, int], Row]
"""By the number of a stretch, and that of the row's first computation within it."""


@dataclass
class Compiled:
    """The rows of one program, in one precision, with or without a backward."""

    rows: Rows
    calls: int = 0


@dataclass
class Compiler:
    """What compiles the rows of one model on this device.

    Attributes:
        left: programs that may still be compiled.
        waits: while plans are tried nothing is compiled: each would be timed with and without.
        tried, used: rows of layers so far.
        refused: why rows were not compiled, or not used, other than for their time; the last reasons.
    """

    group: Group
    left: int = MOST_PROGRAMS
    waits: bool = False
    tried: int = 0
    used: int = 0
    refused: list[str] = field(default_factory=list)
    _pays: dict[str, bool] = field(default_factory=dict)

    def rows(
        self, program: Program, traced: TracedModel, model: nn.Module, key: tuple[torch.dtype | None, bool]
    ) -> Rows:
        """The rows to run with; at the call after the warm-up they are tried first. Every device must call it.

        Args:
            key: the precision, and whether a backward follows.
        """
        if key not in program.compiled:
            program.compiled[key] = Compiled(rows_of(program, traced, model) if self.left else {})
        compiled: Compiled = program.compiled[key]
        compiled.calls += not self.waits
        if compiled.calls == WARM_UP + 1 and self.left and not self.waits:
            self.left -= 1
            untried = [row for row in compiled.rows.values() if row.seen]
            with _patience(self.group):
                while any(gather(self.group, "layers to compile", len(untried))):
                    if untried:
                        self._try(untried.pop(), *key)
        return compiled.rows

    def told(self) -> str:
        """What was compiled, in words."""
        told = f"torch.compile: {self.used} of {self.tried} rows of layers run compiled, the others were not faster"
        return f"{told}; {'; '.join(self.refused)}" if self.refused else told

    def _try(self, row: Row, precision: torch.dtype | None, keep: bool) -> None:
        self.tried += 1
        fingerprint = f"{row.fingerprint} {precision} {keep}"
        if not self._pays.get(fingerprint, True):
            return
        device = self.group.torch_device
        with (
            _ONE_AT_A_TIME,
            _buffers_kept(row.plain),
            torch.set_grad_enabled(keep),
            torch.autocast(device.type, precision, enabled=precision is not None),
        ):
            try:
                function = compiled_by_torch(row.plain)
                trial = _Trial(row, device)
                _check_alike(trial.run(function), trial.run(row.plain))
            except Exception as error:
                self._pays[fingerprint] = False
                self.refused = [*self.refused, first_line(error)][-3:]
                return
            if fingerprint not in self._pays:
                self._pays[fingerprint] = trial.is_faster(function, row.plain)
        if self._pays[fingerprint]:
            self.used += 1
            row.function = function


def compiled_by_torch(module: nn.Module) -> Callable[..., Any]:
    # In this process: the helpers that torch would start outlive the training.
    config: Any = importlib.import_module("torch._inductor.config")
    config.compile_threads = 1
    return torch.compile(module, backend=BACKEND, dynamic=False)


def check_compiler(group: Group) -> None:
    """Whether all devices can compile. Every device must call it.

    Raises:
        InputError: a device has no compiler; with the remedy.
    """
    with _patience(group):
        reasons = gather(group, "compiler", _refusal(group.torch_device))
    for device, reason in enumerate(reasons):
        if reason:
            raise InputError(
                f"compile=True, but on device {device} torch.compile does not work ({reason}): install what it needs there, "
                "a C++ compiler such as g++ (by PATH or CXX) and Python's headers, for GPUs Triton; or leave compile out"
            )


def _refusal(device: torch.device) -> str:
    """Why nothing can be compiled here; empty if it can."""
    with _ONE_AT_A_TIME, torch.no_grad():
        try:
            compiled_by_torch(fx.symbolic_trace(nn.Softplus()))(torch.ones(3, device=device))
        except Exception as error:
            return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return shortened(lines[0] if lines else type(error).__name__)


# --- rows ------------------------------------------------------------------------------------------------------------


def rows_of(program: Program, traced: TracedModel, model: nn.Module) -> Rows:
    """The rows of all stretches of a program, of two layers or more."""
    starts = _after_sums(program)
    found: dict[tuple[int, int], Row] = {}
    for fused in program.program.forward:
        if isinstance(fused, Fused):
            for start, row in _rows_of(fused, starts, traced, model, program):
                found[fused.number, start] = row
    return found


def _after_sums(program: Program) -> set[str]:
    """Layers at which a row has to begin: as soon as backward has their gradients, a sum begins."""
    found: set[str] = set()
    for fused in program.program.backward:
        layer = ""
        for operation in fused.operations if isinstance(fused, Fused) else ():
            if isinstance(operation, Compute):
                layer = operation.layer
            elif isinstance(operation, Pack):
                found.add(layer)
    return found


def _rows_of(
    fused: Fused, starts: set[str], traced: TracedModel, model: nn.Module, program: Program
) -> Iterator[tuple[int, Row]]:
    whole = program.fused[fused.number].whole
    computed = [op for op in fused.operations if isinstance(op, Compute)]
    start = 0
    while start < len(computed):
        graph, values, reads, stop = fx.Graph(), dict[str, fx.Node](), list[str](), start
        for op in computed[start : start + LONGEST]:
            layer, operation = traced.graph[op.layer], traced.operations[op.layer]
            begins_anew = stop > start and op.layer in starts
            # Weights that are freed after use are not there when a row is tried.
            freed = any(p.key in program.freed for p in layer.parameters.values())
            if begins_anew or freed or not is_plain_call(layer, operation, model, whole=op.layer in whole):
                break
            fresh = [name for name in dict.fromkeys(op.reads) if name not in values]
            values |= {name: graph.placeholder(f"x{len(reads) + i}") for i, name in enumerate(fresh)}
            reads += fresh
            values[op.writes[0]] = _node(graph, operation, [values[name] for name in op.reads], op.size.samples, model)
            stop += 1
        if stop - start > 1:
            inside = {op.writes[0] for op in computed[start:stop]}
            used = {*fused.writes}.union(*(op.reads for op in computed[stop:]))
            writes = tuple(op.writes[0] for op in computed[start:stop] if op.writes[0] in used)
            graph.output(tuple(values[name] for name in writes))
            _placeholders_first(graph)
            assert inside.isdisjoint(reads)
            yield start, Row(stop, tuple(reads), writes, fx.GraphModule(model, graph))
        start = max(stop, start + 1)


def _placeholders_first(graph: fx.Graph) -> None:
    nodes = list(graph.nodes)
    first = nodes[0]
    for node in nodes[1:]:
        if node.op == "placeholder" and first.op == "placeholder":
            first.append(node)
            first = node


def _node(graph: fx.Graph, operation: Operation, inputs: Sequence[fx.Node], samples: int, model: nn.Module) -> fx.Node:
    args, kwargs = arguments(operation, inputs, samples, model)
    match operation.call:
        case "module":
            return graph.call_module(str(operation.target), args, kwargs)
        case "method":
            return graph.call_method(str(operation.target), args, kwargs)
    assert callable(operation.target)
    return graph.call_function(operation.target, args, kwargs)


def is_plain_call(layer: Layer, operation: Operation, model: nn.Module, *, whole: bool) -> bool:
    """Whether a layer is a call of a module or function of torch that does nothing but compute its output.

    Args:
        whole: this device has all of its parameters.
    """
    odd = (
        layer.kind == "pick"
        or layer.random
        or layer.several
        or layer.everywhere
        or layer.unfusable
        or layer.no_gradient_to
        or operation.attributes
    )
    if odd or not layer.differentiable or (layer.changes_state and layer.kind != "batch_norm"):
        return False
    if _sizes_in(operation.args) or _sizes_in(tuple(operation.kwargs.values())) or operation.kwargs.get("inplace"):
        return False
    match operation.call, operation.target:
        case "module", str(path):
            module = model.get_submodule(path)
            # Of a convolution in groups each device may have some; of several devices that sum, one adds the bias.
            in_parts = not whole and layer.multiplies and (layer.groups > 1 or _is_empty(getattr(module, "bias", None)))
            own = type(module).__module__.startswith("torch.nn.modules.")
            return own and not in_parts and not any(module.children()) and not hooked(module)
        case "method", str(name):
            return not name.endswith("_")
        case "function", function:
            name, home = getattr(function, "__name__", "_"), getattr(function, "__module__", None) or "torch"
            in_place = name.endswith("_") or (home == "_operator" and name.startswith("i"))
            return home.split(".")[0] in ("torch", "_operator") and not in_place and "out" not in operation.kwargs
    return False


def _is_empty(bias: Any) -> bool:
    return isinstance(bias, Tensor) and not bias.numel()


def _sizes_in(args: Any) -> bool:
    """Whether there are arguments that only the input at hand tells."""
    if isinstance(args, tuple | list):
        return any(map(_sizes_in, args))
    return type(args).__name__ in ("PartExtent", "Here", "Form") or isinstance(args, Tensor | dict)


# --- the trial -------------------------------------------------------------------------------------------------------


class _Trial:
    """A row on random numbers, forward and where gradients are wanted backward."""

    def __init__(self, row: Row, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the global one is that of the training
        self.inputs = [like.filled(generator) for like in row.seen]
        self.sources = [x for x in (*self.inputs, *row.plain.parameters()) if x.requires_grad]
        self.device, self.generator = device, generator
        self.gradients: list[Tensor] | None = None

    def run(self, function: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor | None]:
        """Outputs, then gradients."""
        outputs = list(function(*self.inputs))
        graded = [y for y in outputs if y.requires_grad]
        if not graded or not self.sources:
            return outputs
        if self.gradients is None:
            self.gradients = [Like.of(y.detach()).filled(self.generator) for y in graded]
        return [*outputs, *torch.autograd.grad(graded, self.sources, self.gradients, allow_unused=True)]

    def is_faster(self, one: Callable[..., Any], other: Callable[..., Any]) -> bool:
        seconds: dict[Callable[..., Any], float] = {}
        for _ in range(TURNS):
            for each in (one, other):
                finish(self.device)
                start_s = time.perf_counter()
                self.run(each)
                finish(self.device)
                seconds[each] = min(seconds.get(each, float("inf")), time.perf_counter() - start_s)
        return seconds[one] <= FASTER * seconds[other]


def _check_alike(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> None:
    """
    Raises:
        InputError: a compiled row gives other numbers than its layers.
    """
    for a, b in zip(found, wanted, strict=True):
        a, b = (torch.zeros(()) if x is None else x.detach() for x in (a, b))
        limit = TOLERANCE.get(b.dtype, 0.1) * float(b.abs().amax()) if b.numel() and b.is_floating_point() else 0.0
        if a.numel() and not torch.allclose(a, b.to(a.device), rtol=0.0, atol=limit + 1e-12, equal_nan=True):
            raise InputError("torch.compile gave other numbers than the layers")


@contextlib.contextmanager
def _patience(group: Group) -> Iterator[None]:
    """Others are waited for longer: a device that compiles cannot answer. One that ends is still noticed at once."""
    usual_s, group.timeout_s = group.timeout_s, max(group.timeout_s, MOST_S)
    try:
        yield
    finally:
        group.timeout_s = usual_s


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """A trial of batch norms leaves their statistics as they were."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
