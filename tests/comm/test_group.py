"""The contract of a group on threads and processes: messages of every kind, counters, agreement, and losses."""

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from convoy.comm import environment
from convoy.comm.group import AloneGroup, Group, Message
from convoy.comm.processes import join
from convoy.errors import DeviceLostError, InputError
from tests.support.networks import on_each_network
from tests.support.processes import on_processes
from tests.support.threads import run_on_threads

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
]  # fmt: skip


def say(group: Group, work: Callable[[], object]) -> list[Any]:
    """Return a device's report about a failure: [lost device, message], or ["no error"]."""
    try:
        work()
    except DeviceLostError as error:
        return [error.device, str(error)]
    return ["no error", group.device]


# -------------------------------------------------------------------------------------------------------- messages


def use_both_lanes(group: Group) -> list[list[float]]:
    """Even devices start lane 1 first, odd ones lane 0; same peers, shapes and dtypes: only the lane tells them apart."""
    peer = group.device ^ 1
    order = (1, 0) if group.device % 2 == 0 else (0, 1)
    arrived = {lane: torch.full((5,), -1.0) for lane in order}
    waits = {}
    seen = []
    for number in range(3):
        for lane in order:
            sent = torch.full((5,), 100.0 * number + 10 * group.device + lane)
            waits[lane] = group.start([Message(peer, sent)], [Message(peer, arrived[lane])], lane)
            if lane == order[1]:
                for each in order:
                    waits[each].wait()
                    seen.append(sorted(set(arrived[each].tolist())))
    with pytest.raises(InputError, match="lane 2: this group has 2"):
        group.start([], [], lane=2)
    return seen


@on_each_network
def test_lanes_are_independent(network: dict[str, str]) -> None:
    def expected(device: int) -> list[list[float]]:
        order = (1, 0) if device % 2 == 0 else (0, 1)
        return [[100.0 * number + 10 * (device ^ 1) + lane] for number in range(3) for lane in order]

    found = on_processes(2, "tests.comm.test_group:use_both_lanes", environment=network)
    assert found == [expected(0), expected(1)]


def wait_for_the_last_only(group: Group) -> list[float]:
    """Device 1 is late each time: unawaited messages of device 0 are still in its buffers."""
    peer, arrived = group.device ^ 1, torch.zeros(4000)
    for number in range(3):
        time.sleep(0.1 * group.device)
        group.start([Message(peer, torch.full((4000,), float(number)))], [Message(peer, torch.zeros(4000))])
        gc.collect()
    group.exchange([Message(peer, torch.full((4000,), 9.0 + group.device))], [Message(peer, arrived)])
    return arrived.unique().tolist()


def test_messages_without_a_waiter_arrive() -> None:
    """A rebalancer sends its seconds after a step and waits for them after the next, but never after the last one."""
    assert on_processes(2, "tests.comm.test_group:wait_for_the_last_only") == [[10.0], [9.0]]


