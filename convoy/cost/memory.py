"""Bytes that a plan keeps on each device while it trains.

What is counted: weights and buffers; a gradient per trainable entry; the optimizer's state; activations kept for backward;
the largest landing buffer of a move or gradient sum. Not counted: what the framework and the kernels' workspaces take, the
gradients of activations on their way through backward, the images of the next batches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convoy.errors import unknown_name
from convoy.fleet import Fleet
from convoy.model.graph import Graph
from convoy.plan.lower import lower
from convoy.plan.plan import Plan
from convoy.plan.steps import Compute, Move, ShareStatistics, Step, StepList, SumGradients
from convoy.sharding.comm_dtype import rounds_own_copy, sent_itemsize
from convoy.sharding.layout import Layout, box, dual, entries, holders
from convoy.sharding.redistribute import Round, Schedule


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What one optimizer costs, per trainable entry.

    Attributes:
        state: numbers kept from step to step besides weight and gradient.
        moved: numbers read and written in one update, weight and gradient included.
    """

    state: int
    moved: int


OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(state=0, moved=3),  # read w, g; write w
    "sgd-momentum": Optimizer(state=1, moved=5),  # and read and write the momentum
    "adam": Optimizer(state=2, moved=7),  # and read and write two moments
}


def optimizer_named(name: str) -> Optimizer:
    """An optimizer by name.

    Raises:
        InputError: unknown name; the choices are listed.
    """
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes on one device.

    Attributes:
        weights_bytes: parameters and buffers.
        gradients_bytes: of the trainable parameters.
        optimizer_bytes: its state.
        activations_bytes: kept from forward to backward.
        exchange_bytes: landing buffers of the largest move, or the flat copy and landing buffers of the largest sum.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    exchange_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.exchange_bytes
        )


@dataclass(frozen=True, slots=True)
class Room:
    """What plans may fill.

    Attributes:
        limits_bytes: of each device; None where it is not known.
        names: of the devices, for messages.
        optimizer: one of `OPTIMIZERS`.
    """

    limits_bytes: tuple[int | None, ...]
    names: tuple[str, ...]
    optimizer: str = "sgd-momentum"

    @property
    def limited(self) -> bool:
        """Whether any device has a limit."""
        return any(limit is not None for limit in self.limits_bytes)

    def bytes_of(self, device: int) -> float:
        """What a device may hold, without an end where that is not known."""
        limit = self.limits_bytes[device]
        return math.inf if limit is None else float(limit)

    def excess(self, needs: Sequence[int]) -> dict[int, float]:
        """By how many bytes each overfilled device is overfilled, for the bytes that each needs."""
        return {d: need - self.bytes_of(d) for d, need in enumerate(needs) if need > self.bytes_of(d)}

    def overfull(self, needs: Sequence[int]) -> list[str]:
        """The overfilled devices in words."""
        return [f"{self.names[d]} needs {_mb(needs[d])} of {_mb(self.bytes_of(d))}" for d in self.excess(needs)]

    def refusal(self, model: str, batch: int, attempts: Sequence[Sequence[int]]) -> str:
        """Why nothing fits: the attempt that came closest, and what to do."""
        closest = min(attempts, key=lambda needs: max(need / self.bytes_of(d) for d, need in enumerate(needs)))
        return (
            f"no plan of this {model} at a batch of {batch} fits the devices' memory: the one that comes closest overfills "
            f"{'; '.join(self.overfull(closest))}. Use a smaller batch or net, add a device, or correct memory_bytes in the "
            "fleet file"
        )


def room_of(fleet: Fleet, optimizer: str = "sgd-momentum") -> Room:
    """The memory of a fleet's devices.

    Raises:
        InputError: unknown optimizer.
    """
    optimizer_named(optimizer)
    devices = fleet.devices
    return Room(tuple(d.memory_bytes for d in devices), tuple(d.name for d in devices), optimizer)


