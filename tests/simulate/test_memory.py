"""Memory predictions: against hand calculation, and against the executor."""

import pytest
import torch
from torch import nn

from convoy.errors import PlanError
from convoy.layout.layout import local_shape
from convoy.model.tracing import trace
from convoy.plan.lower import lower
from convoy.plan.presets import Speeds, named_plan
from convoy.runtime.module import Distributed
from convoy.simulate.memory import DeviceMemory, MemoryLimits, memory_of
from tests.support.stacks import Stack
from tests.support.threads import run_on_threads

# 2x4x4 -> conv 3x3, 4 filters -> ReLU -> pool 2 -> flatten (16) -> Linear (3).
GRAPH = Stack((2, 4, 4)).conv(4, 3).pool().flatten().linear(3).graph()


def memory(plan: str, devices: int = 2, optimizer: str = "sgd-momentum") -> tuple[DeviceMemory, ...]:
    steps = lower(named_plan(plan, GRAPH, 4, Speeds((1.0,) * devices)), GRAPH)
    return memory_of(steps, GRAPH, optimizer=optimizer)


def test_memory_of_a_batch_split_by_hand():
    """Two of four samples each. Weights: 4*2*9 + 4 + 3*16 + 3 = 127, on both.

    Peak in ReLU's backward: x 2*32, ReLU's output 2*64 and its gradient, the convolution output's gradient, and the copied
    outputs 4*3 with their gradients: 64 + 3 * 128 + 2 * 12 = 472. The flat gradient comes later; what stays from step to step
    is the receive buffer of its half: chunks of 63 and 64, device 0 receives the second.
    """
    first, second = memory("data")
    assert first == DeviceMemory(4 * 127, 4 * 127, 4 * 127, 4 * 472, 4 * 64)
    assert second == DeviceMemory(4 * 127, 4 * 127, 4 * 127, 4 * 472, 4 * 63)
    assert first.total_bytes == 4 * (127 * 3 + 472 + 64)


def test_memory_of_a_filter_split_by_hand():
    """All four samples, half of the filters. Linear has three features: two on the first device, one on the second.

    Weights: convolution 2*18 + 2 = 38; Linear 2*17 = 34 and 17.
    Peak while the features' gradients are sent: x 4*32, ReLU's output 4*2*16, the pool's int64 indices 2 * 4*8, the gathered
    features 4*16 with their gradient, the own half's sum 4*8, outputs and their gradients 2 * 4*3:
    128 + 128 + 64 + 64 + 64 + 32 + 24 = 504. Exchange: the half that is sent and the summand that is received, 4*8 each.
    """
    first, second = memory("model", optimizer="adam")
    assert first == DeviceMemory(4 * 72, 4 * 72, 2 * 4 * 72, 4 * 504, 4 * 64)
    assert second == DeviceMemory(4 * 55, 4 * 55, 2 * 4 * 55, 4 * 504, 4 * 64)


def test_memory_of_the_masters_plan_by_hand():
    """The worker's peak is in its convolution: the images, 4*32, its filters' outputs, 4*2*16, and a copy of both. The
    master's is in ReLU's backward: images, ReLU's output 4*4*16, two gradients of that size, outputs and their gradients.
    """
    master, worker = memory("master", optimizer="sgd")
    assert worker == DeviceMemory(4 * 38, 4 * 38, 0, 4 * 2 * (128 + 128), 0)
    assert master == DeviceMemory(4 * (38 + 51), 4 * (38 + 51), 0, 4 * (128 + 3 * 256 + 24), 0)


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
        assert predicted.activations_bytes / 3 < activations <= predicted.activations_bytes
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
