"""Trainings on threads that lose devices: groups use mailboxes, and survivors regroup under a lock, without a
network."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from convoy.comm.group import ChangingGroup
from convoy.elastic import members as members_module
from convoy.elastic.agreement import Generation
from convoy.elastic.members import Members
from convoy.errors import DeviceLostError
from convoy.machine.accelerator import enter
from convoy.train.loop import Training
from tests.support.threads import _Mailboxes, _ThreadGroup, stay_on, this_core

T = TypeVar("T")
LIMIT_S = 30.0


class Killed(BaseException):
    """The silent end of a device."""


@dataclass
class _Place:
    """State shared by the threads, accessed under `changed` only."""

    alive: set[int]
    generation: Generation
    mail: _Mailboxes
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: set[int] = field(default_factory=set)

    def die(self, device: int) -> None:
        with self.changed:
            self.alive.discard(device)
            self.changed.notify_all()

    def meet(self, device: int) -> tuple[Generation, _Mailboxes]:
        with self.changed:
            before = self.generation
            self.waiting.add(device)
            done = self.changed.wait_for(
                lambda: self.generation is not before or self.waiting >= self.alive, timeout=LIMIT_S
            )
            assert done, f"device {device} waited for {self.alive - self.waiting}"
            if self.generation is before:
                self.generation = Generation(before.number + 1, tuple(sorted(self.alive)))
                self.mail = _Mailboxes(len(self.alive), LIMIT_S)
                self.waiting.clear()
                self.changed.notify_all()
            return self.generation, self.mail


class _Island:
    """A replacement for `convoy.elastic.regroup.Membership`."""

    def __init__(self, group: ChangingGroup, _home: object = None) -> None:
        present = group.present
        assert isinstance(present, _ThreadGroup)
        self.group, self.me, self.is_out, self.parted = group, present.device, False, frozenset[tuple[int, int]]()
        self.place: _Place = present.place  # type: ignore[attr-defined]
        self.generation = self.place.generation

    def regroup(self, error: DeviceLostError) -> None:
        self.group.close(error)
        self.generation, mail = self.place.meet(self.me)
        inner = _ThreadGroup(mail, self.generation.index(self.me), self.group.torch_device)
        self.group.replace(_counted(inner, self.place, self.group.present.speaks))  # type: ignore[attr-defined]

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def _counted(inner: Any, place: _Place, speaks: Callable[[], None]) -> Any:
    inner.place, inner.speaks = place, speaks
    start, agree = inner.start, inner.agree

    def started(*args: Any, **options: Any) -> Any:
        speaks()
        return start(*args, **options)

    def agreed(*args: Any, **options: Any) -> Any:
        speaks()
        return agree(*args, **options)

    inner.start, inner.agree = started, agreed
    return inner


@dataclass
class Device:
    """One device of such a training, as its work sees it.

    Attributes:
        strikes: (steps, n): it ends when, so many steps done, it speaks to the others for the n-th time.
    """

    group: ChangingGroup
    strikes: tuple[int, int] | None
    members: Members | None = None
    calls: int = 0

    def speaks(self) -> None:
        if self.strikes is not None and self.members is not None and self.members.steps >= self.strikes[0]:
            self.calls += 1
            if self.calls == self.strikes[1]:
                raise Killed


def with_losses(
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    work: Callable[[Device], T],
    strikes: Mapping[int, tuple[int, int]],
    on: Sequence[str] = ("cpu",),
) -> dict[int, T]:
    """Return the results of `work` on the surviving devices, or raise their error. `on`: see `run_on_threads`."""
    monkeypatch.setattr(members_module, "Membership", _Island)
    monkeypatch.setattr(members_module, "JoinedGroup", _ThreadGroup)
    ids = tuple(range(devices))
    place = _Place(set(ids), Generation(0, ids), _Mailboxes(devices, LIMIT_S))
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    core = this_core()

    def run(device: int) -> None:
        stay_on(core)
        here = Device(None, strikes.get(device))  # type: ignore[arg-type]
        inner = _ThreadGroup(place.mail, device, torch.device(on[device % len(on)]))
        here.group = ChangingGroup(_counted(inner, place, here.speaks))
        try:
            enter(inner.torch_device)
            results[device] = work(here)
            here.group.close()
        except BaseException as error:
            if not isinstance(error, Killed):
                errors.append(error)
            place.die(device)
            here.group.close(error)

    threads = [threading.Thread(target=run, args=(d,), name=f"device-{d}", daemon=True) for d in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive(), f"{thread.name} hangs"
    if errors:
        raise errors[0]
    return results


class Poisoned(Training):
    """A training with too large a loss in some batches, as in fp16."""

    def _backward(self, x: Tensor, y: Tensor, part: float) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(x), y) * part
        assert self.scaler is not None
        scaled = self.scaler.scale(loss) * (float("inf") if int(y[0]) == 3 else 1.0)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
