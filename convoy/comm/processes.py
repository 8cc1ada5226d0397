"""A group of processes: join() takes the rank that the environment names."""

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
from typing import Any, TypeVar, final

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from convoy.comm import roster
from convoy.comm.accelerator import limit_memory, pick_device
from convoy.comm.backends import Backend, NcclBackend, PeerFailure, PendingWork, can_use_nccl
from convoy.comm.changing import ChangingGroup
from convoy.comm.channel import Credentials
from convoy.comm.door import Door
from convoy.comm.environment import (
    JOIN,
    LISTEN,
    ProcessEnv,
    listen_at,
    own_address,
    reachable_address,
    read_process_env,
)
from convoy.comm.failure import (
    DONE_CAUSE,
    REPORT_S,
    FailureReport,
    Health,
    HealthServer,
    NoAnswer,
    Verdict,
    find_failed,
    told,
)
from convoy.comm.group import AloneGroup, CountedGroup, Group, Message, Pending, closed_error
from convoy.comm.place import own_place
from convoy.comm.rendezvous import (
    ProcessInfo,
    Rendezvous,
    credentials_of,
    leave_store,
    own_info,
    store_at,
    store_on,
    title,
    visit_store,
)
from convoy.comm.streams import TEXTS, StreamBackend, WrongSizeError
from convoy.errors import ConvoyError, DeviceLostError, InputError, shown
from convoy.fleet.units import quantity

T = TypeVar("T")

MOST_TIMEOUT_S = 1e6

FAREWELL_S = 5.0
"""How long a device that is done waits for the others to be done, so that no connection closes under a message."""

_rendezvous_count = itertools.count()


def join(device: str | torch.device | None = None, timeout_s: float = 60.0, *, staged: bool = False) -> Group:
    """Join the job that this process belongs to, and meet the others; a group of one where there is no job.

    The job is what torchrun's environment says: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
    The group closes itself at the end of the process, or of a ``with`` block.

    Args:
        device: where to compute, such as "cpu" or "cuda:1". By default CONVOY_DEVICE, else the accelerator of this
            process's number on its machine, else the CPU.
        timeout_s: how long to wait for the others here, and in every later wait, before they count as lost.
        staged: send tensors through buffers in host memory even where that is not needed.

    Raises:
        InputError: an incomplete environment, no such device, a port that is taken, a rank or an accelerator claimed twice.
        MismatchError: the devices run different versions.
        DeviceLostError: somebody did not come in time, or cannot be reached.
    """
    watch_parent()
    if not 0 < timeout_s <= MOST_TIMEOUT_S:
        raise InputError(
            f"timeout_s={timeout_s}: a time limit is a number of seconds above 0, at most {MOST_TIMEOUT_S:g}, such as 60"
        )
    env = read_process_env(os.environ)
    torch_device = own_device(device, env.local if env else 0)
    job = f"process {os.getpid()}" if env is None else f"{env.host}:{env.port}"
    roster.enter(job, env.device if env else 0, str(torch_device))
    if doors := os.environ.pop(JOIN, ""):
        return coming_alone(doors, torch_device, timeout_s)
    if env is None or env.devices == 1:
        alone = AloneGroup(torch_device, timeout_s)
        return ChangingGroup(alone) if os.environ.get(LISTEN) else alone
    try:
        # Torch's store waits out of reach of signals, some of it without a limit.
        group = ChangingGroup(within(timeout_s + 5.0, lambda: meet(env, torch_device, timeout_s, staged)))
    except TimeoutError:
        raise DeviceLostError(
            0, f"device 0 was lost: its store at {env.host} port {env.port} does not answer; start the job again"
        ) from None
    group.is_of_this_process()
    return group


def own_device(name: str | torch.device | None, local: int) -> torch.device:
    """What this process computes on, with no more memory than its launcher allows.

    Raises:
        InputError: no such device; a limit that is none.
    """
    device = pick_device(name, local)
    if limit := os.environ.get("CONVOY_MEMORY"):
        limit_memory(device, _bytes_of(limit))
    return device