def _mb(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def memory_of(
    plan: Plan, graph: Graph, batch: int | None = None, *, optimizer: str = "sgd-momentum", itemsize: int = 4
) -> tuple[DeviceMemory, ...]:
    """Memory of each device that trains by `plan`, for a global batch of `batch` samples (default: the plan's).

    Raises:
        InputError: unknown optimizer.
        PlanError: the plan does not fit the graph.
    """
    steps = lower(plan, graph, batch)
    return memory_of_steps(steps, graph, optimizer=optimizer, itemsize=itemsize)


def memory_of_steps(
    steps: StepList, graph: Graph, *, optimizer: str = "sgd-momentum", itemsize: int = 4
) -> tuple[DeviceMemory, ...]:
    """As `memory_of`, for a step list."""
    state = optimizer_named(optimizer).state
    result = []
    for device in range(steps.devices):
        kept, trained = parameter_entries(steps, graph, device)
        result.append(
            DeviceMemory(
                weights_bytes=kept * itemsize,
                gradients_bytes=trained * itemsize,
                optimizer_bytes=trained * state * itemsize,
                activations_bytes=_activations(steps, graph, device) * itemsize,
                exchange_bytes=max((_buffers_bytes(step, device, itemsize) for step in steps.steps), default=0),
            )
        )
    return tuple(result)


def parameter_entries(steps: StepList, graph: Graph, device: int) -> tuple[int, int]:
    """Entries of parameters and buffers on a device, and how many of them it trains."""
    kept: dict[str, int] = {}
    trained: dict[str, int] = {}
    for step in steps.phase("forward"):
        if isinstance(step, Compute):
            layer = graph[step.layer]
            for key, layout in step.parameters.items():
                parameter = layer.parameters[key]
                # Two layers may share one parameter: by its key it counts once.
                kept[parameter.key] = _here(layout, device, parameter.shape)
                if parameter.trainable:
                    trained[parameter.key] = kept[parameter.key]
    return sum(kept.values()), sum(trained.values())


def update_s_per_entry(optimizer: str, bytes_per_s: float, itemsize: int = 4) -> float:
    """Seconds of the optimizer per trainable entry: its numbers once through a memory of this bandwidth.

    Raises:
        InputError: unknown optimizer.
    """
    return optimizer_named(optimizer).moved * itemsize / bytes_per_s


def _activations(steps: StepList, graph: Graph, device: int) -> int:
    """Entries kept from forward to backward; a tensor that several layers keep is there once.

    Convolutions, Linear and batch norms over several devices keep their input. Every other layer runs under autograd, which
    keeps its input and its output; what it keeps besides (the indices of max pooling, a mask of dropout) is not counted.
    Flatten is a view of its input.
    """
    back = {step.layer for step in steps.phase("backward") if isinstance(step, Compute)}
    spread = {step.layer for step in steps.phase("forward") if isinstance(step, ShareStatistics)}
    source = _views(steps, graph, device)
    kept: dict[str, int] = {}
    for step in steps.phase("forward"):
        if isinstance(step, Compute) and step.layer in back and device in holders(step.writes.layout):
            inputs_only = graph[step.layer].weighted or step.layer in spread
            for value in step.reads if inputs_only else (*step.reads, step.writes):
                kept[source.get(value.key, value.key)] = _here(value.layout, device, value.shape)
    return sum(kept.values())


def _views(steps: StepList, graph: Graph, device: int) -> dict[str, str]:
    """Values that are the same memory as another one on this device: flattened, or moved with nothing arriving or rounded."""
    source: dict[str, str] = {}
    for step in steps.phase("forward"):
        if isinstance(step, Compute) and graph[step.layer].kind == "flatten":
            source[step.writes.key] = source.get(step.reads[0].key, step.reads[0].key)
        elif isinstance(step, Move):
            schedule, here = step.schedule, box(step.reads.layout, device, step.reads.shape)
            other = _arrives(schedule, device) or rounds_own_copy(step.wire, schedule, step.writes.layout)
            if not other and here is not None and here == box(step.writes.layout, device, step.writes.shape):
                source[step.writes.key] = source.get(step.reads.key, step.reads.key)
    return source


def _buffers_bytes(step: Step, device: int, itemsize: int) -> int:
    """Bytes of the buffers of a step's rounds under way on a device; a sum works on a flat copy besides, but for a
    gradient alone.

    A gradient that is moved stays until it has left, while the layer's other gradient is computed; where narrow numbers
    leave, those do.
    """
    if isinstance(step, Compute):
        return 0
    schedule, narrow = step.schedule, step.wire != "exact"
    buffers = [_buffered(transfers, device, schedule, narrow) for transfers in schedule.rounds]
    # The pieces of a move are begun together; of a sum, so many rounds as its window holds.
    under_way = max(buffers, default=0) * schedule.window if schedule.in_place else sum(buffers)
    size = under_way * sent_itemsize(step.wire, itemsize)
    if schedule.in_place:
        copied = 0 if isinstance(step, SumGradients) and step.alone else schedule.shape[0]
        return copied * itemsize + size if _arrives(schedule, device) else 0
    if isinstance(step, Move) and step.phase == "backward" and not narrow and _leaves(schedule, device):
        size += _here(dual(step.reads.layout), device, step.reads.shape) * itemsize
    return size


def _buffered(transfers: Round, device: int, schedule: Schedule, narrow: bool) -> int:
    """Entries that land, and narrow ones that leave. In a sum, wide numbers that are not added land in the flat copy."""
    landing = [t for t in transfers if t.receiver == device != t.sender and (narrow or t.adds or not schedule.in_place)]
    leaving = {t.box for t in transfers if narrow and t.sender == device != t.receiver}
    return sum(entries(t.box) for t in landing) + sum(entries(b) for b in leaving)


def _leaves(schedule: Schedule, device: int) -> bool:
    return any(t.sender == device != t.receiver for transfers in schedule.rounds for t in transfers)


def _arrives(schedule: Schedule, device: int) -> bool:
    return any(t.receiver == device != t.sender for transfers in schedule.rounds for t in transfers)


def _here(layout: Layout, device: int, shape: tuple[int, ...]) -> int:
    here = box(layout, device, shape)
    return entries(here) if here is not None else 0
