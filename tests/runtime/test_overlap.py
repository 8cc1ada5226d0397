"""The executor overlaps what the step list allows, judged by the recorded order of operations.

No clock: each device writes down what it begins, computes and awaits, and a sum is held back until backward has gone on.
"""

import copy
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from convoy.comm.group import Group, Message, Pending
from convoy.model.tracing import trace
from convoy.plan import lower
from convoy.plan.plan import Plan
from convoy.plan.strategy import Batch, Filter, One, Strategy
from convoy.runtime import gradients as gradient_sums
from convoy.runtime.gradients import SegmentSums, Worker
from convoy.runtime.module import Distributed
from tests.support.threads import run_on_threads

Happened = list[tuple[str, ...]]

HELD_S = 20.0
"""What is held back for longer is not started during anything else."""


class Watched:
    """A group that writes down when messages of lane 0 are begun and awaited.

    Args:
        hold: called before messages of lane 1 are said to have arrived; begun: when they are begun.
    """

    def __init__(
        self,
        group: Group,
        happened: Happened,
        hold: Callable[[], None] = lambda: None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._group, self._happened, self._hold, self._sum_begun = group, happened, hold, begun
        self._begun = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        pending = self._group.start(sends, receives, lane)
        if lane:
            self._sum_begun()
            return _Arriving(pending, self._hold)
        self._begun += 1
        name = str(self._begun)
        self._happened.append(("begin", name))
        return _Arriving(pending, lambda: self._happened.append(("await", name)))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.start(sends, receives).wait()


class _Arriving:
    def __init__(self, pending: Pending, first: Callable[[], None]) -> None:
        self._pending, self._first = pending, first

    def wait(self) -> None:
        self._first()
        self._pending.wait()


class Recording:
    """A layer's arithmetic that records when it computes."""

    def __init__(self, run: Any, name: str, record: Callable[[tuple[str, ...]], None]) -> None:
        self._run, self._name, self._record = run, name, record

    def forward(self, *args: Any) -> Any:
        self._record(("forward", self._name))
        return self._run.forward(*args)

    def backward(self, saved: Any, g: Any, wants: Any, part: str = "all", last: bool = True) -> Any:
        self._record(("backward", self._name, part))
        return self._run.backward(saved, g, wants, part, last)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 5)).double()