def coming_alone(doors: str, torch_device: torch.device, timeout_s: float) -> Group:
    """A group of one, of a process that comes into the training of a script; it goes on alone until that lets it in.

    Args:
        doors: HOST:PORT where its devices answer; several with commas.

    Raises:
        InputError, MismatchError: there is no such training, or it was started by another version.
    """
    from convoy.comm.newcomer import ask_to_join  # which imports this file

    places = [text.rpartition(":") for text in doors.split(",")]
    entrance, told = ask_to_join([(host.strip("[]"), int(port)) for host, _, port in places])
    if "script" not in told:
        raise InputError("the job there is a `convoy train`: `convoy join` comes into it, without a script")
    roster.enter(str(told["job"]), 0, str(torch_device))
    group = ChangingGroup(AloneGroup(torch_device, timeout_s))
    group.entrance = entrance
    group.is_of_this_process()
    return group


GREETING_S = 10.0
"""How long a device that has come may need to answer another one for the first time."""


def _bytes_of(limit: str) -> float:
    try:
        return quantity(limit, "bytes")
    except InputError as error:
        raise InputError(f"CONVOY_MEMORY={shown(limit)}: {error}") from None


def meet(
    env: ProcessEnv,
    torch_device: torch.device,
    timeout_s: float,
    staged: bool,
    number: int | None = None,
    credentials: Credentials | None = None,
) -> "JoinedGroup":
    """Meet the other processes, and connect to them.

    Args:
        number: of the meeting at this store; None: so many of this process went before.
        credentials: of the job, where they are known already; to make them takes about 10 ms.

    Raises:
        InputError, MismatchError, DeviceLostError: see :func:`join`.
    """
    deadline_s = time.monotonic() + timeout_s
    address = own_address(env.host, env.port)
    try:
        credentials = credentials or credentials_of(env)
        store = store_at(env, deadline_s, credentials)
        rendezvous = Rendezvous(store, env, next(_rendezvous_count) if number is None else number, deadline_s)
        infos = rendezvous.exchange_infos(own_info(torch_device, env.devices, address))
        address = reachable_address(address, [info.address for info in infos])
        door = Door(listen_at(address, 0), credentials)
        health = HealthServer(env.device, door, infos[0].nonce)
        group = JoinedGroup(torch_device, timeout_s, infos, health, staged)
        try:
            group.connect(rendezvous, address, staged)
        except BaseException as error:
            group.close(error)
            raise
        leave_store(env.host, env.port)
    except RuntimeError as error:
        raise DeviceLostError(
            0,
            f"device 0 was lost: the store at {env.host} port {env.port}, kept by it or its launcher, failed "
            f"({str(error).splitlines()[0]}); start the job again",
        ) from error
    atexit.register(group.close_at_exit)
    return group


