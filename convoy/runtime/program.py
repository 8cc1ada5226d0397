"""Prepare device programs for the executor: group operations, find buffers to free and devices that draw random numbers."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from convoy.comm.control_messages import gather
from convoy.comm.group import Group
from convoy.layout.layout import Replicated, holders
from convoy.machine.accelerator import spare_memory
from convoy.model.graph import Graph
from convoy.plan import device_program as ops
from convoy.plan.steps import ComputeStep, GatherStatistics, GatherWeights, StepList, SumGradients
from convoy.runtime.gradients import SumLane
from convoy.runtime.kernels import Call
from convoy.simulate.memory import device_memory

_ON_LANE = (ops.Make, ops.View, ops.Copy, ops.Add, ops.Merge, ops.ExchangeRound, ops.WaitRound)


@dataclass(frozen=True, slots=True)
class Item:
    """One operation, or several consecutive ones that `Lane` runs.

    Attributes:
        drops: buffers that no later operation reads.
        dtype: dtype of the buffers that the operations make.
    """

    operations: tuple[ops.Operation, ...]
    drops: tuple[str, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer of a segment in forward: the function that computes it, and the values to free after it (`drops`)."""

    layer: str
    reads: tuple[str, ...]
    write: str
    call: Call
    samples: int
    differentiable: bool
    drops: Sequence[str]


@dataclass(frozen=True, slots=True)
class BoundSegment:
    """The calls of a fused operation in forward, and for each value that it reads, whether it needs a gradient."""

    wants: tuple[bool, ...]
    calls: Sequence[LayerCall]


class Program:
    """A device program prepared for the executor.

    Attributes:
        reached: parameters whose gradient backward computes on any device.
        gathered: sharded parameters that this device gathers whole, in this micro-batch or an earlier one.
        freed: gathered parameters that are freed after use.
        into_shares: parameters whose gradients are reduce-scattered.
        waiting: parameters that every device uses, and whose gradients are summed in a later micro-batch.
        owned_outputs: for each output, whether the model no longer needs its memory.
    """

    def __init__(self, steps: StepList, program: ops.DeviceProgram, graph: Graph, reached: tuple[str, ...]) -> None:
        self.steps, self.program, self.reached, device = steps, program, reached, program.device
        dtypes = {step.id: getattr(torch, graph[name].dtype) for step in steps.steps if (name := _layer_of(step))}
        self.forward = _items(program.forward, set(program.outputs), dtypes)
        self.backward = _items(program.backward, set(program.input_gradients), dtypes)
        gathers = [s for s in steps.steps if isinstance(s, GatherWeights) and device in s.devices]
        self.gathered = tuple(dict.fromkeys(key for step in gathers for key in step.keys))
        self.freed = frozenset(k for op in program.forward if isinstance(op, ops.FreeWeights) for k in op.keys)
        self.random = RandomNumbers(steps, graph)
        self.owned_outputs = tuple(_is_owned(graph, v.layer, 0) for v in steps.outputs)
        self.waiting = frozenset(k for s in steps.later if device in s.devices and not s.flags for k in s.keys)
        summed = [s for s in steps.steps if isinstance(s, SumGradients)]
        self.into_shares = frozenset(key for step in summed if step.into for key in step.keys)
        self.sums = SumLane.of(program.sums)
        shared = [step for step in steps.phase("forward") if isinstance(step, GatherStatistics)]
        self.statistics = {
            name: (step.members, value) for step in shared for name, value in zip(step.layers, step.reads, strict=True)
        }
        self.segments: dict[int, BoundSegment] = {}  # by number
        self.expected_s: dict[tuple[int, str], dict[str, float]] = {}  # by segment and phase
        self.regions: dict[tuple[torch.dtype | None, bool], Any] = {}  # see `convoy.runtime.cuda_graphs`
        self.variants: dict[tuple[frozenset[int], frozenset[str]], Program] = {}


def spare_memory_for(program: Program, graph: Graph, device: torch.device) -> None:
    """Keep the memory of a CPU process small if a step of this program could need too much."""
    if device.type == "cpu":
        itemsize = max(getattr(torch, layer.dtype).itemsize for layer in graph.layers.values())
        spare_memory(device_memory(program.program, program.steps, graph, itemsize=itemsize).total_bytes, device)


