"""How tensors travel through torch.distributed: gloo through host memory, or NCCL between distinct GPUs of one kind.

For networks that are trusted, and NCCL inside one host; otherwise they travel as `streams.py` says.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, final

import torch
from torch import distributed
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore, Store, Work

from convoy.comm.accelerator import finish, in_host_memory, queued
from convoy.comm.group import Message

CONTROL = 1 << 30
"""Tags from here on belong to texts; tensors use those below."""

Tagged = tuple[int, Message]

Gloo: Any = _distributed_c10d.ProcessGroupGloo
"""Built directly, beside torch's registered groups: then a script may have its own process group, or none. Torch's type
stubs leave out the methods it inherits."""


class PeerFailure(Exception):  # noqa: N818 - inside this room only: the group makes it a DeviceLostError
    """A connection closed, or was silent for the whole time limit; `find_failed` then finds out whose fault it is."""

    def __init__(self, peers: Sequence[int], cause: RuntimeError) -> None:
        # The first sentence says it; the rest of gloo's text is for its own developers.
        self.reason = str(cause).split(". ")[0].splitlines()[0].split("] ", 1)[-1]
        super().__init__(f"message from or to device {', '.join(map(str, peers))}: {self.reason}")
        self.peers = tuple(peers)
        self.cause = cause
        self.timed_out = "timed out" in str(cause).lower() or "timeout" in str(cause).lower()


class Backend(Protocol):
    """Sends and receives the tensors of a group.

    Attributes:
        lanes: see `Group.lanes`.
    """

    lanes: int

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int) -> "PendingWork": ...

    def cut(self, broken: bool) -> None:
        """Close all connections now, so that the others notice. Broken: messages may never arrive, await none."""


class Waitable(Protocol):
    """A message under way, of any backend."""

    def wait(self, limit: timedelta) -> object:
        """RuntimeError if it failed, or took longer."""


@dataclass
class PendingWork:
    """Messages under way.

    Attributes:
        works: what to wait for, and the devices on the other side.
        staged: (staging buffer in host memory, where it belongs) of received messages.
    """

    works: list[tuple[tuple[int, ...], Waitable]]
    staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def wait(self, limit_s: float, waits_for: Callable[[int | None], None]) -> None:
        """Wait for everything, at most ``limit_s`` altogether; ``waits_for`` is told each time for whom.

        Raises:
            PeerFailure: a connection failed.
        """
        deadline_s = time.monotonic() + limit_s
        for peers, work in self.works:
            waits_for(peers[0])
            try:
                # Zero would mean no limit.
                work.wait(timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
            except RuntimeError as error:
                raise PeerFailure(peers, error) from None
        waits_for(None)
        with torch.no_grad():
            for host, target in self.staged:
                # From pinned memory this only queues the copy on the current stream; torch keeps the buffer till then.
                target.copy_(host, non_blocking=host.is_pinned())
        self.works, self.staged = [], []


@final
class Staging:
    """Brings tensors of an accelerator through pinned host memory; with ``always`` those in host memory, too."""

    def __init__(self, always: bool) -> None:
        self._always = always

    def place_for(self, tensor: torch.Tensor, work: PendingWork) -> torch.Tensor:
        """Where a message shall arrive that belongs into this tensor."""
        if not self._goes_through_host(tensor):
            return tensor
        host = in_host_memory(tensor)
        work.staged.append((host, tensor))
        return host

    def in_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, which are all on one device, in host memory; complete when this returns."""
        if not tensors or not self._goes_through_host(tensors[0]):
            return list(tensors)
        hosts = []
        for tensor in tensors:
            host = in_host_memory(tensor)
            host.copy_(tensor, non_blocking=host.is_pinned())
            hosts.append(host)
        # A tensor leaves when it is there: the device goes on meanwhile with whatever is queued behind it.
        if tensors[0].device.type != "cpu":
            queued(tensors[0].device).synchronize()
        return hosts

    def _goes_through_host(self, tensor: torch.Tensor) -> bool:
        return self._always or tensor.device.type != "cpu"


