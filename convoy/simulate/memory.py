"""Computes the bytes that a plan needs on each device during training.

Counted: weights and buffers; a gradient per trainable entry; the optimizer's state; the peak of activations, their gradients,
exchange buffers and copies of convolutions, from the device program. Not counted: other workspaces, prefetched batches, memory
cached by the allocator. `MemoryLimits` subtracts the process's memory before training from the limit.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from convoy.errors import PlanError, unknown_name
from convoy.fleet import Fleet
from convoy.layout.comm_dtype import narrow_itemsize
from convoy.layout.layout import Box, Layout, held_entries
from convoy.model.graph import Graph, Layer, Parameter
from convoy.plan import device_program as ops
from convoy.plan.compile import compile_all
from convoy.plan.device_program import DeviceProgram
from convoy.plan.steps import ComputeStep, GatherStatistics, GatherWeights, Move, ReturnGradient, StepList


class Optimizer(NamedTuple):
    """The memory and traffic of an optimizer, in numbers per trainable entry."""

    state: int  # numbers kept from step to step, excluding weight and gradient
    moved: int  # numbers read and written in one update


OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(state=0, moved=3),  # read w, g; write w
    "sgd-momentum": Optimizer(state=1, moved=5),  # also read and write the momentum
    "adam": Optimizer(state=2, moved=7),  # also read and write two moments
}


def optimizer_named(name: str) -> Optimizer:
    """Return an optimizer; for an unknown name, raise an InputError that lists the choices."""
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory that training needs on one device.

    Attributes:
        weights_bytes: parameters and buffers; for sharded ones, the shard and the gathered copy.
        gradients_bytes: gradients of trainable parameters; for sharded ones, the shard and the rest of the whole gradient.
        activations_bytes: at the peak, the batch, activations and their gradients, outputs and the loss.
        exchange_bytes: at the peak, buffers of messages and flat sums; and the receive buffers of sums, which stay.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    exchange_bytes: int

    @property
    def total_bytes(self) -> int:
        state_bytes = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return state_bytes + self.activations_bytes + self.exchange_bytes


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The memory of a fleet's devices. Plans may use the part that the processes do not need before training.

    Attributes:
        limits_bytes: memory of each device; None: unknown.
        names: names of the devices, for messages.
        process_bytes: memory of each device's process before training; empty: unknown.
    """

    limits_bytes: tuple[int | None, ...]
    names: tuple[str, ...]
    process_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, fleet: Fleet, process_bytes: Sequence[int] = ()) -> Self:
        devices = fleet.devices
        return cls(tuple(d.memory_bytes for d in devices), tuple(d.name for d in devices), tuple(process_bytes))

    @property
    def limited(self) -> bool:
        return any(limit is not None for limit in self.limits_bytes)

    def bytes_of(self, device: int) -> float:
        """Return the bytes that plans may use; infinite if unknown."""
        limit = self.limits_bytes[device]
        return math.inf if limit is None else max(1.0, float(limit - self.own_bytes(device)))

    def own_bytes(self, device: int) -> int:
        return self.process_bytes[device] if self.process_bytes else 0

    def excess(self, needs: Sequence[int]) -> dict[int, float]:
        """Return the missing bytes of each device whose memory is too small, given the bytes that each needs."""
        return {d: need - self.bytes_of(d) for d, need in enumerate(needs) if need > self.bytes_of(d)}

    def overfull(self, needs: Sequence[int]) -> list[str]:
        """Return a description of each device whose memory is too small."""
        rows = []
        for d, missing in self.excess(needs).items():
            own = self.own_bytes(d)
            note = f" ({_mb(own)} used by its process before training)" if own else ""
            limit = f"{_mb(self.limits_bytes[d] or 0)}, {_mb(missing)} too much"
            rows.append(f"{self.names[d]} needs {_mb(needs[d] + own)}{note} of {limit}")
        return rows

    def check_room(self, graph: Graph, batch: int) -> None:
        """Raise PlanError if the model's weights and gradients exceed the memory of all devices together."""
        need = 8 * sum({p.key: p.entries for layer in graph.layers.values() for p in layer.trainable}.values())
        room = [self.bytes_of(d) for d in range(len(self.names))]
        if sum(room) < need:
            raise PlanError(self.refusal(graph.model, batch, [[math.ceil(need * each / sum(room)) for each in room]]))

    def refusal(self, model: str, batch: int, attempts: Sequence[Sequence[int]], split: str = "") -> str:
        """Return an error message for the case that no plan fits: the closest attempt, and the remedy.

        Args:
            split: the micro-batches with which a step would fit, from `micro_batch_words`; empty if unknown.
        """
        closest = min(attempts, key=lambda needs: max(need / self.bytes_of(d) for d, need in enumerate(needs)))
        return (
            f"no plan of this {model} at a batch of {batch} fits the devices' memory. In the closest plan, "
            f"{'; '.join(self.overfull(closest))}. "
            + (f"Make a step of {split}; or u" if split else "U")
            + "se a smaller batch or net, add a device, or raise the limit (--memory, or memory_bytes in the fleet file)"
        )


