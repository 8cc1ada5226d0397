"""What carries the tensors of a group, and NCCL between distinct GPUs of one kind: inside one host, or on a trusted network.

Otherwise they travel as `streams.py` says.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, final

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store

from convoy.comm.group import Message
from convoy.machine.accelerator import finish, in_host_memory, queued


class PeerFailure(Exception):  # noqa: N818 - inside this room only: the group makes it a DeviceLostError
    """A connection closed, or was silent for the whole time limit; `find_failed` then finds out whose fault it is."""

    def __init__(self, peers: Sequence[int], cause: RuntimeError) -> None:
        # The first sentence says it; the rest of a library's text is for its own developers.
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
        copied: behind the copies of sent tensors to host memory; None: nothing was copied.
    """

    works: list[tuple[tuple[int, ...], Waitable]]
    staged: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    copied: torch.Event | None = None

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
        if self.copied is not None:  # what comes behind on this stream may overwrite a tensor that was sent
            self.copied.wait(torch.accelerator.current_stream(self.copied.device))
        with torch.no_grad():
            for host, target in self.staged:
                # From pinned memory this only queues the copy on the current stream; torch keeps the buffer till then.
                target.copy_(host, non_blocking=host.is_pinned())
        self.works, self.staged, self.copied = [], [], None


@final
class Staging:
    """Brings tensors of an accelerator through pinned host memory; with ``always`` those in host memory, too.

    Copies to the host of lane 0 run on a stream of their own, behind what the current stream was given before: they do not wait
    for kernels that are queued later. Who sends on another lane has a stream of its own already. The thread that starts copies
    waits for nothing.
    """

    def __init__(self, always: bool) -> None:
        self._always = always
        self._stream: torch.Stream | None = None

    def place_for(self, tensor: torch.Tensor, work: PendingWork) -> torch.Tensor:
        """Where a message shall arrive that belongs into this tensor."""
        if not self._goes_through_host(tensor):
            return tensor
        host = in_host_memory(tensor)
        work.staged.append((host, tensor))
        return host

    def in_host(self, tensors: Sequence[torch.Tensor], work: PendingWork, lane: int) -> list[torch.Tensor]:
        """Copy tensors, all of one device, to host memory, each once. They are complete behind ``work.copied``."""
        if not tensors or not self._goes_through_host(tensors[0]):
            return list(tensors)
        hosts = {id(tensor): in_host_memory(tensor) for tensor in tensors}
        device = tensors[0].device
        if device.type == "cpu":
            for tensor in tensors:
                hosts[id(tensor)].copy_(tensor)
            return [hosts[id(tensor)] for tensor in tensors]
        stream = torch.accelerator.current_stream(device)
        if lane == 0:
            stream = self._stream = self._stream or torch.Stream(device)
            queued(device).wait(stream)
        with stream:
            for tensor in {id(tensor): tensor for tensor in tensors}.values():
                hosts[id(tensor)].copy_(tensor, non_blocking=True)
                if lane == 0:
                    tensor.record_stream(stream)  # its owner may drop it before it is copied
            work.copied = queued(device)
        return [hosts[id(tensor)] for tensor in tensors]

    def _goes_through_host(self, tensor: torch.Tensor) -> bool:
        return self._always or tensor.device.type != "cpu"


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