def _is_owned(graph: Graph, name: str, readers: int) -> bool:
    """Return whether no other layer uses a value's memory: it is new, or a view of memory that nothing else reads."""
    layer = graph[name]
    if layer.kind == "input" or len(graph.readers[name]) > readers or (readers and name in graph.outputs):
        return False
    makes = layer.kind in ("conv", "linear", "batch_norm", "join", "cat")
    return makes or all(_is_owned(graph, source, 1) for source in layer.inputs)


def _layer_of(step: Any) -> str:
    """Return the layer whose dtype a step uses; "" for a gradient sum, which uses the dtype of its parameters."""
    if isinstance(step, ComputeStep):
        return step.layer
    if isinstance(step, GatherStatistics):
        return step.layers[0]  # all have the same dtype
    reads = getattr(step, "reads", None)
    return reads.layer if reads is not None else ""


def _items(operations: Sequence[ops.Operation], kept: set[str], dtypes: Mapping[int, torch.dtype]) -> list[Item]:
    """Group the operations that run in one call, and find the buffers to free after each group."""
    rows: list[tuple[list[ops.Operation], torch.dtype | None]] = []
    for operation in operations:
        made = dtypes.get(operation.step) if isinstance(operation, ops.Make) and not operation.like else None
        row, dtype = rows[-1] if rows else ([], None)
        joins = row and isinstance(operation, _ON_LANE) and isinstance(row[0], _ON_LANE)
        if joins and (made is None or dtype is None or made == dtype):
            row.append(operation)
            rows[-1] = (row, dtype or made)
        else:
            rows.append(([operation], made))
    items: list[Item] = []
    seen = set(kept)
    for row, dtype in reversed(rows):
        named = {name for operation in row for name in (*ops.reads_of(operation), *ops.writes_of(operation))}
        items.append(Item(tuple(row), tuple(named - seen), dtype or torch.float32))
        seen |= named
    return items[::-1]


# --- random numbers ----------------------------------------------------------------------------------------------------


class RandomNumbers:
    """The devices that draw random numbers in forward. After it, scripts must draw the same numbers on every device.

    Attributes:
        split: several devices draw, each for its shard of the batch or the channels (dropout).
        alone: the device that runs a random layer alone and draws as in a single-device run; None: no such layer.
    """

    def __init__(self, steps: StepList, graph: Graph) -> None:
        drawing = [
            holders(step.writes.layout)
            for step in steps.phase("forward")
            if isinstance(step, ComputeStep)
            and (graph[step.layer].random or not graph[step.layer].per_sample)
            and not (isinstance(step.writes.layout, Replicated) and len(holders(step.writes.layout)) > 1)
        ]
        self.split = any(len(devices) > 1 for devices in drawing)
        self.alone = next((devices[0] for devices in drawing if len(devices) == 1), None)

    @contextmanager
    def same_after(self, group: Group) -> Iterator[None]:
        """Run a forward, and leave the generators of torch, Python and numpy in the same state on all devices.

        If several devices draw, each uses its own seed. If one device draws, all others copy its states.
        """
        if group.devices == 1 or not (self.split or self.alone is not None):
            yield
            return
        before = None if self.alone is None else random_states(group.torch_device)
        if self.split:
            seed = int(torch.randint(1 << 62, ()))
            kind = group.torch_device.type
            devices = [] if kind == "cpu" else [group.torch_device]
            with torch.random.fork_rng(devices, device_type=kind):
                torch.manual_seed(seed + group.device)
                yield
        else:
            yield
        if self.alone is not None:
            after = random_states(group.torch_device)
            found = after if group.device == self.alone and after != before else None
            states = gather(group, "random numbers", found)[self.alone]
            if states is not None:
                set_random_states(states, group.torch_device)


def random_states(device: torch.device) -> dict[str, Any]:
    arrays: Any = np.random.get_state(legacy=False)
    states = {
        "cpu": torch.get_rng_state().numpy().tobytes().hex(),
        "python": random.getstate(),
        "numpy": arrays | {"state": arrays["state"] | {"key": arrays["state"]["key"].tolist()}},
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device).numpy().tobytes().hex()
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Set another device's states; an accelerator's state only if both have one of the same type."""

    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(tensor(states["cpu"]))
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(tensor(states[device.type]), device)
