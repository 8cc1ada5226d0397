"""The budget of a step on an accelerator: kernels, copies, and waits of the launching thread."""

import copy
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import convoy
from convoy.comm.group import AloneGroup, Group, Message, Pending
from convoy.comm.processes import join
from convoy.model.nets import build_net
from convoy.model.tracing import trace
from convoy.plan.plan import OutputPlace, Plan
from convoy.plan.presets import Speeds, named_plan
from convoy.plan.strategy import One
from convoy.runtime.module import Distributed
from tests.support import sim
from tests.support.processes import on_processes
from tests.support.threads import run_on_threads

pytestmark = pytest.mark.skipif(sim.COMPILER is None, reason=sim.NEEDS)

BATCH, WARM_UP = 8, 5


@dataclass(frozen=True)
class Count:
    """What one step on a simulated accelerator asked for.

    Attributes:
        waits: of the thread that launches forward and the optimizer.
        all_waits: of all threads. Backward is launched by a thread of autograd, and a thread sends.
    """

    launches: int
    to_host: int
    to_device: int
    waits: int
    all_waits: int


def _so_far() -> list[int]:
    ops = torch.ops.sim
    return [
        ops.launches(), ops.copies(True), ops.copies(False), ops.own_synchronizations(), ops.synchronizations(),
    ]  # fmt: skip


def _step_count(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Count:
    """Count one step of SGD after warm-up steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(WARM_UP + 1):
        before = _so_far()
        loss = F.cross_entropy(model(x, **options), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return Count(*(b - a for a, b in zip(before, _so_far(), strict=True)))


def _net_and_batch(net: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return build_net(net, (3, 16, 16), 10), torch.randn(BATCH, 3, 16, 16), torch.randint(0, 10, (BATCH,))


def on_one(_device: int) -> list[list[int]]:
    """A step of plain PyTorch and one of Convoy. In a process of its own: autograd counts accelerators at its first use."""
    sim.load()
    model, x, y = _net_and_batch("resnet18:8")
    here = [t.to("sim:0") for t in (x, y)]
    plain = _step_count(copy.deepcopy(model).to("sim:0"), *here)
    with AloneGroup(torch.device("sim:0")) as group:
        plan = named_plan("data", trace(model, x[:2]).graph, BATCH, Speeds((1.0,)))
        ours = _step_count(Distributed(model, plan, group, x[:2]), *here, whole=True)
    return [list(astuple(count)) for count in (plain, ours)]


def test_one_device_launches_as_much_as_pytorch() -> None:
    sim.library()
    ((plain, ours),) = on_processes(1, "tests.runtime.test_accelerator_budget:on_one", joined=False)
    assert Count(*ours).launches <= Count(*plain).launches + 3
    assert ours[1:] == [0, 0, 0, 0], "no copy, and no wait"


def split_by_samples(device: int, net: str) -> list[int]:
    """A step of a net whose samples lie on two accelerators, and how many norms and sums it has."""
    sim.load()
    with join(f"sim:{device}", timeout_s=60) as group:
        model, x, y = _net_and_batch(net)
        plan = named_plan("data", trace(model, x[:2]).graph, BATCH, Speeds((1.0, 1.0)))
        part = Distributed(model, plan, group, x[:2])
        found = _step_count(part, x.to(group.torch_device), y.to(group.torch_device), whole=True)
        norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        return [found.launches, found.to_host, found.to_device, found.waits, found.all_waits, norms]


@pytest.mark.timeout(120)
def test_split_norm_copies_once_each_way_without_waiting() -> None:
    """The launching thread waited for 37 copies of a ResNet-18's step, in which 2,175 operations were queued."""
    sim.library()
    for launches, to_host, to_device, waits, all_waits, norms in on_processes(
        2, "tests.runtime.test_accelerator_budget:split_by_samples", "resnet18:8", joined=False, limit_s=110
    ):
        assert waits == 0
        assert all_waits <= to_host, "only the sending thread waits, once for each copy"
        # Its own statistics and sums, those of the other device, and of each gradient bucket two rounds and the outputs.
        assert to_host <= 2 * norms + 25
        assert to_device <= 2 * norms + 25
        assert launches <= 820


@pytest.mark.parametrize(("outputs", "sent_bytes"), [("everywhere", 4 * BATCH * 10), ("where-computed", 2 * 8)])
def test_plan_for_one_device_sends_only_outputs_or_loss(outputs: OutputPlace, sent_bytes: int) -> None:
    """No message blocks the device that computes: outputs, or sum and count of the loss, leave it, and nothing returns."""
    net, x, y = _net_and_batch("two-conv:4:6")
    graph = trace(net, x[:2]).graph

    def work(group: Group) -> list[tuple[int, int]]:
        sent: list[tuple[int, int]] = []
        start = group.start

        def counted(sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
            sent.append((sum(m.tensor.nbytes for m in sends), len(receives)))
            return start(sends, receives, lane)

        plan = Plan("one", graph.fingerprint, 2, BATCH, {}, One(0), outputs=outputs)
        part, criterion = Distributed(net, plan, group, x[:2]), convoy.loss(nn.CrossEntropyLoss())
        optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
        for step in range(4):
            if step == 3:  # earlier steps compare what the devices were given
                group.start = counted  # type: ignore[method-assign]
            loss = criterion(part(x, whole=True), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return sent

    assert run_on_threads(2, work) == [[(sent_bytes, 0)], [(0, 1)]]
