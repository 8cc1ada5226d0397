"""The contract of a group, on threads and on processes: messages of every kind, counters, agreement, and losses."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch

from convoy.errors import ConvoyError, DeviceLostError, InputError, MismatchError
from convoy.execute import meeting, place
from convoy.execute.group import AloneGroup, Group, Message
from convoy.execute.loss import Answer, Note, Silence, find_lost
from convoy.execute.meeting import Greeting, check_greetings
from convoy.execute.processes import join
from convoy.execute.threads import run_on_threads
from tests.ranks import on_processes

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def say(group: Group, work: Callable[[], object]) -> list[Any]:
    """What a device reports about a failure: [lost device, message], or ["no error"]."""
    try:
        work()
    except DeviceLostError as error:
        return [error.device, str(error)]
    return ["no error", group.device]


# -------------------------------------------------------------------------------------------------------- messages


def pattern(sender: int, receiver: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor only this pair exchanges; small whole numbers are exact in every dtype."""
    return ((torch.arange(size) * 7 + 3 * sender + 5 * receiver) % 64).to(dtype)


def send_every_dtype(group: Group) -> int:
    """All pairs, both ways, every dtype, sizes that differ by pair; one call."""
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
    """20 calls, three messages of different shapes each, waited for in an order of this device's own."""
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
    """Messages of no elements take no number on the way, so those after them still arrive where they belong."""
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
    """Everything above on one group, so that it starts once."""
    received = send_every_dtype(group)
    keep_many_outstanding(group)
    count_bytes(group)
    agree_on_texts(group)
    leave_out_empty_messages(group)
    return received


@pytest.mark.parametrize("devices", [2, 3])
def test_messages_arrive_on_threads(devices: int) -> None:
    assert run_on_threads(devices, messages_arrive) == [(devices - 1) * len(DTYPES)] * devices


@pytest.mark.parametrize(("devices", "staged"), [(2, False), (3, True)])
def test_messages_arrive_on_processes(devices: int, staged: bool) -> None:
    received = on_processes(devices, "tests.test_group:messages_arrive", staged=staged)
    assert received == [(devices - 1) * len(DTYPES)] * devices


def send_from_gpu(device: int, own_gpu: bool) -> list[float]:
    with join(f"cuda:{device if own_gpu else 0}", timeout_s=30) as group:
        mine = torch.full((1000,), float(device), device=group.torch_device)
        theirs = torch.full((1000,), -1.0, device=group.torch_device)
        mine += 10  # still under way on the GPU when the message starts
        group.exchange([Message(1 - device, mine)], [Message(1 - device, theirs)])
        return [float(theirs.min()), float(theirs.max())]


@pytest.mark.cuda
@pytest.mark.parametrize("own_gpu", [False, True], ids=["gloo, one GPU shared", "NCCL, a GPU each"])
def test_messages_arrive_on_gpus(own_gpu: bool) -> None:
    needed = 2 if own_gpu else 1
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} NVIDIA GPU(s): this machine has {torch.cuda.device_count()}")
    assert on_processes(2, "tests.test_group:send_from_gpu", own_gpu, joined=False) == [[11.0, 11.0], [10.0, 10.0]]


@pytest.mark.parametrize("peer", [1, 2, -1])
def test_a_message_needs_another_device(peer: int) -> None:
    def work(group: Group) -> None:
        if group.device == 1:
            with pytest.raises(InputError, match="another device"):
                group.start([Message(peer, torch.ones(1))], [])
            assert group.sent_bytes == [0, 0]

    run_on_threads(2, work)


def test_a_message_is_contiguous() -> None:
    def work(group: Group) -> None:
        with pytest.raises(InputError, match="contiguous"):
            group.start([Message(1 - group.device, torch.ones(3, 2).t())], [])

    run_on_threads(2, work)


