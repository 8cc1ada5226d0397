"""A group of threads in one process, with the contract of processes and mailboxes instead of a network."""

import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, final
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import convoy.runtime.executor
import convoy.runtime.module
from convoy.comm.group import Group, Message, Pending, closed_error
from convoy.errors import ConvoyError, DeviceLostError, InputError, MismatchError
from convoy.machine.accelerator import check_device, enter
from convoy.model.graph import Graph
from convoy.model.tracing import TracedModel
from convoy.plan.device_program import DeviceProgram
from convoy.plan.plan import Plan
from convoy.plan.steps import StepList
from tests.support.program_check import check_programs

T = TypeVar("T")
Route = tuple[int, int, int, int]  # sender, receiver, lane, number of the message on this way

_LIBC = ctypes.CDLL(None)


def this_core() -> set[int]:
    """Return the calling thread's core."""
    return {_LIBC.sched_getcpu()}


def stay_on(core: set[int]) -> None:
    """Keep the calling thread, and those that it starts, on a core: what each thread of a group begins with.

    Python runs one thread at a time. On one core they take turns; on two, torch's calls let the other thread in each time,
    and half of the processor's time went into waking and waiting.
    """
    os.sched_setaffinity(0, core)


def run_on_threads(
    devices: int, work: Callable[[Group], T], timeout_s: float = 60.0, on: Sequence[str] = ("cpu",)
) -> list[T]:
    """Run ``work`` on ``devices`` threads, each with its own group, and return the results in device order.

    When one device raises, the others get a DeviceLostError that names it at their next exchange, and the first cause
    is raised here. After a failure or Ctrl-C the remaining threads get ``timeout_s`` to end.

    Args:
        on: what they compute on, such as ("cpu", "cuda:0"); taken in turns where there are fewer names than devices.

    Raises:
        InputError: fewer than one device, or no such device.
        BaseException: whatever ``work`` raised first.
    """
    if devices < 1:
        raise InputError(f"{devices} devices were asked for: a group has at least one")
    mail, places = _Mailboxes(devices, timeout_s), [check_device(name) for name in on]
    results: dict[int, T] = {}

    core = this_core()

    def run(device: int) -> None:
        stay_on(core)
        group = _ThreadGroup(mail, device, places[device % len(places)])
        try:
            enter(group.torch_device)
            results[device] = work(group)
        except BaseException as error:
            group.close(error)
        else:
            group.close()

    threads = [
        threading.Thread(target=run, args=(device,), name=f"device-{device}", daemon=True) for device in range(devices)
    ]
    with work_shared():
        for thread in threads:
            thread.start()
        try:
            mail.await_end()
        finally:
            mail.stop()
            deadline_s = time.monotonic() + timeout_s
            for thread in threads:
                thread.join(max(0.0, deadline_s - time.monotonic()))
    if mail.first_error is not None:
        raise mail.first_error
    return [results[device] for device in range(devices)]


class _Traced:
    """The traces of a thread group: the n-th that one device asks for, of a model, is also the n-th of the others."""

    def __init__(self) -> None:
        self.original, self.lock = convoy.runtime.module.trace, threading.Lock()
        self.asked: WeakKeyDictionary[nn.Module, Counter[Any]] = WeakKeyDictionary()  # a script may drop its model
        self.known: WeakKeyDictionary[nn.Module, dict[Any, TracedModel]] = WeakKeyDictionary()

    def trace(self, whole: nn.Module, example: Any, *, training: bool | None = True, **like: Any) -> TracedModel:
        if training is None:  # a new size or mode: the model is a copy of this device
            return self.original(whole, example, training=training, **like)
        form = tree_map(lambda x: (x.shape, x.dtype) if isinstance(x, torch.Tensor) else x, example)
        with self.lock:
            asked, known = self.asked.setdefault(whole, Counter()), self.known.setdefault(whole, {})
            asked[threading.get_ident(), training, str(form)] += 1
            key = training, str(form), asked[threading.get_ident(), training, str(form)]
            if key not in known:
                known[key] = self.original(whole, example, training=training, **like)
            return known[key]


class _Lowered:
    """The step lists of thread groups, lowered and checked by the first device that needs them."""

    def __init__(self) -> None:
        self.home = convoy.runtime.executor
        self.original, self.compile_all, self.check = self.home.lower, self.home.compile_all, check_programs
        self.known: list[tuple[Any, Graph, StepList]] = []
        self.checked: list[StepList] = []
        self.lock = threading.Lock()

    def lower(self, plan: Plan, graph: Graph, batch: int, wanted: Any, kept: Any, micro_batch: Any) -> StepList:
        asked = (batch, micro_batch, wanted, kept, plan)
        with self.lock:
            for before, its_graph, steps in self.known:
                if its_graph is graph and before == asked:
                    return steps
            steps = self.original(plan, graph, batch, wanted, kept, micro_batch)
            self.known.append((asked, graph, steps))
            return steps

    def compile_unchecked(self, steps: StepList, graph: Graph) -> list[DeviceProgram]:
        """Return the programs of all devices to be checked; none if that is done."""
        with self.lock:
            if any(each is steps for each in self.checked):
                return []
            self.checked.append(steps)
        return self.compile_all(steps, graph)

    def check_programs(self, found: list[DeviceProgram]) -> None:
        if found:
            self.check(found)


@contextmanager
def work_shared() -> Iterator[None]:
    """Trace each model, and lower each plan, once for all devices of a thread group, to save time."""
    lowered = _Lowered()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convoy.runtime.module.trace", _Traced().trace)
        patch.setattr("convoy.runtime.executor.lower", lowered.lower)
        patch.setattr("convoy.runtime.executor.compile_all", lowered.compile_unchecked)
        patch.setattr("convoy.runtime.executor.check_programs", lowered.check_programs)
        yield


