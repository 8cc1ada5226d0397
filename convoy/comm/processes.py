"""A group of processes: join() takes the place that torchrun's environment names."""

import atexit
import itertools
import json
import os
import queue
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar, final

import torch

from convoy.comm.backends import CONTROL, Carrier, Flight, GlooCarrier, NcclCarrier, PeerFailure, can_use_nccl
from convoy.comm.environment import Place, own_address, pick_device, reachable_address, read_place
from convoy.comm.failure import DONE_CAUSE, Answer, Door, Note, Silence, find_lost
from convoy.comm.group import AloneGroup, CountedGroup, Group, Message, Pending, closed_error
from convoy.comm.rendezvous import Greeting, Meeting, own_greeting, store_at, title
from convoy.errors import ConvoyError, DeviceLostError, InputError

T = TypeVar("T")

FAREWELL_S = 5.0
"""How long a device that is done waits for the others to be done, so that no connection closes under a message."""

_meetings = itertools.count()


def join(device: str | torch.device | None = None, timeout_s: float = 60.0, *, staged: bool = False) -> Group:
    """Join the job that this process belongs to, and meet the others; a group of one where there is no job.

    The job is what torchrun's environment says: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
    The group closes itself at the end of the process, or of a ``with`` block.

    Args:
        device: where to compute, such as "cpu" or "cuda:1". By default CONVOY_DEVICE, else the GPU of this process's
            number on its machine, else the CPU.
        timeout_s: how long to wait for the others here, and in every later wait, before they count as lost.
        staged: send tensors through buffers in host memory even where that is not needed.

    Raises:
        InputError: an incomplete environment, no such device, a port that is taken, a place claimed twice.
        MismatchError: the devices run different versions.
        DeviceLostError: somebody did not come in time, or cannot be reached.
    """
    watch_parent()
    if not timeout_s > 0:
        raise InputError(f"timeout_s={timeout_s}: a time limit is a number of seconds above 0, such as 60")
    place = read_place(os.environ)
    torch_device = pick_device(device, place.local if place else 0)
    if place is None or place.devices == 1:
        return AloneGroup(torch_device, timeout_s)
    try:
        # Torch's store and gloo wait out of reach of signals, some of it without a limit.
        return within(timeout_s + 5.0, lambda: _join(place, torch_device, timeout_s, staged))
    except TimeoutError:
        raise DeviceLostError(
            0, f"device 0 was lost: its store at {place.host} port {place.port} does not answer; start the job again"
        ) from None


def _join(place: Place, torch_device: torch.device, timeout_s: float, staged: bool) -> Group:
    deadline_s = time.monotonic() + timeout_s
    address = own_address(place.host, place.port)
    try:
        meeting = Meeting(store_at(place, deadline_s), place, next(_meetings), deadline_s)
        greetings = meeting.greet(own_greeting(torch_device, place.devices, address))
        address = reachable_address(address, [greeting.address for greeting in greetings])
        group = JoinedGroup(place.device, torch_device, timeout_s, greetings)
        try:
            group.connect(meeting, address, staged)
        except BaseException as error:
            group.close(error)
            raise
    except RuntimeError as error:
        raise DeviceLostError(
            0,
            f"device 0 was lost: the store at {place.host} port {place.port}, kept by it or its launcher, failed "
            f"({str(error).splitlines()[0]}); start the job again",
        ) from error
    atexit.register(group.close_at_exit)
    return group