def test_a_sent_tensor_may_change_once_the_call_has_been_waited_for() -> None:
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
    for name in place.PLACE_NAMES:
        monkeypatch.delenv(name, raising=False)
    with join("cpu") as group:
        assert isinstance(group, AloneGroup)
        assert (group.device, group.devices, group.agree("plan", "x")) == (0, 1, ("x",))
        group.exchange([], [])
        with pytest.raises(InputError, match="another device"):
            group.start([Message(0, torch.ones(1))], [])
    with pytest.raises(InputError, match="closed"):
        group.exchange([], [])


# ---------------------------------------------------------------------------------------------- losses, on threads


def test_the_first_cause_is_raised_and_the_others_are_told() -> None:
    told: dict[int, list[Any]] = {}

    def work(group: Group) -> None:
        if group.device == 2:
            raise ValueError("no such image")
        waits = group.start([], [Message((group.device + 1) % 3, torch.zeros(1))])
        told[group.device] = say(group, waits.wait)
        assert told[group.device] == say(group, lambda: group.agree("later", ""))  # broken for good

    begin_s = time.monotonic()
    with pytest.raises(ValueError, match="no such image"):
        run_on_threads(3, work, timeout_s=20)
    assert time.monotonic() - begin_s < 10
    assert [told[device][0] for device in (0, 1)] == [2, 2]
    assert "no such image" in told[0][1]


def test_threads_that_wait_too_long_name_the_silent_one() -> None:
    release = threading.Event()

    def work(group: Group) -> list[Any]:
        if group.device == 1:
            release.wait(10)
            return []
        report = say(group, lambda: group.exchange([], [Message(1, torch.zeros(1))]))
        release.set()
        return report

    lost = run_on_threads(2, work, timeout_s=0.2)[0]
    assert lost[0] == 1
    assert "0.2 s" in lost[1]


def test_threads_that_had_finished_are_named() -> None:
    def work(group: Group) -> list[Any]:
        return say(group, lambda: group.exchange([], [Message(1, torch.zeros(1))])) if group.device == 0 else []

    lost = run_on_threads(2, work, timeout_s=20)[0]
    assert lost[0] == 1
    assert "finished" in lost[1]


def test_unequal_sizes_on_both_sides_are_an_error() -> None:
    def work(group: Group) -> None:
        group.exchange([Message(1 - group.device, torch.ones(3))], [Message(1 - group.device, torch.zeros(4))])

    with pytest.raises(MismatchError, match="3 elements"):
        run_on_threads(2, work, timeout_s=5)


@pytest.mark.parametrize("texts", [("plan", "plan"), ("plan", "speeds")])
def test_devices_at_different_topics_are_an_error(texts: tuple[str, str]) -> None:
    def work(group: Group) -> tuple[str, ...]:
        return group.agree(texts[group.device], "x")

    if texts[0] == texts[1]:
        assert run_on_threads(2, work) == [("x", "x")] * 2
    else:
        with pytest.raises(MismatchError, match="'plan'"):
            run_on_threads(2, work)


# -------------------------------------------------------------------------------------------- losses, on processes


def lose_by_signal(group: Group, number: int) -> list[Any]:
    """0 waits for 1, 1 waits for 2, 3 waits for a text of all; 2 is hit by a signal while they wait."""
    group.agree("all are here", "")
    if group.device == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), number)
        time.sleep(30)
    if group.device == 3:
        return say(group, lambda: group.agree("never", ""))
    first = say(group, lambda: group.exchange([], [Message(group.device + 1, torch.zeros(1))]))
    assert first == say(group, lambda: group.exchange([Message(2, torch.zeros(1))], []))
    return first


def test_all_survivors_name_a_killed_device() -> None:
    reports = on_processes(4, "tests.test_group:lose_by_signal", int(signal.SIGKILL))
    assert reports[2] is None
    for device in (0, 1, 3):
        assert reports[device][0] == 2, reports
        assert "device 2 (host" in reports[device][1]
        assert "without a word" in reports[device][1]