@dataclass
class _Mailboxes:
    """State shared by the threads. Every field is accessed under ``changed`` only."""

    devices: int
    timeout_s: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    boxes: dict[Route, torch.Tensor] = field(default_factory=dict)
    texts: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)  # (number, device) -> topic, text
    left: dict[int, BaseException | None] = field(default_factory=dict)
    first_error: BaseException | None = None
    first_device: int | None = None
    stopped: bool = False

    def leave(self, device: int, error: BaseException | None) -> None:
        with self.changed:
            self.left.setdefault(device, error)
            if error is not None and self.first_error is None:
                self.first_error, self.first_device = error, device
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def await_end(self) -> None:
        """Wait until all devices have left, or until one has failed and the others had their time."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.left) == self.devices or self.first_error is not None)
            self.changed.wait_for(lambda: len(self.left) == self.devices, self.timeout_s)

    def await_peer(self, peer: int, arrived: Callable[[], bool], waiting: int) -> None:
        """Wait, with ``changed`` held, until ``arrived()``; where that cannot be any more, raise what names the cause."""
        gone = self.changed.wait_for(
            lambda: arrived() or self.stopped or self.first_device is not None or peer in self.left, self.timeout_s
        )
        if not arrived():
            raise self._failure(peer, waiting, timed_out=not gone)

    def _failure(self, peer: int, waiting: int, timed_out: bool) -> DeviceLostError:
        if self.first_device is not None and self.first_error is not None:
            cause = f"{type(self.first_error).__name__}: {self.first_error}"
            return DeviceLostError(self.first_device, f"device {self.first_device} left because of its error: {cause}")
        if timed_out:
            return DeviceLostError(
                peer,
                f"device {peer} sent nothing for {self.timeout_s:g} s while device {waiting} waited for it: "
                "it is stuck, or the time limit (timeout_s) is too short for its work",
            )
        if peer in self.left:
            return DeviceLostError(
                peer, f"device {peer} had finished while device {waiting} still waited for it: their work differs"
            )
        return DeviceLostError(waiting, f"device {waiting} was stopped from outside while it waited for device {peer}")


@final
class _ThreadGroup(Group):
    def __init__(self, mail: _Mailboxes, device: int, torch_device: torch.device) -> None:
        super().__init__(device, mail.devices, torch_device, mail.timeout_s)
        self.mail = mail
        self.sent: Counter[tuple[int, int]] = Counter()  # (lane, peer) -> messages
        self.received: Counter[tuple[int, int]] = Counter()
        self.agreed = 0

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        sends, receives = self._admit(sends, receives, lane)
        expected: list[tuple[Route, torch.Tensor]] = []
        for message in receives:
            number = self.received[lane, message.peer]
            expected.append(((message.peer, self.device, lane, number), message.tensor))
            self.received[lane, message.peer] += 1
        copies = [(message.peer, message.tensor.detach().to("cpu", copy=True)) for message in sends]
        with self.mail.changed:
            for peer, tensor in copies:
                self.mail.boxes[(self.device, peer, lane, self.sent[lane, peer])] = tensor
                self.sent[lane, peer] += 1
            self.mail.changed.notify_all()
        return _Awaited(self, expected)

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        self._raise_failure()
        mail, number = self.mail, self.agreed
        self.agreed += 1
        with mail.changed:
            mail.texts[(number, self.device)] = (topic, text)
            mail.changed.notify_all()
            try:
                for peer in range(self.devices):
                    mail.await_peer(peer, lambda peer=peer: (number, peer) in mail.texts, self.device)  # type: ignore[misc]
            except DeviceLostError as error:
                self.failure = error.again()
                raise
            answers = [mail.texts[(number, peer)] for peer in range(self.devices)]
            # A device that answers here has read everything before, so what lies two back is read by all.
            mail.texts.pop((number - 2, self.device), None)
        self._check_topics(topic, [answer[0] for answer in answers])
        return tuple(answer[1] for answer in answers)

    def close(self, error: BaseException | None = None) -> None:
        if self.failure is None:
            self.failure = closed_error()
        self.mail.leave(self.device, error)


class _Awaited:
    def __init__(self, group: _ThreadGroup, expected: list[tuple[Route, torch.Tensor]]) -> None:
        self.group = group
        self.expected = expected

    def wait(self) -> None:
        group, mail = self.group, self.group.mail
        if not self.expected:
            return
        group._raise_failure()
        try:
            for route, tensor in self.expected:
                with mail.changed:
                    mail.await_peer(route[0], lambda route=route: route in mail.boxes, group.device)  # type: ignore[misc]
                    arrived = mail.boxes.pop(route)
                _copy(arrived, tensor, route)
        except ConvoyError as error:
            group.failure = error.again()
            raise
        self.expected = []


def _copy(arrived: torch.Tensor, target: torch.Tensor, route: Route) -> None:
    """Copy a message into its buffer; raise a clear error where a network would corrupt data or fail."""
    if arrived.numel() != target.numel() or arrived.dtype != target.dtype:
        raise MismatchError(
            f"device {route[0]} sent {arrived.numel()} elements of {arrived.dtype} where device {route[1]} expected "
            f"{target.numel()} of {target.dtype} (message {route[3]}): both sides must run the same steps"
        )
    with torch.no_grad():
        target.copy_(arrived.reshape(target.shape))