@final
class GlooBackend:
    """Tensors over gloo's TCP connections, one to every other device, moved by a thread of gloo's own.

    Tensors on an accelerator are staged through pinned host memory here, since gloo knows some kinds only, and its own
    copies of their tensors have been wrong in some releases. ``staged`` forces the same path for tensors in host memory.
    """

    lanes = 2

    def __init__(
        self, store: Store, device: int, devices: int, address: str, limit_s: float, staged: bool = False
    ) -> None:
        """Connect to all others from this machine's ``address``.

        Raises:
            RuntimeError: somebody could not be reached within ``limit_s``.
        """
        options = Gloo._Options()
        options._devices = [Gloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=max(1.0, limit_s))
        options._threads = 1  # for collectives, which Convoy does not use
        self._gloo = Gloo(PrefixStore("gloo", store), device, devices, options)
        self._staging = Staging(staged)
        self._peers = [peer for peer in range(devices) if peer != device]
        self._sent: Counter[tuple[int, int]] = Counter()  # (lane, peer) -> messages
        self._received: Counter[tuple[int, int]] = Counter()
        self._is_cut = False

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int) -> PendingWork:
        """Start messages; each gets the next tag of its lane, pair and direction.

        Raises:
            PeerFailure: a connection is closed already.
        """
        return self.start_tagged(
            [(_next_tag(self._sent, message, lane), message) for message in sends],
            [(_next_tag(self._received, message, lane), message) for message in receives],
        )

    def start_tagged(self, sends: Sequence[Tagged], receives: Sequence[Tagged]) -> PendingWork:
        """Start messages under tags that both sides know, each unique among those under way between the pair."""
        work = PendingWork([])
        # Receives first: what arrives for a posted receive goes straight to its place.
        for tag, message in receives:
            tensor = self._staging.place_for(message.tensor, work)
            work.works.append(self._begin(self._gloo.recv, tensor, message.peer, tag))
        tensors = self._staging.in_host([message.tensor.detach() for _, message in sends])
        for (tag, message), tensor in zip(sends, tensors, strict=True):
            work.works.append(self._begin(self._gloo.send, tensor, message.peer, tag))
        return work

    def cut(self, broken: bool) -> None:  # noqa: ARG002 - it never waits for messages
        if self._is_cut:
            return
        self._is_cut = True
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in self._peers:
            # Messages under way keep the connections open even when the group is dropped; gloo closes all of them at
            # once when a wait runs out of time. Nobody sends under this tag. Where a connection is closed already, the wait for
            # it ends at once, and closes no other.
            with suppress(RuntimeError):
                self._gloo.recv([nothing], peer, (1 << 31) - 1).wait(timedelta(milliseconds=1))
        del self._gloo

    def _begin(
        self, verb: Callable[[list[torch.Tensor], int, int], Work], tensor: torch.Tensor, peer: int, tag: int
    ) -> tuple[tuple[int, ...], Work]:
        try:
            return (peer,), verb([tensor], peer, tag)
        except RuntimeError as error:
            raise PeerFailure((peer,), error) from None


def _next_tag(counters: Counter[tuple[int, int]], message: Message, lane: int) -> int:
    """The lane, 14 bits of the message's number on its way, 15 bits of its size.

    Gloo ends the process when a message is longer than its receiver expects, and says nothing when it is shorter.
    With the size in the tag such messages never meet, and the devices are found waiting in a circle.
    """
    number = counters[lane, message.peer] & 0x3FFF
    counters[lane, message.peer] += 1
    size_bytes = message.tensor.numel() * message.tensor.element_size()
    return lane << 29 | number << 15 | (size_bytes * 2654435761 >> 12) & 0x7FFF


@final
class NcclBackend:
    """Tensors straight from GPU to GPU. Only where every device of the job is a GPU of its own, all of one kind.

    It joins torch's default process group, or makes it, because that is where torch offers batches of messages.
    """

    lanes = 1
    """NCCL matches messages by the order in which they are started, and has nothing like a tag."""

    def __init__(self, store: Store, device: int, devices: int, torch_device: torch.device, limit_s: float) -> None:
        # The limit of each wait is ours. NCCL's own ends the whole process, so it comes later.
        limit = timedelta(seconds=2 * limit_s + 60)
        self._owns_world = not distributed.is_initialized()
        if self._owns_world:
            distributed.init_process_group(
                "nccl",
                store=PrefixStore("nccl", store),
                rank=device,
                world_size=devices,
                timeout=limit,
                device_id=torch_device,
            )
            self._group = distributed.group.WORLD
        else:
            self._group = distributed.new_group(backend="nccl", timeout=limit, device_id=torch_device)
        # Batches of messages between some devices only are allowed once all have met in a collective.
        distributed.all_reduce(torch.zeros(1, device=torch_device), group=self._group)
        finish(torch_device)

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int) -> PendingWork:  # noqa: ARG002
        if not sends and not receives:
            return PendingWork([])
        operations = [distributed.P2POp(distributed.isend, m.tensor.detach(), m.peer, self._group) for m in sends]
        operations += [distributed.P2POp(distributed.irecv, m.tensor, m.peer, self._group) for m in receives]
        peers = tuple(dict.fromkeys(message.peer for message in (*receives, *sends)))
        try:
            return PendingWork([(peers, work) for work in distributed.batch_isend_irecv(operations)])
        except RuntimeError as error:
            raise PeerFailure(peers, error) from None

    def cut(self, broken: bool) -> None:
        if self._group is None or not distributed.is_initialized():
            return
        # None means torch's default group, together with all others.
        group = None if self._owns_world else self._group
        self._group = None
        if broken:
            distributed.distributed_c10d._abort_process_group(group)
        else:
            distributed.destroy_process_group(group)


def can_use_nccl(devices: Sequence[str], names: Sequence[str], hosts: Sequence[str]) -> bool:
    """Whether all devices are distinct GPUs of one kind, and this build of torch has NCCL."""
    distinct = len(set(zip(hosts, devices, strict=True))) == len(devices)
    all_cuda = all(device.startswith("cuda") for device in devices)
    return distinct and all_cuda and len(set(names)) == 1 and distributed.is_nccl_available()
