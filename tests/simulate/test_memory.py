"""Memory predictions: against hand calculation, and against the executor."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from convoy.errors import PlanError
from convoy.layout.layout import local_shape
from convoy.model.tracing import trace
from convoy.plan.compile import compile_all
from convoy.plan.lower import lower
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.steps import Move
from convoy.runtime.module import Distributed
from convoy.simulate.memory import DeviceMemory, MemoryLimits, exchange_bytes, memory_of
from tests.support.stacks import Stack
from tests.support.threads import run_on_threads

# 2x4x4 -> conv 3x3, 4 filters -> ReLU -> pool 2 -> flatten (16) -> Linear (3).
GRAPH = Stack((2, 4, 4)).conv(4, 3).pool().flatten().linear(3).graph()


def memory(plan: str, devices: int = 2, optimizer: str = "sgd-momentum") -> tuple[DeviceMemory, ...]:
    steps = lower(named_plan(plan, GRAPH, 4, Speeds((1.0,) * devices)), GRAPH)
    return memory_of(steps, GRAPH, optimizer=optimizer)


def test_memory_of_a_batch_split_by_hand():
    """Two of four samples each. Weights: 4*2*9 + 4 + 3*16 + 3 = 127, on both.

    Kept: x 2*32, which the convolution keeps; its output 2*64 and ReLU's output 2*64, which ReLU keeps (the pool keeps the
    same tensor); the pool's output 2*16, of which flatten and Linear keep views. 64 + 128 + 128 + 32 = 352.
    Exchange: the flat gradient, 127, and the half that lands to be added: chunks of 63 and 64, device 0 receives the second.
    """
    first, second = memory("data")
    assert first == DeviceMemory(4 * 127, 4 * 127, 4 * 127, 4 * 352, 4 * (127 + 64))
    assert second == DeviceMemory(4 * 127, 4 * 127, 4 * 127, 4 * 352, 4 * (127 + 63))
    assert first.total_bytes == 4 * (127 * 3 + 352 + 191)


def test_memory_of_a_filter_split_by_hand():
    """All four samples, half of the filters. Linear has three features: two on the first device, one on the second.

    Weights: convolution 2*18 + 2 = 38; Linear 2*17 = 34 and 17.
    Kept: x 4*32; convolution and ReLU outputs 4*2*16 each; pool output 4*2*4; the gathered features 4*16 for Linear:
    128 + 128 + 128 + 32 + 64 = 480. Exchange: the gradient of all features leaves, 4*16 = 64, and the other device's summand
    of the own half arrives, 4*8 = 32.
    """
    first, second = memory("model", optimizer="adam")
    assert first == DeviceMemory(4 * 72, 4 * 72, 2 * 4 * 72, 4 * 480, 4 * 96)
    assert second == DeviceMemory(4 * 55, 4 * 55, 2 * 4 * 55, 4 * 480, 4 * 96)


def test_all_chunks_of_a_move_have_receive_buffers():
    """Start an input that arrives in four chunks: each chunk has its own buffer."""
    graph = Stack((2, 4, 4)).conv(4, 3).conv(6, 3).flatten().linear(3).graph()
    whole = named_plan("model", graph, 4, Speeds((1.0, 1.0)))
    gathered = 4 * 2 * 16 * 4  # four samples of the other's two filters
    for pieces in (1, 2, 4):
        steps = lower(replace(whole, chunks=pieces), graph)
        moves = [s for s in steps.phase("forward") if isinstance(s, Move)]
        assert len(moves[0].schedule.rounds) == pieces
        programs = compile_all(steps, graph)
        assert [exchange_bytes(p, steps)[moves[0].id] for p in programs] == [gathered, gathered]
        assert all(row.exchange_bytes >= gathered for row in memory_of(steps, graph))


def test_memory_of_the_masters_plan_by_hand():
    """The worker keeps the images, 4*32, and half of the convolution; the master everything else.

    The largest move: the worker gets the gradient of its filters' outputs, 4*2*16 = 128; the master keeps the gradient of
    all outputs, 4*4*16 = 256, until that part of it has left.
    """
    master, worker = memory("master", optimizer="sgd")
    assert worker == DeviceMemory(4 * 38, 4 * 38, 0, 4 * 128, 4 * 128)
    # x, the whole convolution's output as it arrived, ReLU's output, the pool's.
    assert master == DeviceMemory(4 * (38 + 51), 4 * (38 + 51), 0, 4 * (128 + 256 + 256 + 64), 4 * 256)


class Net(nn.Module):
    """A residual block between a convolution and a Linear. No device keeps bn2's output where it is sent on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)
        self.bn2 = nn.BatchNorm1d(4 * 16)
        self.fc = nn.Linear(4 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.pool(torch.relu(self.conv2(y) + y))
        return self.fc(self.bn2(torch.flatten(y, 1)))


@pytest.mark.parametrize("name", ["data", "model", "hybrid", "master"])
def test_predicted_memory_matches_the_executor(name):
    """After forward: the storages that the executor and autograd keep, each counted once; parameters and buffers of this part.

    The prediction keeps the input and the output of a layer that autograd runs; most keep one of them.
    """
    example = torch.zeros(6, 3, 8, 8)
    net = Net()  # drawn once: a trace beside which another thread draws keeps a module whole
    graph = trace(net, example).graph
    plan = named_plan(name, graph, 6, Speeds((2.0, 1.0)))

    def kept(group):
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):  # not where the maxima were
                _collect_storages(tensor, found)
            return tensor

        part = Distributed(net, plan, group, example)
        own = part.first_variant().program(6)
        inputs = [torch.randn(local_shape(v.layout, group.device, v.shape)) for v in own.steps.inputs]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            _, tape = part.first_variant().executor.forward(own, inputs, keep=True)
        _collect_storages(tape.saved, found)
        weights = [*part.module.parameters(), *part.module.buffers()]
        return sum(found.values()), sum(w.numel() for w in weights)

    expected = memory_of(lower(plan, graph), graph)
    for (activations, weights), predicted in zip(run_on_threads(2, kept), expected, strict=True):
        assert predicted.activations_bytes / 2 < activations <= predicted.activations_bytes
        assert 4 * weights == predicted.weights_bytes


def _collect_storages(saved: object, found: dict[int, int]) -> None:
    if isinstance(saved, torch.Tensor):
        storage = saved.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(saved, dict):
        for each in saved.values():
            _collect_storages(each, found)
    elif isinstance(saved, tuple | list):
        for each in saved:
            _collect_storages(each, found)


def test_a_net_without_room_for_its_weights_is_refused_before_measuring():
    """Regression: this was refused after 22 s of measuring."""
    entries = sum(p.entries for layer in GRAPH.layers.values() for p in layer.trainable)
    MemoryLimits((8 * entries, 5), ("a", "b")).check_room(GRAPH, 4)
    with pytest.raises(PlanError, match=r"a needs .* \(100 MB used by its process before training\) of 8 MB.*--memory"):
        MemoryLimits((8_000_000, 8_000_000), ("a", "b"), (100_000_000, 100_000_000)).check_room(GRAPH, 4)