@final
class JoinedGroup(CountedGroup):
    """This process in a group of processes. Made by :func:`join`."""

    _first: StreamBackend
    _backend: Backend

    def __init__(
        self,
        torch_device: torch.device,
        timeout_s: float,
        infos: Sequence[ProcessInfo],
        health: HealthServer,
        staged: bool = False,
    ) -> None:
        super().__init__(health.device, len(infos), torch_device, timeout_s)
        self.infos = tuple(infos)
        self.staged, self.address, self.token = staged, health.address[0], health.token
        self.credentials = health.door.credentials
        self.report_s = REPORT_S  # a process that knows of itself who is lost needs not wait so long
        self._health = health
        self._connected: list[Backend] = []
        self._health.waits_for = [None] * self.lanes
        self._failing = threading.Lock()
        self._told = False
        self._closed = False
        self._process = os.getpid()
        self._under_way: set[_PendingMessages] = set()

    @property
    def strangers(self) -> int:
        return sum(self._health.door.strangers.values())

    def connect(self, rendezvous: Rendezvous, address: str, staged: bool) -> None:
        """Open the connections to all others."""
        texts = rendezvous.gather("health", json.dumps(self._health.address))
        self._health.addresses = [(str(host), int(port)) for host, port in map(json.loads, texts)]
        for peer in range(self.devices):
            if peer != self.device and isinstance(silence := self._greeted(peer, rendezvous.deadline_s), NoAnswer):
                host, port = self._health.addresses[peer]
                raise DeviceLostError(
                    peer,
                    f"{self._title(peer)} came, but device {self.device} at {address} cannot reach it at {host} port "
                    f"{port} ({silence.value}): open the ports between the machines, or name the interface that leads "
                    "there in GLOO_SOCKET_IFNAME",
                )
        limit_s = rendezvous.deadline_s - time.monotonic()
        door, peers = self._health.door, self._health.addresses
        trusted = door.credentials.key is None
        try:
            self._first = StreamBackend(door, peers, self.device, self._health.token, limit_s, staged)
        except RuntimeError as error:
            raise self._unconnected(address, str(error).splitlines()[0]) from error
        self._backend = self._first
        self._connected.append(self._first)
        hosts, names = [each.host for each in self.infos], [each.name for each in self.infos]
        if can_use_nccl([each.device for each in self.infos], names, hosts) and (trusted or len(set(hosts)) == 1):
            whole: Any = rendezvous.whole  # torch's own, where there is no key
            store = PrefixStore(rendezvous.prefix, whole) if trusted else self._store_for_nccl(rendezvous)
            self._backend = NcclBackend(store, self.device, self.devices, self.torch_device, self.timeout_s)
            self._connected.append(self._backend)
            self.lanes = self._backend.lanes
        try:  # nobody leaves the meeting before all have all connections
            self._swap_pages(["all are connected", "", None], max(1.0, rendezvous.deadline_s - time.monotonic()))
        except PeerFailure as failure:
            raise self._fail(failure) from failure

    def _greeted(self, peer: int, deadline_s: float) -> Health | NoAnswer:
        """The first answer of another device. One that connects and is slow is asked again: who begins is busy."""
        until_s = min(deadline_s, time.monotonic() + GREETING_S)
        while True:
            answer = self._health.ping(peer)
            if answer is not NoAnswer.FROZEN or time.monotonic() > until_s:
                return answer

    def _store_for_nccl(self, rendezvous: Rendezvous) -> TCPStore:
        """A store of torch's on this machine alone: NCCL wants one, here only between the GPUs of one host."""
        store = store_on(listen_at("127.0.0.1", 0)) if self.device == 0 else None
        port = rendezvous.gather("nccl", str(store.port) if store is not None else "")[0]
        return store or visit_store("127.0.0.1", int(port), rendezvous.deadline_s)

    def _unconnected(self, address: str, reason: str) -> ConvoyError:
        for peer in range(self.devices):
            if (report := self._health.report_from(peer, 0.0)) is not None:
                return DeviceLostError(report.root, f"{self._title(report.root)} {report.cause}")
            if peer != self.device and isinstance(silence := self._health.ping(peer), NoAnswer):
                return DeviceLostError(peer, f"{self._title(peer)} was lost before the job began: {silence.value}")
        return ConvoyError(
            f"device {self.device} met all others, but could not connect to them from {address} within "
            f"{self.timeout_s:g} s ({reason}): any port from 1024 up is used, open them between the machines"
        )

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        sends, receives = self._admit(sends, receives, lane)
        on_host = any(message.tensor.device.type == "cpu" for message in (*sends, *receives))
        backend = self._first if on_host else self._backend  # NCCL carries nothing that lies on the host
        try:
            return _PendingMessages(self, backend.start(sends, receives, lane), lane)
        except PeerFailure as failure:
            raise self._fail(failure) from failure

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        self._raise_failure()
        try:
            pages = self._swap_pages([topic, text, own_place()], self.timeout_s)
        except PeerFailure as failure:
            raise self._fail(failure) from failure
        topics, texts, places = zip(*(json.loads(page) for page in pages), strict=True)
        self._check_topics(topic, topics, places)
        return tuple(texts)

    def _swap_pages(self, page: list[str | None], limit_s: float) -> list[bytes]:
        """Everybody's page as JSON, in device order: first the lengths travel, then the pages."""
        peers = [peer for peer in range(self.devices) if peer != self.device]
        mine = torch.frombuffer(bytearray(json.dumps(page).encode()), dtype=torch.uint8)
        lengths = {peer: torch.zeros(1, dtype=torch.int64) for peer in peers}
        self._swap(torch.tensor([len(mine)]), lengths, limit_s)
        pages = {peer: torch.empty(int(lengths[peer]), dtype=torch.uint8) for peer in peers}
        self._swap(mine, pages, limit_s)
        pages[self.device] = mine
        return [pages[device].numpy().tobytes() for device in range(self.devices)]

    def _swap(self, mine: torch.Tensor, theirs: dict[int, torch.Tensor], limit_s: float) -> None:
        sends = [Message(peer, mine) for peer in theirs]
        receives = [Message(peer, tensor) for peer, tensor in theirs.items()]
        self._first.start(sends, receives, TEXTS).wait(limit_s, self._wait_for)

    def _wait_for(self, peer: int | None, lane: int = 0) -> None:
        # It stays set after a failure, so that others can follow it.
        self._health.waits_for[lane] = peer

    def _fail(self, failure: PeerFailure) -> ConvoyError:
        """Find out which device failed, tell the others, and leave; where another lane was first, what it found."""
        with self._failing:
            if self.failure is None:
                peer = failure.peers[0]
                if len(failure.peers) > 1:
                    silent = (each for each in failure.peers if isinstance(self._health.ping(each), NoAnswer))
                    peer = next(silent, peer)
                if isinstance(failure.cause, WrongSizeError):
                    answer = self._health.ping(peer)
                    theirs = None if isinstance(answer, NoAnswer) else answer.place
                    places = {self.ids[self.device]: own_place(), self.ids[peer]: theirs}
                    verdict = Verdict(peer, f"{failure.cause}: the devices do not run the same steps{told(places)}")
                else:
                    verdict = find_failed(
                        self._health,
                        self.device,
                        peer,
                        failure.timed_out,
                        self.timeout_s,
                        own_place(),
                        self.report_s,
                        self.ids,
                    )
                self.failure = DeviceLostError(
                    self.ids[verdict.device], f"{self._title(verdict.device)} {verdict.cause}"
                )
                self._tell(verdict.device, verdict.cause)
                self._cut(broken=True)
            return self.failure.again()

    def break_off(self, error: ConvoyError) -> None:
        """End whatever waits here, on another thread too, with this error. The others are not told."""
        with self._failing:
            if self.failure is None:
                self.failure, self._told = error.again(), True
                self._cut(broken=True)

    def _title(self, device: int) -> str:
        return title(self.ids[device], self.infos[device])

    def _tell(self, root: int, cause: str) -> None:
        if not self._told:
            self._told = True
            self._health.report_failure(FailureReport(self.device, root, cause))

    def _cut(self, broken: bool) -> None:
        for backend in self._connected:
            backend.cut(broken)

    def close(self, error: BaseException | None = None) -> None:
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close_at_exit)
        if (reason := error or self.failure) is None:
            self._farewell()
        else:
            self._tell(self.device, f"left because of its own error: {type(reason).__name__}: {reason}"[:4000])
        self._cut(broken=self.failure is not None or error is not None)
        self.failure = self.failure or closed_error()
        self._under_way.clear()
        self._health.close()

    def _farewell(self) -> None:
        """Wait a little for the others to be done as well."""
        self._health.done = True
        try:
            self._swap_pages(["the end of its work", "", None], min(FAREWELL_S, self.timeout_s))
        except PeerFailure:
            self._tell(self.device, DONE_CAUSE)

    def close_at_exit(self) -> None:
        """Close with the error that ends this process, if one does: the interpreter has kept it."""
        self.close(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


@final
class _PendingMessages:
    def __init__(self, group: JoinedGroup, work: PendingWork, lane: int) -> None:
        self.group, self.work, self.lane = group, work, lane
        if work.works:
            # Who drops it without a wait must not end messages under way: their tensors and handles stay here.
            group._under_way.add(self)

    def wait(self) -> None:
        if not self.work.works:
            return
        self.group._raise_failure()
        try:
            self.work.wait(self.group.timeout_s, lambda peer: self.group._wait_for(peer, self.lane))
        except PeerFailure as failure:
            raise self.group._fail(failure) from failure
        self.group._under_way.discard(self)


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