def pattern(sender: int, receiver: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor unique to this pair; small whole numbers are exact in every dtype."""
    return ((torch.arange(size) * 7 + 3 * sender + 5 * receiver) % 64).to(dtype)


def send_every_dtype(group: Group) -> int:
    """Exchange between all pairs, both directions, every dtype, sizes that differ by pair, in one call."""
    peers = [peer for peer in range(group.devices) if peer != group.device]
    size = {(a, b): 1 + 1000 * a + 17 * b for a in range(group.devices) for b in range(group.devices)}
    sends = [
        Message(peer, pattern(group.device, peer, size[group.device, peer], dtype))
        for peer in peers
        for dtype in DTYPES
    ]
    receives = [Message(peer, torch.zeros(size[peer, group.device], dtype=dtype)) for peer in peers for dtype in DTYPES]
    group.exchange(sends, receives)
    for message in receives:
        expected = pattern(message.peer, group.device, message.tensor.numel(), message.tensor.dtype)
        assert torch.equal(message.tensor, expected)
    return len(receives)


def keep_many_outstanding(group: Group) -> None:
    """Start 20 calls of three messages with different shapes, awaited in this device's own order."""
    peers = [peer for peer in range(group.devices) if peer != group.device]
    started = []
    for call in range(20):
        sends = [
            Message(peer, torch.full((call % 4, part + 1), float(100 * call + 10 * part + group.device)))
            for part in range(3)
            for peer in peers
        ]
        receives = [Message(peer, torch.full((call % 4, part + 1), -1.0)) for part in range(3) for peer in peers]
        started.append((call, receives, group.start(sends, receives)))
    order = started[::-1] if group.device % 2 else started[1::2] + started[::2]
    for call, receives, pending in order:
        pending.wait()
        pending.wait()
        for index, message in enumerate(receives):
            part = index // len(peers)
            expected = torch.full((call % 4, part + 1), float(100 * call + 10 * part + message.peer))
            assert torch.equal(message.tensor, expected)


def leave_out_empty_messages(group: Group) -> None:
    """Empty messages take no sequence number, so later ones still arrive in place."""
    right, left = (group.device + 1) % group.devices, (group.device - 1) % group.devices
    before = group.sent_bytes[right]
    got = torch.zeros(2)
    empty, own = torch.empty(0, 5), torch.full((2,), 4.0 + group.device)
    group.start([Message(right, empty)], [Message(left, empty)]).wait()
    group.exchange([Message(right, empty), Message(right, own)], [Message(left, empty), Message(left, got)])
    assert got.tolist() == [4.0 + left] * 2
    assert group.sent_bytes[right] - before == 8


def count_bytes(group: Group) -> None:
    """Device 0 sends 10 float64 to device 1, which sends 3 int16 back; nothing else is counted."""
    group.clear_counters()
    group.agree("something", "x" * 1000)
    if group.device == 0:
        group.exchange([Message(1, torch.ones(2, 5, dtype=torch.float64))], [Message(1, torch.zeros(3).short())])
    elif group.device == 1:
        group.exchange([Message(0, torch.ones(3).short())], [Message(0, torch.zeros(2, 5, dtype=torch.float64))])
    expected = {0: [0, 80], 1: [6, 0]}.get(group.device, [0, 0])
    assert group.sent_bytes == expected + [0] * (group.devices - 2)
    group.clear_counters()
    assert group.sent_bytes == [0] * group.devices


def agree_on_texts(group: Group) -> None:
    for turn in range(3):
        texts = group.agree("plan", f"{turn} by {group.device} é" * (1 + 500 * group.device))
        assert list(texts) == [f"{turn} by {device} é" * (1 + 500 * device) for device in range(group.devices)]
    assert group.agree("nothing", "") == ("",) * group.devices


def messages_arrive(group: Group) -> int:
    """Run all of the above on one group, so that it starts once."""
    received = send_every_dtype(group)
    keep_many_outstanding(group)
    count_bytes(group)
    agree_on_texts(group)
    leave_out_empty_messages(group)
    return received


def test_messages_arrive_on_threads() -> None:
    assert run_on_threads(3, messages_arrive) == [2 * len(DTYPES)] * 3


@on_each_network
def test_messages_arrive_on_processes(network: dict[str, str]) -> None:
    received = on_processes(3, "tests.comm.test_group:messages_arrive", environment=network)
    assert received == [2 * len(DTYPES)] * 3


def send_from_gpu(device: int, own_gpu: bool) -> list[float]:
    if not own_gpu:
        os.environ["CONVOY_SHARED_ACCELERATOR"] = "1"
    with join(f"cuda:{device if own_gpu else 0}", timeout_s=30) as group:
        mine = torch.full((1000,), float(device), device=group.torch_device)
        theirs = torch.full((1000,), -1.0, device=group.torch_device)
        mine += 10  # still under way on the GPU when the message starts
        group.exchange([Message(1 - device, mine)], [Message(1 - device, theirs)])
        return [float(theirs.min()), float(theirs.max())]


@pytest.mark.cuda
@pytest.mark.parametrize("own_gpu", [False, True], ids=["one GPU shared", "NCCL, a GPU each"])
def test_messages_arrive_on_gpus(own_gpu: bool) -> None:
    needed = 2 if own_gpu else 1
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} NVIDIA GPU(s): this machine has {torch.cuda.device_count()}")
    assert on_processes(2, "tests.comm.test_group:send_from_gpu", own_gpu, joined=False) == [[11.0, 11.0], [10.0, 10.0]]


@pytest.mark.parametrize("peer", [1, 2, -1])
def test_message_to_the_own_device_is_refused(peer: int) -> None:
    def work(group: Group) -> None:
        if group.device == 1:
            with pytest.raises(InputError, match="another device"):
                group.start([Message(peer, torch.ones(1))], [])
            assert group.sent_bytes == [0, 0]

    run_on_threads(2, work)


def test_non_contiguous_messages_are_refused() -> None:
    def work(group: Group) -> None:
        with pytest.raises(InputError, match="contiguous"):
            group.start([Message(1 - group.device, torch.ones(3, 2).t())], [])

    run_on_threads(2, work)


def test_sent_tensor_may_change_after_the_wait() -> None:
    def work(group: Group) -> None:
        tensor, got = torch.ones(4), torch.zeros(4)
        if group.device == 0:
            group.exchange([Message(1, tensor)], [])
            tensor.zero_()
            group.agree("the tensor has changed", "")
        else:
            group.agree("the tensor has changed", "")
            group.exchange([], [Message(0, got)])
            assert got.tolist() == [1.0] * 4

    run_on_threads(2, work)


def test_a_group_of_one_needs_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with join("cpu") as group:
        assert isinstance(group, AloneGroup)
        assert (group.device, group.devices, group.agree("plan", "x")) == (0, 1, ("x",))
        group.exchange([], [])
        with pytest.raises(InputError, match="another device"):
            group.start([Message(0, torch.ones(1))], [])
    with pytest.raises(InputError, match="closed"):
        group.exchange([], [])