@final
class JoinedGroup(CountedGroup):
    """This process in a group of processes. Made by :func:`join`."""

    def __init__(self, device: int, torch_device: torch.device, timeout_s: float, greetings: Sequence[Greeting]):
        super().__init__(device, len(greetings), torch_device, timeout_s)
        self.greetings = tuple(greetings)
        self._status = Answer()
        self._waits_for: list[int | None] = [None] * self.lanes
        self._losing = threading.Lock()
        self._agreed = 0
        self._told = False
        self._closed = False
        self._process = os.getpid()
        self._door: Door | None = None
        self._gloo: GlooCarrier | None = None
        self._carrier: Carrier | None = None
        self._under_way: set[_InFlight] = set()

    def connect(self, meeting: Meeting, address: str, staged: bool) -> None:
        """Open the connections to all others."""
        door = self._door = Door(self.device, address, self.greetings[0].nonce, lambda: self._status)
        texts = meeting.gather("door", json.dumps(door.address))
        door.addresses = [(str(host), int(port)) for host, port in map(json.loads, texts)]
        for peer in range(self.devices):
            if peer != self.device:
                self._check_reach(door, peer)
        limit_s = meeting.deadline_s - time.monotonic()
        try:
            self._gloo = GlooCarrier(meeting.store, self.device, self.devices, address, limit_s, staged)
        except RuntimeError as error:
            raise self._unconnected(door, address, str(error).splitlines()[0]) from error
        self._carrier = self._gloo
        hosts, names = [each.host for each in self.greetings], [each.name for each in self.greetings]
        if can_use_nccl([each.device for each in self.greetings], names, hosts):
            self._carrier = NcclCarrier(meeting.store, self.device, self.devices, self.torch_device, self.timeout_s)
            self.lanes = self._carrier.lanes

    def _check_reach(self, door: Door, peer: int) -> None:
        if isinstance(silence := door.knock(peer), Silence):
            host, port = door.addresses[peer]
            raise DeviceLostError(
                peer,
                f"{self._title(peer)} came, but device {self.device} at {door.address[0]} cannot reach it at {host} "
                f"port {port} ({silence.value}): open the ports between the machines, or name the interface that "
                "leads there in GLOO_SOCKET_IFNAME",
            )

    def _unconnected(self, door: Door, address: str, reason: str) -> ConvoyError:
        for peer in range(self.devices):
            if (note := door.note_from(peer, 0.0)) is not None:
                return DeviceLostError(note.root, f"{self._title(note.root)} {note.cause}")
            if peer != self.device and isinstance(silence := door.knock(peer), Silence):
                return DeviceLostError(peer, f"{self._title(peer)} was lost before the job began: {silence.value}")
        return ConvoyError(
            f"device {self.device} met all others, but gloo could not connect to them from {address} within "
            f"{self.timeout_s:g} s ({reason}): it uses any port from 1024 up, open them between the machines"
        )

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        sends, receives = self._admit(sends, receives, lane)
        try:
            return _InFlight(self, _present(self._carrier).start(sends, receives, lane), lane)
        except PeerFailure as failure:
            raise self._lose(failure) from failure

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        self._raise_failure()
        try:
            pages = self._swap_pages(_page(topic, text), self.timeout_s)
        except PeerFailure as failure:
            raise self._lose(failure) from failure
        topics, texts = zip(*(json.loads(each) for each in pages), strict=True)
        self._check_topics(topic, topics)
        return tuple(texts)

    def _swap_pages(self, page: bytes, limit_s: float) -> list[bytes]:
        """Everybody's page, in device order: first the lengths travel, then the pages."""
        tag = CONTROL + 2 * self._agreed % (CONTROL - 2)
        self._agreed += 1
        peers = [peer for peer in range(self.devices) if peer != self.device]
        mine = torch.frombuffer(bytearray(page), dtype=torch.uint8)
        lengths = {peer: torch.zeros(1, dtype=torch.int64) for peer in peers}
        self._swap(tag, torch.tensor([len(page)]), lengths, limit_s)
        pages = {peer: torch.empty(int(lengths[peer]), dtype=torch.uint8) for peer in peers}
        self._swap(tag + 1, mine, pages, limit_s)
        pages[self.device] = mine
        return [pages[device].numpy().tobytes() for device in range(self.devices)]

    def _swap(self, tag: int, mine: torch.Tensor, theirs: dict[int, torch.Tensor], limit_s: float) -> None:
        flight = _present(self._gloo).start_tagged(
            [(tag, Message(peer, mine)) for peer in theirs],
            [(tag, Message(peer, tensor)) for peer, tensor in theirs.items()],
        )
        flight.land(limit_s, self._wait_for)

    def _land(self, flight: Flight, lane: int) -> None:
        try:
            flight.land(self.timeout_s, lambda peer: self._wait_for(peer, lane))
        except PeerFailure as failure:
            raise self._lose(failure) from failure

    def _wait_for(self, peer: int | None, lane: int = 0) -> None:
        # The door's thread reads this. It stays set after a failure, so that others can follow it.
        self._waits_for[lane] = peer
        if not self._status.done:
            self._status = Answer(next((each for each in self._waits_for if each is not None), None))

    def _lose(self, failure: PeerFailure) -> ConvoyError:
        """Find out who was lost, tell the others, and leave; where another lane was first, what it found."""
        with self._losing:
            return self.failure or self._find_lost(failure)

    def _find_lost(self, failure: PeerFailure) -> DeviceLostError:
        door = _present(self._door)
        peer = failure.peers[0]
        if len(failure.peers) > 1:
            peer = next((each for each in failure.peers if isinstance(door.knock(each), Silence)), peer)
        verdict = find_lost(door, self.device, peer, failure.timed_out, self.timeout_s)
        error = DeviceLostError(verdict.device, f"{self._title(verdict.device)} {verdict.cause}")
        self.failure = error
        self._tell(Note(self.device, verdict.device, verdict.cause))
        self._cut(broken=True)
        return error

    def _title(self, device: int) -> str:
        return title(device, self.greetings[device])

    def _tell(self, note: Note) -> None:
        if not self._told and self._door is not None and self._door.addresses:
            self._told = True
            self._door.leave_notes(note)

    def _cut(self, broken: bool) -> None:
        for carrier in (self._gloo, self._carrier):
            if carrier is not None:
                carrier.cut(broken)

    def close(self, error: BaseException | None = None) -> None:
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close_at_exit)
        if (reason := error or self.failure) is None:
            self._part()
        else:
            cause = f"left because of its own error: {type(reason).__name__}: {reason}"[:4000]
            self._tell(Note(self.device, self.device, cause))
        self._cut(broken=self.failure is not None or error is not None)
        self.failure = self.failure or closed_error()
        self._under_way.clear()
        if self._door is not None:
            self._door.close()

    def _part(self) -> None:
        """Wait a little for the others to be done as well."""
        self._status = Answer(done=True)
        try:
            self._swap_pages(_page("the end of its work", ""), min(FAREWELL_S, self.timeout_s))
        except PeerFailure:
            self._tell(Note(self.device, self.device, DONE_CAUSE))

    def close_at_exit(self) -> None:
        """Close with the error that ends this process, if one does: the interpreter has kept it."""
        self.close(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


@final
class _InFlight:
    def __init__(self, group: JoinedGroup, flight: Flight, lane: int) -> None:
        self.group = group
        self.flight = flight
        self.lane = lane
        if flight.works:
            # Gloo forgets a message whose handle is dropped, on this side only, and the next ones never arrive.
            group._under_way.add(self)

    def wait(self) -> None:
        if not self.flight.works:
            return
        self.group._raise_failure()
        self.group._land(self.flight, self.lane)
        self.group._under_way.discard(self)


def _page(topic: str, text: str) -> bytes:
    return json.dumps([topic, text]).encode()


def _present(part: T | None) -> T:
    if part is None:
        raise ConvoyError("this group is not connected: make groups with join()")
    return part


def within(limit_s: float, work: Callable[[], T]) -> T:
    """The result of ``work``, run on a thread so that a signal or the limit can end the wait for it.

    Raises:
        TimeoutError: it took longer. The thread is left behind; it cannot keep the process alive.
    """
    outcome: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="convoy-join", daemon=True).start()
    try:
        result, error = outcome.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"not done after {limit_s:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def watch_parent() -> None:
    """End this process as soon as the launcher that started it is gone, even if it was killed. Otherwise do nothing.

    The launcher alone holds the other end of a pipe, whose number it gives in CONVOY_PARENT_PIPE.
    """
    # Taken out of the environment: in a process started from here the number would mean another file.
    number = os.environ.pop("CONVOY_PARENT_PIPE", "")
    if not number.isdecimal():
        return
    pipe = int(number)
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return
    except OSError:
        return
    os.set_inheritable(pipe, False)

    def watch() -> None:
        while os.read(pipe, 1):
            pass
        with suppress(OSError):  # the launcher may have been the reader
            os.write(2, b"error: the launcher of this device is gone, so it ends too\n")
        os._exit(2)

    threading.Thread(target=watch, name="convoy-parent", daemon=True).start()