def example() -> torch.Tensor:
    return torch.randn(8, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def plan_of(layers: dict[str, Strategy], **changes: Any) -> Plan:
    graph = trace(net(), example()).graph
    return replace(Plan("hand", graph.fingerprint, 2, 8, layers, Batch((5, 3)), "direct"), **changes)


def what_happens(plan: Plan, held_until: tuple[str, ...] | None = None) -> tuple[Happened, list[torch.Tensor]]:
    """A training step on two devices, layer by layer: what device 0 did, in its order, and its gradient pieces.

    Args:
        held_until: on each device, messages of sums arrive only when this has been computed there.
    """

    whole = net()  # once: two threads draw from one generator

    def work(group: Group) -> tuple[Happened, list[torch.Tensor]]:
        happened: Happened = []
        went_on = threading.Event()

        def record(what: tuple[str, ...]) -> None:
            happened.append(what)
            if what == held_until:
                went_on.set()

        def hold() -> None:
            assert held_until is None or went_on.wait(HELD_S), f"a sum is awaited before {held_until}"

        watched = Watched(group, happened, hold)
        part = Distributed(copy.deepcopy(whole), plan, watched, example())  # type: ignore[arg-type]
        watch(part, record)
        happened.clear()
        together = isinstance(plan.layers["0"], Filter)
        mine = example() if together else example()[:5] if group.device == 0 else example()[5:]
        part(mine, batch=8).square().sum().backward()
        return happened, [p.grad for p in part.parameters() if p.grad is not None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convoy.plan.compile.segments", lambda *_: ())  # else autograd runs several layers at once
        return run_on_threads(2, work, timeout_s=2 * HELD_S)[0]


def watch(part: Distributed, record: Callable[[tuple[str, ...]], None]) -> None:
    executor = part.first_variant().executor
    for name, run in executor.arithmetic.items():
        executor.arithmetic[name] = Recording(run, name, record)


FILTERED: dict[str, Strategy] = {"0": Batch((5, 3)), "2": Filter((5, 3)), "4": One(0)}


def test_input_gradient_is_sent_while_the_weight_gradient_is_computed() -> None:
    happened, _ = what_happens(plan_of(FILTERED))
    at = happened.index(("backward", "2", "input"))
    assert happened[at + 1][0] == "begin", "as soon as it is there"
    assert happened[at + 2] == ("backward", "2", "weight"), "and nobody waits before"
    assert happened.index(("await", happened[at + 1][1])) > at + 2


def test_convolution_starts_with_the_first_input_chunk() -> None:
    """Two chunks: the second is awaited after the first is computed."""
    happened, _ = what_happens(plan_of(FILTERED | {"0": Filter((4, 2))}, chunks=2))
    first, second = (n for n, what in enumerate(happened) if what == ("forward", "2"))
    assert [what[0] for what in happened[first - 1 : second + 1]] == ["await", "forward", "await", "forward"]


def test_all_reduces_overlap_with_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the last layer is held back until the first layer's backward has run, two layers further on: were it
    awaited where it stands in the list, neither would ever end. The numbers are those of one device all the same."""
    monkeypatch.setattr(lower, "BUCKET_ENTRIES", 300)
    plan = plan_of({name: Batch((5, 3)) for name in ("0", "2", "4")})
    happened, gradients = what_happens(plan, held_until=("backward", "0", "all"))
    assert ("backward", "0", "all") in happened
    check_as_alone(gradients)


def test_all_reduce_starts_within_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """All three layers are one graph of autograd, and the gradients of the last one fill a bucket, in one part with that of
    its input. When the first layer has its gradient, that sum has begun: after the segment, it would be waited for in vain."""
    monkeypatch.setattr(lower, "BUCKET_ENTRIES", 300)
    monkeypatch.setattr(lower._Lowering, "_parts", lambda *_: (("all", True),))
    plan, whole = plan_of({name: Batch((5, 3)) for name in ("0", "2", "4")}), net()
    here, original = threading.local(), SegmentSums.collect

    def collect(sums: SegmentSums, key: str, gradient: torch.Tensor | None) -> None:
        if key == "0.weight" and not here.seen:
            here.seen.append(here.begun.wait(HELD_S))
        original(sums, key, gradient)

    monkeypatch.setattr(SegmentSums, "collect", collect)

    def work(group: Group) -> tuple[bool, list[torch.Tensor]]:
        here.begun, here.seen = threading.Event(), []
        watched = Watched(group, [], begun=here.begun.set)
        part = Distributed(copy.deepcopy(whole), plan, watched, example())  # type: ignore[arg-type]
        part(example()[:5] if group.device == 0 else example()[5:], batch=8).square().sum().backward()
        return here.seen == [True], [p.grad for p in part.parameters() if p.grad is not None]

    for seen, gradients in run_on_threads(2, work, timeout_s=2 * HELD_S):
        assert seen
        check_as_alone(gradients)


def test_failed_backward_leaves_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's backward fails on all devices, with two sums begun; the first still travels on one, and is done on the other.
    Were the second not made on the former, its messages would be taken for those of the next step."""
    monkeypatch.setattr(lower, "BUCKET_ENTRIES", 300)
    monkeypatch.setattr("convoy.plan.compile.segments", lambda *_: ())
    plan, whole = plan_of({name: Batch((5, 3)) for name in ("0", "2", "4")}), net()

    def work(group: Group) -> list[torch.Tensor]:
        breaks, broken, rounds = [True], threading.Event(), threading.Semaphore(0)

        def record(what: tuple[str, ...]) -> None:
            if what == ("backward", "0", "all") and breaks:
                breaks.clear()
                for _ in range(3 if group.device else 1):  # two of the first sum, and one of the second
                    assert rounds.acquire(timeout=HELD_S)
                raise RuntimeError("a hook of the caller's")

        def hold() -> None:
            assert group.device == 1 or broken.wait(HELD_S)

        watched = Watched(group, [], hold, rounds.release)
        part = Distributed(copy.deepcopy(whole), plan, watched, example())  # type: ignore[arg-type]
        watch(part, record)
        mine = example()[:5] if group.device == 0 else example()[5:]
        with pytest.raises(RuntimeError, match="a hook of the caller's"):
            part(2 * mine, batch=8).square().sum().backward()
        broken.set()
        part(mine, batch=8).square().sum().backward()
        return [p.grad for p in part.parameters() if p.grad is not None]

    for gradients in run_on_threads(2, work, timeout_s=2 * HELD_S):
        check_as_alone(gradients)


def test_all_reduce_thread_is_reused_and_ends_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a thread per step took 0.1 to 0.3 ms of processor time."""
    monkeypatch.setattr(gradient_sums, "IDLE_S", 0.3)
    worker, threads = Worker("sums"), queue.SimpleQueue[int]()
    seen = []
    for _ in range(2):
        worker.add(lambda: threads.put(threading.get_ident()))
        seen.append(threads.get(timeout=HELD_S))
    assert seen[0] == seen[1] != threading.get_ident()
    (thread,) = [each for each in threading.enumerate() if each.name == "sums"]
    thread.join(HELD_S)
    assert not thread.is_alive()
    worker.add(lambda: threads.put(threading.get_ident()))
    threads.get(timeout=HELD_S)


def check_as_alone(found: list[torch.Tensor]) -> None:
    alone = net()
    alone(example()).square().sum().backward()
    for mine, its in zip(found, (p.grad for p in alone.parameters()), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-10)