def test_all_survivors_name_a_frozen_device() -> None:
    reports = on_processes(4, "tests.test_group:lose_by_signal", int(signal.SIGSTOP), timeout_s=2.0)
    assert reports[2] is None
    for device in (0, 1, 3):
        assert reports[device][0] == 2, reports
        assert "frozen" in reports[device][1]


def have_bad_days(device: int) -> list[Any]:
    """Several groups one after another on the same processes, each with another trouble."""
    reports = []
    here = torch.zeros(1)

    with join("cpu", timeout_s=20) as group:  # device 2 raises; 0 waits for 1, 1 waits for 2
        if device == 2:
            group.start([], [Message(0, torch.zeros(1))])  # nobody will ever wait for this one
            group.close(ValueError("no such image"))
            reports.append([])
        else:
            reports.append(say(group, lambda: group.exchange([], [Message(device + 1, here)])))

    with join("cpu", timeout_s=20) as group:  # 1 waits for 2, 2 for 1, 0 for 1
        group.timeout_s = 0.5
        peer = {0: 1, 1: 2, 2: 1}[device]
        reports.append(say(group, lambda: group.exchange([], [Message(peer, here)])))

    with join("cpu", timeout_s=20) as group:  # 1 computes for long; 2 waits for it, and 0 for 2
        group.timeout_s = 0.5
        if device == 1:
            time.sleep(1.5)
            reports.append([])
        else:
            reports.append(say(group, lambda: group.exchange([], [Message({0: 2, 2: 1}[device], here)])))

    with join("cpu", timeout_s=20) as group:  # 1 sends more than 0 expects: gloo alone would end the process
        group.timeout_s = 0.5
        if device == 1:
            reports.append(say(group, lambda: group.exchange([Message(0, torch.ones(8))], [Message(0, here)])))
        elif device == 0:
            reports.append(say(group, lambda: group.exchange([], [Message(1, torch.zeros(4))])))
        else:
            reports.append([])

    with join("cpu", timeout_s=20) as group:  # 0 still waits for 1, which has finished
        if device == 0:
            reports.append(say(group, lambda: group.exchange([], [Message(1, here)])))
        else:
            group.timeout_s = 0.5  # bounds the farewell too
            reports.append([])

    with join("cpu", timeout_s=20) as group:
        try:
            group.agree("this" if device else "that", "")
        except MismatchError as error:
            reports.append(str(error))

    with join("cpu", timeout_s=20) as group:  # and after all that everything is well again
        reports.append(list(group.agree("end", str(device))))
    return reports


def test_troubles_are_told_apart() -> None:
    raised, circle, slow, sizes, finished, topics, end = zip(
        *on_processes(3, "tests.test_group:have_bad_days", joined=False), strict=True
    )
    for device in (0, 1):
        assert raised[device][0] == 2, raised
        assert "ValueError: no such image" in raised[device][1]
    for device in (0, 1, 2):
        assert circle[device][0] in (1, 2), circle
        assert "circle" in circle[device][1]
    for device in (0, 2):
        assert slow[device][0] == 1, slow
        assert "alive" in slow[device][1]
    for device in (0, 1):
        assert "do not run the same steps" in sizes[device][1], sizes
    assert finished[0][0] == 1, finished
    assert "had ended its work" in finished[0][1]
    assert all("'this'" in text and "'that'" in text for text in topics), topics
    assert list(end) == [["0", "1", "2"]] * 3


# --------------------------------------------------------------------------------------------------------- meeting


def meet_badly(device: int) -> list[Any]:
    """Joins that fail: a device that never comes, other versions, a place taken twice."""
    reports: list[Any] = []
    world = dict(os.environ)

    os.environ["WORLD_SIZE"] = "4"
    reports.append(say_join(timeout_s=1.0))
    os.environ.update(world)

    if device == 2:
        meeting.__version__ = "9.9.9"
    reports.append(say_join())
    meeting.__version__ = "0.1.0"

    os.environ["RANK"] = str(min(device, 1))
    reports.append(say_join(timeout_s=1.0))
    os.environ.update(world)
    reports.append(say_join())
    return reports


