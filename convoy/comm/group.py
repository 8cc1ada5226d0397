"""The seam to the network: what a group of devices offers, whatever carries its bytes.

Every tensor that travels between devices passes through :meth:`Group.start`. Convoy uses no collectives: unequal shares
fail in them or come out wrong, and a list of messages is what the cost model prices.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, final

import torch

from convoy.comm.place import SAME_STEPS
from convoy.errors import ConvoyError, InputError, MismatchError


@dataclass(frozen=True)
class Message:
    """One tensor on its way to, or from, another device.

    Attributes:
        peer: index of the other device.
        tensor: contiguous, any shape and dtype; sent from, or received into, in place. Leave it alone until the
            Pending it belongs to has been waited for.
    """

    peer: int
    tensor: torch.Tensor


class Pending(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Return when all messages of the call have left and arrived; a second call returns at once.

        Raises:
            DeviceLostError: a device died, froze for longer than the group's ``timeout_s``, or left; it is named.
        """


class Group(Protocol):
    """The devices of one job, seen from one of them. One thread at a time may use each lane; `agree` belongs to lane 0.

    Attributes:
        device: this device's index in the fleet.
        ids: by which messages name the devices, in their order: those that they had, or got as they came, while others left.
        devices: how many devices there are.
        lanes: how many lanes messages can travel on: 2, or 1 where all must be started by one thread, in one order.
        torch_device: where this device computes; message tensors live there.
        timeout_s: how long a wait may last before the other side counts as lost.
        sent_bytes: payload bytes sent to each device since the start, or since ``clear_counters``.
        rejected: how many connections without the job's key this device has dropped.
        failure: why the group can no longer be used, its own closing included; None while it can. What is raised is a copy.
    """

    timeout_s: float

    @property
    def device(self) -> int: ...

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def devices(self) -> int: ...

    @property
    def lanes(self) -> int: ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def sent_bytes(self) -> list[int]: ...

    @property
    def failure(self) -> ConvoyError | None: ...

    @property
    def rejected(self) -> int: ...

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        """Start to send and to receive, and return at once.

        All messages of one call are independent. Several messages to the same peer arrive in the order of the list.
        The two devices of a pair start their messages to each other in the same order, lane by lane; lanes know nothing
        of each other. Messages of zero elements are skipped, on both sides. Several Pendings may be outstanding and may
        be waited for in any order, or never: what nobody waits for travels all the same.

        Raises:
            InputError: a lane or a peer that does not exist or is this device itself, or a tensor that is not contiguous.
            ConvoyError: the group broke earlier; the same error again.
        """

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """``start(sends, receives).wait()``."""

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        """Every device's text on this topic, in the order of the devices. All devices call it, in the same order.

        It is meant for small texts, takes at most ``timeout_s``, and is not counted in ``sent_bytes``.

        Raises:
            MismatchError: the devices are at different topics.
            DeviceLostError: as in :meth:`Pending.wait`.
        """

    def clear_counters(self) -> None:
        """Set ``sent_bytes`` to zero."""

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group; with an error, the other devices are told it. A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None: ...


class CountedGroup(ABC):
    """What every kind of group does alike: it checks and counts messages, stays broken once broken, closes itself."""

    lanes = 2

    def __init__(self, device: int, devices: int, torch_device: torch.device, timeout_s: float) -> None:
        self.device = device
        self.devices = devices
        self.ids: Sequence[int] = range(devices)
        self.torch_device = torch_device
        self.timeout_s = timeout_s
        self.sent_bytes = [0] * devices
        self.failure: ConvoyError | None = None
        self._counting = threading.Lock()

    @property
    def rejected(self) -> int:
        return 0

    @abstractmethod
    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending: ...

    @abstractmethod
    def agree(self, topic: str, text: str) -> tuple[str, ...]: ...

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None: ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
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
        """The messages that really travel; the ones to send are counted."""
        self._raise_failure()
        if not 0 <= lane < self.lanes:
            raise InputError(f"lane {lane}: this group has {self.lanes}, numbered from 0; start the messages on lane 0")
        for message in (*sends, *receives):
            self._check(message)
        sizes = [message.tensor.nbytes for message in sends]
        with self._counting:
            for message, size in zip(sends, sizes, strict=True):
                self.sent_bytes[message.peer] += size
        if not all(sizes):
            sends = [message for message, size in zip(sends, sizes, strict=True) if size]
        return list(sends), [message for message in receives if message.tensor.numel()]

    def _check(self, message: Message) -> None:
        if message.peer == self.device or not 0 <= message.peer < self.devices:
            raise InputError(
                f"device {self.device} of {self.devices} got a message for device {message.peer}: a message goes to "
                "another device of the group; copy locally what stays on this one"
            )
        if not message.tensor.is_contiguous():
            raise InputError(
                f"a tensor of shape {tuple(message.tensor.shape)} and strides {message.tensor.stride()} is not "
                "contiguous, and messages travel as one block of memory: send tensor.contiguous()"
            )

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
    """A Pending with nothing left to wait for."""

    def wait(self) -> None:
        return


@final
class AloneGroup(CountedGroup):
    """A group of one device: the same script runs alone."""

    def __init__(self, torch_device: torch.device, timeout_s: float = 60.0) -> None:
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
    """What a group says that is used after its end."""
    return InputError("this group is closed: make a new one with join(), or close it later")
