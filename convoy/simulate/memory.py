"""Computes the bytes that a plan needs on each device during training.

Counted: weights and buffers; a gradient per trainable entry; the optimizer's state; activations saved for backward; the
largest receive buffer of a move or gradient sum. Not counted: kernel workspaces, gradients of activations, prefetched
batches, memory cached by the allocator. `MemoryLimits` subtracts the process's memory before training from the limit.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from convoy.errors import PlanError, unknown_name
from convoy.fleet import Fleet
from convoy.layout.comm_dtype import narrow_itemsize
from convoy.layout.layout import Layout, dual, held_entries, holds
from convoy.model.graph import Graph, Parameter
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
        activations_bytes: activations saved for backward.
        exchange_bytes: receive buffers of the largest move, or flat copy and receive buffers of the largest sum.
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
        for d in self.excess(needs):
            own = self.own_bytes(d)
            note = f" ({_mb(own)} used by its process before training)" if own else ""
            rows.append(f"{self.names[d]} needs {_mb(needs[d] + own)}{note} of {_mb(self.limits_bytes[d] or 0)}")
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
    state, parameters = optimizer_named(optimizer).state, parameters_of(steps, graph)
    rows = []
    for device, program in enumerate(compile_all(steps, graph)):
        kept = sum(held_entries(layout, device, p.shape) for p, layout in parameters)
        trained = sum(held_entries(layout, device, p.shape) for p, layout in parameters if p.trainable)
        whole, gradients = _gathered_entries(program)
        rows.append(
            DeviceMemory(
                weights_bytes=(kept + whole) * itemsize,
                gradients_bytes=(trained + gradients) * itemsize,
                optimizer_bytes=trained * state * itemsize,
                activations_bytes=_activations(program, steps, graph) * itemsize,
                exchange_bytes=max(exchange_bytes(program, steps, itemsize).values(), default=0),
            )
        )
    return tuple(rows)


def most_bytes(steps: StepList, graph: Graph, *, optimizer: str = "sgd-momentum", itemsize: int = 4) -> tuple[int, ...]:
    """Return an upper limit of each device's memory, from the layouts only. If it fits, no program needs to be compiled.

    Assume that every value is saved in separate memory, and that all summands of the largest exchange arrive at once, plus
    one tensor for the sum and one for the sent numbers.
    """
    numbers, parameters = 2 + optimizer_named(optimizer).state, parameters_of(steps, graph)
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
        result.append((numbers * kept + 3 * whole + held + most) * itemsize)
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


def _activations(program: DeviceProgram, steps: StepList, graph: Graph) -> int:
    """Return the entries saved for backward; a tensor that several layers save counts once.

    Convolutions, Linear layers and batch norms over several devices save their input. For any other layer, autograd saves
    input and output. Indices of max pooling and masks of dropout are not counted. Flatten is a view of its input.
    """
    back = {step.layer for step in steps.phase("backward") if isinstance(step, ComputeStep)}
    shared = (step for step in steps.phase("forward") if isinstance(step, GatherStatistics))
    spread, device = {name for step in shared for name in step.layers}, program.device
    moved = {op.buffer: op.of.buffer for op in program.forward if isinstance(op, ops.View) and op.of.box is None}
    source: dict[str, str] = {}  # a value that shares memory with another one on this device -> that one
    kept: dict[str, int] = {}
    for step in steps.phase("forward"):
        if isinstance(step, ComputeStep | Move):
            of = moved.get(step.writes.key)
            if isinstance(step, ComputeStep) and graph[step.layer].kind == "flatten":
                of = step.reads[0].key
            if of is not None:
                source[step.writes.key] = source.get(of, of)
        if isinstance(step, ComputeStep) and step.layer in back and holds(step.writes.layout, device):
            inputs_only = graph[step.layer].weighted or step.layer in spread
            for value in step.reads if inputs_only else (*step.reads, step.writes):
                kept[source.get(value.key, value.key)] = held_entries(value.layout, device, value.shape)
    return sum(kept.values())


def exchange_bytes(program: DeviceProgram, steps: StepList, itemsize: int = 4) -> dict[int, int]:
    """Return a device's buffer bytes of each exchange, by step: received messages, narrow copies to send, flat sums.

    A moved gradient, or its narrow copy, stays in memory until it is sent, while the layer's other gradient is computed.
    """
    rounds: dict[int, dict[int, int]] = {}  # by step and round
    flat: Counter[int] = Counter()
    flats: set[str] = set()
    leaves: set[int] = set()
    slots: dict[int, set[int]] = {}
    narrow: set[str] = set()
    counted: set[str] = set()
    for op in program.operations():
        match op:
            case ops.Make():
                if op.narrow:
                    narrow.add(op.buffer)
                if op.slot is not None:
                    slots.setdefault(op.step, set()).add(op.slot)
                elif op.flat:
                    flats.add(op.buffer)
                    flat[op.step] += math.prod(op.shape) * itemsize
            case ops.Pack() | ops.PackWeights():
                flats.add(op.buffer)
                size = op.made if isinstance(op, ops.PackWeights) else 0 if op.alone else op.size
                flat[op.step] += size * itemsize
            case ops.ExchangeRound():
                taken = rounds.setdefault(op.step, {})
                for message in op.receives:
                    if message.part.buffer not in flats:
                        width = narrow_itemsize(itemsize) if message.part.buffer in narrow else itemsize
                        taken[op.number] = taken.get(op.number, 0) + message.size * width
                for message in op.sends:
                    buffer = message.part.buffer
                    if buffer not in narrow:
                        leaves.add(op.step)
                    elif buffer not in counted:
                        counted.add(buffer)
                        taken[op.number] = taken.get(op.number, 0) + message.size * narrow_itemsize(itemsize)
    found: dict[int, int] = {}
    for step, taken in rounds.items():
        # All chunks of a move are in flight at once; of a sum, only the rounds with separate buffers.
        at_once = len(slots.get(step, ())) or 1
        found[step] = flat[step] + (
            max(taken.values(), default=0) * at_once if flat[step] or step in slots else sum(taken.values())
        )
    for each in steps.phase("backward"):
        if isinstance(each, Move) and each.id in leaves and not flat[each.id]:
            found[each.id] += held_entries(dual(each.reads.layout), program.device, each.reads.shape) * itemsize
    return found