def fewest_micro_batches(batch: int, fits: Callable[[int], bool]) -> int | None:
    """Return the smallest number of equal micro-batches that fit the memory; None if not even one sample fits.

    Args:
        fits: returns whether a micro-batch of this number of samples fits.
    """
    if batch == 1 or not fits(1):
        return None
    return next(n for n in range(2, batch + 1) if batch % n == 0 and (n == batch or fits(batch // n)))


def micro_batch_words(graph: Graph, count: int) -> str:
    """Describe a step of `count` micro-batches, and name the layers that would then compute different numbers."""
    text = f"{count} micro-batches (--accumulate {count}; in Python, model.no_sync())"
    rows = graph.layers.values()
    if others := [e.name for e in rows if e.batched and (e.statistics or not e.per_sample)]:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        kind = "batch norm" if graph[others[0]].statistics else "layer"
        text += f", with different numbers, since {kind} {others[0]!r}{more} would see only its own micro-batch"
    return text


def _mb(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def memory_of(
    steps: StepList, graph: Graph, *, optimizer: str = "sgd-momentum", itemsize: int = 4
) -> tuple[DeviceMemory, ...]:
    """Return the memory that a step needs on each device; of several micro-batches, the last one needs most."""
    programs = compile_all(steps, graph)
    return tuple(device_memory(each, steps, graph, optimizer=optimizer, itemsize=itemsize) for each in programs)


def device_memory(
    program: DeviceProgram, steps: StepList, graph: Graph, *, optimizer: str = "sgd-momentum", itemsize: int = 4
) -> DeviceMemory:
    """Return the memory that a step needs on the device of a program."""
    parameters = parameters_of(steps, graph)
    kept = sum(held_entries(layout, program.device, p.shape) for p, layout in parameters)
    trained = sum(held_entries(layout, program.device, p.shape) for p, layout in parameters if p.trainable)
    whole, gradients = _gathered_entries(program)
    activations, exchanged = _peak_bytes(program, steps, graph, itemsize)
    return DeviceMemory(
        weights_bytes=(kept + whole) * itemsize,
        gradients_bytes=(trained + gradients) * itemsize,
        optimizer_bytes=trained * optimizer_named(optimizer).state * itemsize,
        activations_bytes=activations,
        exchange_bytes=exchanged,
    )


def most_bytes(steps: StepList, graph: Graph, *, optimizer: str = "sgd-momentum", itemsize: int = 4) -> tuple[int, ...]:
    """Return an upper limit of each device's memory, from the layouts only. If it fits, no program needs to be compiled.

    Assume that every value is saved in separate memory, with its gradient and int64 indices, and that all summands of the
    largest exchange arrive at once, plus one tensor for the sum and one for the sent numbers.
    """
    numbers, parameters = 3 + optimizer_named(optimizer).state, parameters_of(steps, graph)
    values = {v.key: v for s in steps.phase("forward") if isinstance(s, ComputeStep) for v in (*s.reads, s.writes)}
    exchanges = [step for step in steps.steps if not isinstance(step, ComputeStep)]
    shapes = (step.reads.shape if isinstance(step, Move | ReturnGradient) else step.shape for step in exchanges)
    most = max(map(math.prod, shapes), default=0) * (steps.devices + 3)
    result = []
    for device in range(steps.devices):
        kept = sum(held_entries(layout, device, p.shape) for p, layout in parameters)
        held = sum(held_entries(v.layout, device, v.shape) for v in values.values())
        gathers = (s for s in steps.phase("forward") if isinstance(s, GatherWeights) and device in s.members)
        whole = sum(sum(step.shape) for step in gathers)
        result.append((numbers * kept + 3 * whole + 4 * held + most) * itemsize)
    return tuple(result)


def parameters_of(steps: StepList, graph: Graph) -> list[tuple[Parameter, Layout]]:
    """Return each parameter and buffer of the model once, with the layout in which it is kept."""
    computes = (step for step in steps.phase("forward") if isinstance(step, ComputeStep))
    rows = ((graph[c.layer].parameters[name], layout) for c in computes for name, layout in c.parameters.items())
    return list({parameter.key: (parameter, layout) for parameter, layout in rows}.values())


def _gathered_entries(program: DeviceProgram) -> tuple[int, int]:
    """Return the peak entries of gathered parameters, and of their whole gradients without the local shards.

    Until the gradient sum ends, a device holds the whole gradient, but not yet its shard.
    """
    whole: dict[str, int] = {}
    gradients: dict[int, int] = {}
    most = (0, 0)
    for op in program.main():
        match op:
            case ops.PackWeights(own_only=False):
                whole |= {key: sum(shares) for key, shares in zip(op.keys, op.shares, strict=True)}
            case ops.FreeWeights(keys=keys):
                whole = {key: size for key, size in whole.items() if key not in keys}
            case ops.Pack(into=into) if into:
                gradients[op.step] = op.size - sum(shares[program.device] for shares in into)
            case ops.WaitSum():
                gradients.pop(op.sum, None)
            case ops.FinishSums(sums=sums):
                gradients = {step: n for step, n in gradients.items() if step not in sums}
        most = max(most, (sum(whole.values()), sum(gradients.values())), key=sum)
    return most


def _peak_bytes(program: DeviceProgram, steps: StepList, graph: Graph, itemsize: int) -> tuple[int, int]:
    """Return the peak bytes of a device's activations and their gradients, and the bytes of exchange buffers at that time.

    The caller holds inputs, outputs and the outputs' gradients until the end of the step. Backward of a loss such as cross
    entropy needs two more tensors of the outputs' size.
    """
    memory, computes = _LiveMemory(), [step for step in steps.steps if isinstance(step, ComputeStep)]
    used = (value for step in computes for value in (*step.reads, step.writes))
    values = {value.key: value for value in (*used, *steps.inputs, *steps.outputs)}
    back = {step.layer for step in computes if step.phase == "backward"}
    spread = {name for step in steps.steps if isinstance(step, GatherStatistics) for name in step.layers}
    forward, backward = (
        [each for op in phase for each in (op.operations if isinstance(op, ops.Fused) else (op,))]
        for phase in (program.forward, program.backward)
    )
    operations, ends = [*forward, *backward], len(forward) + len(backward)
    last = {name: i for i, op in enumerate(operations) for name in (*ops.reads_of(op), *ops.writes_of(op))}
    slots: dict[str, int] = {}
    read: dict[str, tuple[str, ...]] = {}
    padded_bytes: dict[str, int] = {}

    def bytes_of(key: str) -> int:
        value = values.get(key)
        return held_entries(value.layout, program.device, value.shape) * itemsize if value else 0

    for name in program.inputs:
        memory.make(name, bytes_of(name))
    gradients = [ops.output_gradient(number) for number in range(len(steps.outputs))]
    last |= dict.fromkeys((*program.inputs, *program.outputs, *gradients), ends)
    for i, op in enumerate((*operations, *program.sums)):
        if i == len(forward):
            for name, value in zip(gradients, steps.outputs, strict=True):
                memory.make(name, bytes_of(value.key))
            memory.note(further_bytes=2 * sum(bytes_of(value.key) for value in steps.outputs))
        match op:
            case ops.Compute(phase="forward", part="all"):
                layer, read[op.layer], made = graph[op.layer], op.reads, op.writes[0]
                if op.tile and layer.multiplies and _pads(layer, *op.tile):
                    padded_bytes[op.layer] = bytes_of(op.reads[0])
                if layer.kind in ("flatten", "pick"):
                    memory.share(made, op.reads[0])
                else:
                    memory.make(made, bytes_of(made))
                if op.layer in back and not (op.rows and op.rows[0]):  # of several chunks, the first
                    part = bytes_of(made) / max(1, itemsize * math.prod(layer.shape))
                    memory.save(op.layer, _saved(layer, op, op.layer in spread), round(layer.saved_bytes * part))
            case ops.Compute(phase="backward", part="all" | "input"):
                for gradient, source in zip(op.writes, read[op.layer], strict=False):
                    if gradient and graph[op.layer].kind in ("flatten", "pick", "join", "cat"):
                        memory.share(gradient, op.reads[0])
                    elif gradient:
                        memory.make(gradient, bytes_of(source))
            case ops.View():
                memory.share(op.buffer, op.of.buffer)
            case ops.Make():
                size = math.prod(op.shape) * (narrow_itemsize(itemsize) if op.narrow else itemsize)
                if op.slot is not None:
                    slots[op.buffer] = max(size, slots.get(op.buffer, 0))
                elif i < ends:
                    memory.make(op.buffer, size, exchanged=not op.result)
            case ops.Merge():
                memory.make(op.buffer, op.size * itemsize)
            case ops.Pack() | ops.PackWeights():
                size = op.made if isinstance(op, ops.PackWeights) else 0 if op.alone else op.size
                memory.make(op.buffer, size * itemsize, exchanged=True)
        memory.note(_copied(op, graph), padded_bytes.get(op.layer, 0) if isinstance(op, ops.Compute) else 0)
        if isinstance(op, ops.Compute) and op.phase == "backward" and op.last and op.part != "statistics":
            memory.forget(op.layer)
        for name in {*ops.reads_of(op), *ops.writes_of(op)}:
            if last.get(name) == i:
                memory.free(name)
    most, exchanged = memory.most
    exchanged = exchanged if read else most  # a device that computes nothing only receives the outputs
    return most - exchanged, exchanged + sum(slots.values())


def _copied(op: ops.Operation, graph: Graph) -> tuple[str, ...]:
    """Return the buffers that a convolution copies into another format: its input and output, or their gradients.

    oneDNN copies the larger side of a strided convolution twice where it computes that side.
    """
    if not isinstance(op, ops.Compute) or not (layer := graph[op.layer]).windows or not layer.multiplies:
        return ()
    enlarges = any(w.stride > 1 for w in layer.windows) and (op.phase == "backward") == (layer.kind == "conv")
    return (*op.reads, *op.writes, *(op.writes if enlarges else ()))


def _pads(layer: Layer, outputs: Box, inputs: Box) -> bool:
    """Return whether a tile's window reaches over an end of the image, so that forward and backward pad its input."""
    spans = zip(layer.windows, outputs[2:], inputs[2:], strict=True)
    return layer.kind == "conv" and any(w.read(out) != held for w, out, held in spans if out != (0, w.outputs))


def _saved(layer: Layer, op: ops.Compute, spread: bool) -> tuple[str, ...]:
    """Return the buffers that autograd saves: those that the trace has seen, else inputs, and outputs without weights."""
    if layer.saved is not None:
        return tuple((*op.reads, op.writes[0])[i] for i in layer.saved)
    return op.reads[:1] if spread or layer.kind == "batch_norm" else (*op.reads, *(() if layer.weighted else op.writes))


class _LiveMemory:
    """The memory that buffers and saved tensors use, by the buffer that owns it.

    Attributes:
        most: the largest sum of bytes so far, and the part of it that belonged to exchange buffers.
    """

    def __init__(self) -> None:
        self.most, self._now, self._exchanged = (0, 0), 0, 0
        self._owner: dict[str, str] = {}
        self._size: dict[str, tuple[int, bool]] = {}
        self._users: Counter[str] = Counter()
        self._saved: dict[str, list[str]] = {}

    def make(self, name: str, size: int, *, exchanged: bool = False) -> None:
        if name not in self._owner:
            owner = f"{name} {len(self._size)}"  # a buffer's name may be used again while its memory is saved
            self._size[owner] = size, exchanged
            self._now, self._exchanged = self._now + size, self._exchanged + size * exchanged
            self._take(name, owner)

    def share(self, name: str, of: str) -> None:
        if name not in self._owner:
            self._take(name, self._owner[of])

    def save(self, layer: str, names: Sequence[str], further_bytes: int) -> None:
        self.make(f"saved {layer}", further_bytes)
        rows = [self._owner[name] for name in (*names, f"saved {layer}") if name in self._owner]
        self._saved.setdefault(layer, []).extend(rows)
        self._users.update(rows)
        self.free(f"saved {layer}")

    def forget(self, layer: str) -> None:
        for owner in self._saved.pop(layer, ()):
            self._release(owner)

    def free(self, name: str) -> None:
        if name in self._owner:
            self._release(self._owner.pop(name))

    def note(self, copied: Sequence[str] = (), further_bytes: int = 0) -> None:
        """Note the bytes of this time, with copies of some buffers, and further bytes."""
        further = further_bytes + sum(self._size[self._owner[name]][0] for name in copied if name in self._owner)
        self.most = max(self.most, (self._now + further, self._exchanged))

    def _take(self, name: str, owner: str) -> None:
        self._owner[name] = owner
        self._users[owner] += 1

    def _release(self, owner: str) -> None:
        self._users[owner] -= 1
        if not self._users[owner]:
            size, exchanged = self._size[owner]
            self._now, self._exchanged = self._now - size, self._exchanged - size * exchanged
