"""Define groups: the interface with which devices exchange tensors and texts, for any backend.

:meth:`Group.start` sends all tensors. Convoy uses point-to-point messages instead of torch's collectives, because those need
equal shares, and because its cost model predicts single messages.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, final

import torch

from convoy.comm.deadlines import TIMEOUT_S
from convoy.comm.source_line import SAME_STEPS
from convoy.errors import ConvoyError, InputError, MismatchError


@dataclass(frozen=True)
class Message:
    """One tensor to send to, or to receive from, another device.

    Attributes:
        peer: index of the other device.
        tensor: contiguous, of any shape and dtype; sent or received in place. Do not use it before the Pending's `wait`.
    """

    peer: int
    tensor: torch.Tensor


class Pending(Protocol):
    """Messages in progress."""

    def wait(self) -> None:
        """Wait until all messages of the call are sent and received. A second call returns immediately.

        DeviceLostError names a device that died, froze, left, or computed for longer than ``timeout_s``.
        """


class Group(ABC):
    """One device's connections to all devices of its job. One thread at a time may use a lane; `agree` uses lane 0.

    Attributes:
        device: this device's index.
        ids: the device ids that users see, by index. They stay the same while other devices leave and join.
        devices: number of devices.
        lanes: number of independent message queues: 2, or 1 if all messages need one order.
        torch_device: the device that computes and holds the message tensors.
        timeout_s: upper bound of a wait in which no byte moves; after it, the peer counts as lost.
        moved_bytes: returns the bytes that a device, or all of them, have acknowledged or sent.
        sent_bytes: payload bytes sent to each device since the start or the last ``clear_counters``.
        failure: the error that broke or closed the group; None while it works. Methods raise a copy.
    """

    def __init__(self, device: int, devices: int, torch_device: torch.device, timeout_s: float) -> None:
        self.device = device
        self.devices = devices
        self.ids: Sequence[int] = range(devices)
        self.lanes = 2
        self.torch_device = torch_device
        self.timeout_s = timeout_s
        self.moved_bytes: Callable[..., int] = lambda _=None: 0
        self.sent_bytes = [0] * devices
        self.failure: ConvoyError | None = None
        self._counting = threading.Lock()

    @property
    def rejected(self) -> int:
        """Number of unauthenticated connections that this device has dropped."""
        return 0

    @abstractmethod
    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        """Start to send and receive messages, and return immediately.

        On each lane, both devices of a pair must start their messages to each other in the same order. Messages of zero
        elements are not sent. Callers may wait for Pendings in any order, or never.

        Raises:
            InputError: no such lane or peer, a message to this device itself, or a tensor that is not contiguous.
            ConvoyError: a copy of `failure`.
        """

    @abstractmethod
    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        """All-gather a small text, in device order. MismatchError: the devices call it with different topics.

        It takes at most ``timeout_s``, and ``sent_bytes`` does not count it.
        """

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Leave the group. With an error, report it to the other devices. A second call does nothing."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Start messages and wait for them."""
        self.start(sends, receives).wait()

    def clear_counters(self) -> None:
        self.sent_bytes = [0] * self.devices

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.close(error)

    def _admit(
        self, sends: Sequence[Message], receives: Sequence[Message], lane: int
    ) -> tuple[list[Message], list[Message]]:
        """Check messages, count bytes to send, and drop empty messages."""
        self._raise_failure()
        if not 0 <= lane < self.lanes:
            raise InputError(f"lane {lane}: this group has {self.lanes}, numbered from 0; start the messages on lane 0")
        for message in (*sends, *receives):
            if message.peer == self.device or not 0 <= message.peer < self.devices:
                raise InputError(
                    f"device {self.device} of {self.devices} was to exchange a message with device {message.peer}: the peer "
                    "must be another device of the group; on one device, copy the tensor"
                )
            if not message.tensor.is_contiguous():
                raise InputError(
                    f"a tensor of shape {tuple(message.tensor.shape)} and strides {message.tensor.stride()} is not "
                    "contiguous, and a message is one block of memory: send tensor.contiguous()"
                )
        sizes = [message.tensor.nbytes for message in sends]
        with self._counting:
            for message, size in zip(sends, sizes, strict=True):
                self.sent_bytes[message.peer] += size
        if not all(sizes):
            sends = [message for message, size in zip(sends, sizes, strict=True) if size]
        return list(sends), [message for message in receives if message.tensor.numel()]

    def _check_topics(self, topic: str, topics: Sequence[str], places: Sequence[str | None] = ()) -> None:
        lines = [f" ({place})" if place is not None else "" for place in places] or [""] * len(topics)
        for peer, other in enumerate(topics):
            if other != topic:
                self.failure = MismatchError(
                    f"device {self.ids[self.device]} is at {topic!r}{lines[self.device]} while device {self.ids[peer]} is at "
                    f"{other!r}{lines[peer]}: all devices must run the same program with the same arguments"
                    + (f". {SAME_STEPS}" if any(lines) else "")
                )
                raise self.failure.again()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure.again()


@final
class Arrived:
    """A Pending without messages."""

    def wait(self) -> None:
        return


@final
class AloneGroup(Group):
    """A group of one device, for a script that runs alone."""

    def __init__(self, torch_device: torch.device, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(0, 1, torch_device, timeout_s)

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        self._admit(sends, receives, lane)
        return Arrived()

    def agree(self, topic: str, text: str) -> tuple[str, ...]:  # noqa: ARG002
        self._raise_failure()
        return (text,)

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002
        self.failure = self.failure or closed_error()


def closed_error() -> InputError:
    return InputError("this group is closed: make a new one with join(), or close it later")


@final
class ChangingGroup(Group):
    """A proxy of the group of the current generation (`present`), which a regroup replaces.

    Attributes:
        changes: number of replacements.
        entrance: for a process that joins a running job, its `convoy.elastic.entrance.Entrance` until it is admitted.
    """

    def __init__(self, present: Group) -> None:  # no super().__init__(): attributes are those of `present`
        self.present = present
        self.changes = 0
        self.entrance: Any = None

    def replace(self, group: Group) -> None:
        """Switch to `group`. The previous group must be closed."""
        self.present = group
        self.changes += 1

    def is_of_this_process(self) -> None:
        """Make this the group that `group_of_process` returns."""
        global _of_this_process
        _of_this_process = weakref.ref(self)

    def __getattr__(self, name: str) -> Any:
        if name == "present":  # not set yet
            raise AttributeError(name)
        return getattr(self.present, name)

    @property
    def timeout_s(self) -> float:
        return self.present.timeout_s

    @timeout_s.setter
    def timeout_s(self, limit_s: float) -> None:
        self.present.timeout_s = limit_s

    @property
    def rejected(self) -> int:
        return self.present.rejected

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        return self.present.start(sends, receives, lane)

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        return self.present.agree(topic, text)

    def close(self, error: BaseException | None = None) -> None:
        self.present.close(error)

    def clear_counters(self) -> None:
        self.present.clear_counters()


def present(group: Group) -> Group:
    """Return the group of the current generation, for a thread that may outlive it."""
    return group.present if isinstance(group, ChangingGroup) else group


_of_this_process: "weakref.ref[ChangingGroup] | None" = None


def group_of_process() -> Group | None:
    """Return the group of this process's job; None before it has joined one."""
    return None if _of_this_process is None else _of_this_process()
