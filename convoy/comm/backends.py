"""Track messages in progress, and send tensors with NCCL.

NCCL is used between distinct GPUs of one kind, on one host or a trusted network. `streams.py` does everything else.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, Self, final

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store

from convoy.comm.failure import Verdict
from convoy.comm.group import Message
from convoy.machine.accelerator import finish


class MessageError(Exception):
    """The error for a message whose connection closed or timed out.

    Only Convoy raises it. A signal handler may raise any other exception during a wait: torch raises RuntimeError when a
    loader worker was killed.
    """

    def again(self) -> Self:
        """Return a copy to raise; see `ConvoyError.again`."""
        return type(self)(*self.args)


class OverdueError(MessageError):
    """The error for a message that takes longer than the limit of a wait. A caller may wait for it again."""


class PeerFailure(Exception):  # noqa: N818 - inside this package only: the group makes it a DeviceLostError
    """The error for a connection that closed or timed out. `find_failed` then finds the failed device."""

    def __init__(self, peers: Sequence[int], cause: Exception) -> None:
        super().__init__(f"message from or to device {', '.join(map(str, peers))}: {cause}")
        self.peers = tuple(peers)
        self.cause = cause
        timed_out = "timed out" in str(cause).lower() or "timeout" in str(cause).lower()
        self.silent_s = 0.0 if timed_out else None  # how long nothing came; None: the connection closed
        self.verdict: Verdict | None = None  # if it is known already


class Waitable(Protocol):
    """A message in progress, of any backend."""

    def wait(self, limit: timedelta) -> object:
        """Wait for completion. MessageError if it failed or took longer than `limit`."""


@dataclass
class PendingWork:
    """Messages in progress.

    Attributes:
        works: peers and handle of each message in progress.
        staged: (host buffer, target tensor) of received messages.
        copied: event after the copies of sent tensors to host memory.
    """

    works: list[tuple[tuple[int, ...], Waitable]]
    staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    copied: torch.Event | None = None

    def wait(self, limit_s: float, waits_for: Callable[[int | None], None]) -> None:
        """Wait for all messages, at most ``limit_s`` in total. Call ``waits_for`` with each peer, then with None."""
        deadline_s = time.monotonic() + limit_s
        for peers, work in self.works:
            waits_for(peers[0])
            try:
                # zero would mean no limit
                work.wait(timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
            except MessageError as error:
                raise PeerFailure(peers, error) from None
        waits_for(None)
        if self.copied is not None:  # later work on this stream may overwrite a sent tensor
            self.copied.wait(torch.accelerator.current_stream(self.copied.device))
        with torch.no_grad():
            for host, target in self.staged:
                # From pinned memory this only queues the copy; torch keeps the buffer until the copy is done.
                target.copy_(host, non_blocking=host.is_pinned())
        self.works, self.staged, self.copied = [], [], None


@final
class NcclBackend:
    """A backend that sends tensors directly between distinct GPUs of the same kind.

    If torch has no default process group yet, it creates one, because torch's batched messages need it.
    """

    lanes = 1
    """NCCL matches messages by their order and has no tags."""

    def __init__(self, store: Store, device: int, devices: int, torch_device: torch.device, limit_s: float) -> None:
        # NCCL's timeout ends the whole process, so it must be longer than Convoy's own limit of each wait.
        limit = timedelta(seconds=2 * limit_s + 60)
        self._owns_world = not distributed.is_initialized()
        if self._owns_world:
            prefixed = PrefixStore("nccl", store)
            distributed.init_process_group(
                "nccl", store=prefixed, rank=device, world_size=devices, timeout=limit, device_id=torch_device
            )
            self._group = distributed.group.WORLD
        else:
            self._group = distributed.new_group(backend="nccl", timeout=limit, device_id=torch_device)
        # torch allows batched messages between a subset of devices only after a collective of all.
        distributed.all_reduce(torch.zeros(1, device=torch_device), group=self._group)
        finish(torch_device)

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int) -> PendingWork:  # noqa: ARG002
        if not sends and not receives:
            return PendingWork([])
        operations = [distributed.P2POp(distributed.isend, m.tensor.detach(), m.peer, self._group) for m in sends]
        operations += [distributed.P2POp(distributed.irecv, m.tensor, m.peer, self._group) for m in receives]
        peers = tuple(dict.fromkeys(message.peer for message in (*receives, *sends)))
        try:
            return PendingWork([(peers, _NcclMessage(work)) for work in distributed.batch_isend_irecv(operations)])
        except RuntimeError as error:
            raise PeerFailure(peers, error) from None

    def cut(self, broken: bool) -> None:
        """Close all connections now. If `broken`, do not wait for messages."""
        if self._group is None or not distributed.is_initialized():
            return
        # None means torch's default group and all others.
        group = None if self._owns_world else self._group
        self._group = None
        if broken:
            distributed.distributed_c10d._abort_process_group(group)
        else:
            distributed.destroy_process_group(group)


@dataclass(slots=True)
class _NcclMessage:
    work: distributed.Work

    def wait(self, limit: timedelta) -> None:
        try:
            self.work.wait(limit)
        except RuntimeError as error:
            raise MessageError(str(error)) from None


def can_use_nccl(devices: Sequence[str], names: Sequence[str], hosts: Sequence[str]) -> bool:
    """Return whether all devices are distinct GPUs of one kind and torch has NCCL."""
    distinct = len(set(zip(hosts, devices, strict=True))) == len(devices)
    all_cuda = all(device.startswith("cuda") for device in devices)
    return distinct and all_cuda and len(set(names)) == 1 and distributed.is_nccl_available()