def say_join(timeout_s: float = 10.0) -> list[str]:
    try:
        with join("cpu", timeout_s=timeout_s):
            return ["joined"]
    except ConvoyError as error:
        return [type(error).__name__, str(error)]


def test_a_meeting_that_fails_says_why() -> None:
    absent, versions, twice, well = zip(*on_processes(3, "tests.test_group:meet_badly", joined=False), strict=True)
    for kind, text in absent:
        assert kind == "DeviceLostError"
        assert text.startswith("device 3 of 4 did not come")
    for kind, text in versions:
        assert kind == "MismatchError"
        assert "9.9.9 on device 2 (host" in text
    kinds = [report[0] for report in twice]
    assert sorted(kinds[1:]) == ["DeviceLostError", "InputError"], twice
    assert any("two processes claim to be device 1" in report[1] for report in twice)
    assert list(well) == [["joined"]] * 3


def be_beside_torch(device: int, torch_first: bool) -> int:
    """The script has a process group of its own, made before or after joining."""
    if torch_first:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
    with join("cpu", timeout_s=10) as group:
        if not torch_first:
            torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=20))
        total, got = torch.full((1,), device + 1), torch.zeros(1)
        torch.distributed.all_reduce(total)
        group.exchange([Message(1 - device, torch.full((1,), float(device)))], [Message(1 - device, got)])
        torch.distributed.destroy_process_group()
    return int(total) * 10 + int(got)


@pytest.mark.parametrize("torch_first", [True, False])
def test_a_script_may_have_a_process_group_of_its_own(torch_first: bool) -> None:
    assert on_processes(2, "tests.test_group:be_beside_torch", torch_first, joined=False) == [31, 30]


