"""A group whose devices change: what holds it keeps it, while another generation takes the place of the one that broke."""

import weakref
from collections.abc import Sequence
from typing import Any, Self, final

import torch

from convoy.comm.group import Group, Message, Pending
from convoy.errors import ConvoyError


@final
class ChangingGroup:
    """Hands everything on to the present group.

    Attributes:
        present: of this generation.
        changes: how often it was replaced.
        entrance: of a process that joins a running job and is alone until then (`convoy.elastic.entrance.Entrance`).
    """

    def __init__(self, present: Group) -> None:
        self.present = present
        self.changes = 0
        self.entrance: Any = None

    def replace(self, group: Group) -> None:
        """From now on it is this group. The one before must be closed by then."""
        self.present = group
        self.changes += 1

    def is_of_this_process(self) -> None:
        """From now on `index_in_job` asks this group."""
        global _of_this_process
        _of_this_process = weakref.ref(self)

    @property
    def device(self) -> int:
        return self.present.device

    @property
    def devices(self) -> int:
        return self.present.devices

    @property
    def ids(self) -> Sequence[int]:
        return self.present.ids

    @property
    def lanes(self) -> int:
        return self.present.lanes

    @property
    def torch_device(self) -> torch.device:
        return self.present.torch_device

    @property
    def timeout_s(self) -> float:
        return self.present.timeout_s

    @timeout_s.setter
    def timeout_s(self, limit_s: float) -> None:
        self.present.timeout_s = limit_s

    @property
    def sent_bytes(self) -> list[int]:
        return self.present.sent_bytes

    @property
    def rejected(self) -> int:
        return self.present.rejected

    @property
    def failure(self) -> ConvoyError | None:
        return self.present.failure

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        return self.present.start(sends, receives, lane)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.present.exchange(sends, receives)

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        return self.present.agree(topic, text)

    def clear_counters(self) -> None:
        self.present.clear_counters()

    def close(self, error: BaseException | None = None) -> None:
        self.present.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.close(error)

    def __getattr__(self, name: str) -> Any:
        if name == "present":  # not made yet
            raise AttributeError(name)
        return getattr(self.present, name)


def present(group: Group) -> Group:
    """The group of this generation: what a thread has that may outlive it."""
    return group.present if isinstance(group, ChangingGroup) else group


_of_this_process: "weakref.ref[ChangingGroup] | None" = None


def index_in_job() -> int | None:
    """The index of this process among the devices of the present generation of its job; None before it has joined one."""
    group = None if _of_this_process is None else _of_this_process()
    return None if group is None else group.device