def set_place(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name in (
        *place.PLACE_NAMES,
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_USE_AGENT_STORE",
        "GLOO_SOCKET_IFNAME",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        set_place(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(InputError, match=f"port {port}: Address already in use.*another port"):
            join("cpu", timeout_s=5)


def test_an_unreachable_master_is_named(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    set_place(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port))
    with pytest.raises(DeviceLostError, match=f"nobody listens at 127.0.0.1 port {free_port}") as caught:
        join("cpu", timeout_s=0.5)
    assert caught.value.device == 0


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "no RANK"),
        ({"RANK": "1"}, "no WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK='2'.*from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "x", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "WORLD_SIZE='x'"),
    ],
)
def test_half_a_place_is_an_error(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str) -> None:
    set_place(monkeypatch, **variables)
    with pytest.raises(InputError, match=words):
        join("cpu")


def test_a_device_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(InputError, match=r"'gpu0'.*choose cpu"):
        join("gpu0")


def test_gloo_interfaces_are_listed_when_one_is_unknown() -> None:
    with pytest.raises(InputError, match=r"has no such interface, it has .*lo"):
        place.own_address("127.0.0.1", 1, {"GLOO_SOCKET_IFNAME": "^lo"})
    assert place.own_address("127.0.0.1", 1, {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"


def test_addresses_follow_the_route() -> None:
    assert place.own_address("127.0.0.1", 1, {}) == "127.0.0.1"
    assert place.reachable_address("127.0.0.1", ["127.0.0.1", "127.0.1.1"]) == "127.0.0.1"
    assert place.reachable_address("192.0.2.7", ["127.0.0.1", "192.0.2.7"]) == "192.0.2.7"


def test_a_device_that_only_knows_loopback_follows_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian maps a machine's own name to loopback, so on that machine the route to MASTER_ADDR says nothing."""
    asked = []
    monkeypatch.setattr(place, "route_to", lambda host, _: asked.append(host) or f"the way to {host}")
    assert place.reachable_address("127.0.1.1", ["127.0.1.1", "10.0.0.2", "10.0.0.3"]) == "the way to 10.0.0.2"
    assert place.reachable_address("fd00::3", ["10.0.0.1", "fd00::3"]) == "the way to 10.0.0.1"
    assert asked == ["10.0.0.2", "10.0.0.1"]


def test_a_master_that_others_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    here = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}
    set_place(monkeypatch, **here, MASTER_ADDR="localhost", MASTER_PORT=str(free_port))
    with pytest.raises(InputError, match=r"MASTER_ADDR=localhost is (127.0.0.1|::1) on this machine"):
        join("cpu", timeout_s=5)


GREETING = Greeting(device="cpu", name="x", host="lab1", address="10.0.0.1", devices="2", convoy="1.0", torch="2.13")


def test_greetings_of_other_versions_are_read() -> None:
    assert Greeting.from_text('{"convoy": "2.0", "colour": "red"}') == Greeting(convoy="2.0")
    assert Greeting.from_text("no JSON") == Greeting()
    check_greetings([GREETING, GREETING])
    with pytest.raises(MismatchError, match=r"torch: 2.13 on most, but 2.12 on device 1 \(host lab2, cpu\)"):
        check_greetings([GREETING, Greeting("cpu", "x", "lab2", "a", "2", "1.0", "2.12"), GREETING])


# ------------------------------------------------------------------------------------------------- who was lost


@dataclass(frozen=True)
class LateNote:
    """A note that is still on the way: it is here only for those who wait a moment."""

    note: Note


Said = Answer | Silence | Note | LateNote


class StoryDoors:
    """What the doors of devices say in a story."""

    def __init__(self, story: dict[int, Said]) -> None:
        self.story = story

    def knock(self, device: int) -> Answer | Silence:
        said = self.story[device]
        return said if isinstance(said, (Answer, Silence)) else Silence.DEAD

    def note_from(self, device: int, timeout_s: float) -> Note | None:
        said = self.story[device]
        if isinstance(said, LateNote) and timeout_s > 0:
            return said.note
        return said if isinstance(said, Note) else None


@pytest.mark.parametrize(
    ("story", "timed_out", "lost", "words"),
    [
        ({1: Silence.DEAD}, False, 1, "without a word"),
        ({1: Silence.FROZEN}, True, 1, "sent nothing for 60 s, and its process exists but does not answer"),
        ({1: Silence.UNREACHABLE}, True, 1, "cable"),
        ({1: Answer(2), 2: Answer(3), 3: Silence.DEAD}, True, 3, "without a word"),
        ({1: Answer(2), 2: Answer(3), 3: Silence.FROZEN}, False, 3, "frozen"),
        ({1: Answer(2), 2: Note(2, 3, "was lost: a story")}, True, 3, "a story"),
        ({1: Answer(2), 2: LateNote(Note(2, 3, "was lost: a story"))}, True, 3, "a story"),
        ({1: LateNote(Note(1, 1, "left because of its own error"))}, False, 1, "own error"),
        ({1: Note(1, 1, "left because of its own error")}, False, 1, "own error"),
        ({1: Answer(2), 2: Answer(None)}, True, 2, "alive but sent nothing"),
        ({1: Answer(None)}, False, 1, "went on after an error"),
        ({1: Answer(2), 2: Answer(done=True)}, True, 2, "had ended its work"),
        ({1: Answer(0)}, True, 1, r"0 -> 1 -> 0"),
    ],
)
def test_the_root_of_a_loss_is_found(story: dict[int, Said], timed_out: bool, lost: int, words: str) -> None:
    verdict = find_lost(StoryDoors(story), me=0, peer=1, timed_out=timed_out, limit_s=60.0)
    assert verdict.device == lost
    assert words in verdict.cause
