"""Join a job: read the rank from the environment, meet the other processes and connect to them."""

import atexit
import itertools
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from typing import final

import torch

from convoy.comm.backends import MessageError, NcclBackend, OverdueError, PeerFailure, PendingWork, can_use_nccl
from convoy.comm.connection import Credentials, credentials_of
from convoy.comm.deadlines import TIMEOUT_S
from convoy.comm.environment import LISTEN, ProcessEnv, listen_at, own_address, reachable_address, read_process_env
from convoy.comm.failure import DONE_CAUSE, FailureReport, HealthServer, NoAnswer, Verdict, find_failed, left_because
from convoy.comm.group import AloneGroup, ChangingGroup, Group, Message, Pending, closed_error
from convoy.comm.listener import Listener
from convoy.comm.rendezvous import ProcessInfo, Rendezvous, device_title, own_info
from convoy.comm.source_line import current_line
from convoy.comm.store import close_store, connect_torch_store, host_torch_store, store_at
from convoy.comm.streams import TEXTS, StreamBackend, WrongSizeError
from convoy.errors import ConvoyError, DeviceLostError, InputError, shown
from convoy.fleet.units import quantity
from convoy.machine import roster
from convoy.machine.accelerator import limit_memory, pick_device
from convoy.machine.process import watch_parent, within

MAX_TIMEOUT_S = 1e6

GREETING_S = 10.0  # time limit for the first reply of another device
EXIT_BARRIER_S = 5.0  # how long a finished device waits for the others, so that no connection closes during a message

# Open files that a process needs: a base, and for each other device (six streams, and health connections).
FILES, PEER_FILES = 32, 10

_rendezvous_count = itertools.count()


def join(device: str | torch.device | None = None, timeout_s: float = TIMEOUT_S) -> Group:
    """Join this process's job and meet the other processes, as `convoy.join` describes."""
    watch_parent()
    check_timeout(timeout_s)
    env = read_process_env(os.environ)
    torch_device = own_device(device, env.local if env else 0)
    job = f"process {os.getpid()}" if env is None else f"{env.host}:{env.port}"
    roster.enter(job, env.device if env else 0, str(torch_device))
    if env is None or env.devices == 1:
        alone = AloneGroup(torch_device, timeout_s)
        return ChangingGroup(alone) if os.environ.get(LISTEN) else alone
    try:
        # Run this in a thread: torch's store ignores signals while it waits, and some of its waits have no limit.
        group = ChangingGroup(within(timeout_s + 5.0, lambda: meet(env, torch_device, timeout_s)))
    except TimeoutError:
        raise DeviceLostError(
            0, f"device 0 was lost: its store at {env.host} port {env.port} does not answer; start the job again"
        ) from None
    group.is_of_this_process()
    return group


def check_timeout(timeout_s: float) -> None:
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InputError(
            f"timeout_s={timeout_s}: a time limit is a number of seconds above 0, at most {MAX_TIMEOUT_S:g}, such as 600"
        )


def own_device(name: str | torch.device | None, local: int) -> torch.device:
    """Return this process's torch device. Limit its memory to the launcher's CONVOY_MEMORY."""
    device = pick_device(name, local)
    if limit := os.environ.get("CONVOY_MEMORY"):
        try:
            limit_memory(device, quantity(limit, "bytes"))
        except InputError as error:
            raise InputError(f"CONVOY_MEMORY={shown(limit)}: {error}") from None
    return device


def meet(
    env: ProcessEnv,
    torch_device: torch.device,
    timeout_s: float,
    number: int | None = None,
    credentials: Credentials | None = None,
) -> "JoinedGroup":
    """Meet the other processes, and connect to them. Errors as in `join`.

    Args:
        number: number of the rendezvous at this store. None: this process counts them.
        credentials: the job's credentials, if already known: creating them takes 10 ms.
    """
    deadline_s = time.monotonic() + timeout_s
    files, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FILES + PEER_FILES * (env.devices - 1)
    if files != resource.RLIM_INFINITY and files < needed:
        raise InputError(
            f"this process may open {files} files, and a job of {env.devices} devices needs {needed}: raise the limit "
            f"where you start it, e.g. ulimit -n {max(1024, needed)}"
        )
    address = own_address(env.host, env.port)
    try:
        credentials = credentials or credentials_of(env)
        store = store_at(env, deadline_s, credentials)
        rendezvous = Rendezvous(store, env, next(_rendezvous_count) if number is None else number, deadline_s)
        infos = rendezvous.exchange_infos(own_info(torch_device, env.devices, address))
        address = reachable_address(address, [info.address for info in infos])
        listener = Listener(listen_at(address, 0), credentials)
        health = HealthServer(env.device, listener, infos[0].nonce, timeout_s)
        group = JoinedGroup(torch_device, timeout_s, infos, health)
        try:
            group.connect(rendezvous)
        except BaseException as error:
            group.close(error)
            raise
        close_store(env.host, env.port)
    except RuntimeError as error:
        raise DeviceLostError(
            0,
            f"device 0 was lost: the store at {env.host} port {env.port}, kept by it or its launcher, failed "
            f"({str(error).splitlines()[0]}); start the job again",
        ) from error
    atexit.register(group.close_at_exit)
    return group


@final
class JoinedGroup(Group):
    """One process's group, created by :func:`join`. `report_s`: how long it waits for the report of a device that left."""

    _streams: StreamBackend
    _backend: StreamBackend | NcclBackend

    def __init__(
        self, torch_device: torch.device, timeout_s: float, infos: Sequence[ProcessInfo], health: HealthServer
    ) -> None:
        super().__init__(health.device, len(infos), torch_device, timeout_s)
        self.infos = tuple(infos)
        self.address, self.token = health.address[0], health.token
        self.credentials = health.listener.credentials
        self.report_s = 1.0
        self._health = health
        self._connected: list[StreamBackend | NcclBackend] = []
        self._health.waits_for = [None] * self.lanes
        self._failing = threading.Lock()
        self._reported = False
        self._closed = False
        self._process = os.getpid()
        self._in_progress: set[_PendingMessages] = set()

    @property
    def rejected(self) -> int:
        return sum(self._health.listener.rejected.values())

    def connect(self, rendezvous: Rendezvous) -> None:
        texts = rendezvous.gather("health", json.dumps(self._health.address))
        self._health.addresses = [(str(host), int(port)) for host, port in map(json.loads, texts)]
        for peer in range(self.devices):
            if peer != self.device:
                self._greet(peer, rendezvous.deadline_s)
        limit_s = rendezvous.deadline_s - time.monotonic()
        listener, peers = self._health.listener, self._health.addresses
        try:
            self._streams = StreamBackend(listener, peers, self.device, self._health.token, limit_s)
        except MessageError as error:
            raise self._not_connected(str(error).splitlines()[0]) from error
        self._backend = self._streams
        self.moved_bytes = self._health.moved_bytes = self._streams.moved_bytes
        self._connected.append(self._streams)
        hosts, names = [each.host for each in self.infos], [each.name for each in self.infos]
        one_host = len(set(hosts)) == 1
        # NCCL encrypts nothing, so it needs one host or a trusted network.
        if can_use_nccl([each.device for each in self.infos], names, hosts) and (
            one_host or listener.credentials.key is None
        ):
            address = "127.0.0.1" if one_host else self.address
            store = host_torch_store(listen_at(address, 0)) if self.device == 0 else None
            texts = rendezvous.gather("nccl", json.dumps([address, 0 if store is None else store.port]))
            host, port = json.loads(texts[0])
            store = store or connect_torch_store(host, int(port), rendezvous.deadline_s)
            self._backend = NcclBackend(store, self.device, self.devices, self.torch_device, self.timeout_s)
            self._connected.append(self._backend)
            self.lanes = self._backend.lanes
        try:  # barrier: no device leaves the rendezvous before all are connected
            self._swap_texts(["all are connected", "", None], max(1.0, rendezvous.deadline_s - time.monotonic()))
        except PeerFailure as failure:
            raise self._failed(failure) from failure

    def _greet(self, peer: int, deadline_s: float) -> None:
        until_s = min(deadline_s, time.monotonic() + GREETING_S)
        while (answer := self._health.ping(peer)) is NoAnswer.FROZEN and time.monotonic() <= until_s:
            pass
        if isinstance(answer, NoAnswer):
            host, port = self._health.addresses[peer]
            raise DeviceLostError(
                peer,
                f"{self._title(peer)} joined, but device {self.device} at {self.address} cannot reach it at {host} port "
                f"{port} ({answer.value}): open the ports between the machines, or name the interface that leads "
                "there in GLOO_SOCKET_IFNAME",
            )

    def _not_connected(self, reason: str) -> ConvoyError:
        for peer in range(self.devices):
            if (report := self._health.report_from(peer, 0.0)) is not None:
                return DeviceLostError(report.root, f"{self._title(report.root)} {report.cause}")
            if peer != self.device and isinstance(silence := self._health.ping(peer), NoAnswer):
                return DeviceLostError(peer, f"{self._title(peer)} was lost before the job began: {silence.value}")
        return ConvoyError(
            f"device {self.device} met all others, but could not connect to them from {self.address} within "
            f"{self.timeout_s:g} s ({reason}): open all ports from 1024 up between the machines"
        )

    def start(self, sends: Sequence[Message], receives: Sequence[Message], lane: int = 0) -> Pending:
        sends, receives = self._admit(sends, receives, lane)
        on_host = any(message.tensor.device.type == "cpu" for message in (*sends, *receives))
        backend = self._streams if on_host else self._backend  # NCCL carries device tensors only
        try:
            return _PendingMessages(self, backend.start(sends, receives, lane), lane)
        except BaseException as error:
            raise self._failed(error)  # noqa: B904 - may be the same error

    def agree(self, topic: str, text: str) -> tuple[str, ...]:
        self._raise_failure()
        try:
            rows = self._swap_texts([topic, text, current_line()], self.timeout_s)
        except BaseException as error:
            raise self._failed(error)  # noqa: B904 - may be the same error
        topics, texts, places = zip(*map(json.loads, rows), strict=True)
        self._check_topics(topic, topics, places)
        return tuple(texts)

    def _swap_texts(self, own: list[str | None], limit_s: float) -> list[bytes]:
        """All-gather a list as JSON text: exchange the lengths first, then the texts."""
        peers = [peer for peer in range(self.devices) if peer != self.device]
        mine = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        lengths = {peer: torch.zeros(1, dtype=torch.int64) for peer in peers}
        self._swap(torch.tensor([len(mine)]), lengths, limit_s)
        texts = {peer: torch.empty(int(lengths[peer]), dtype=torch.uint8) for peer in peers}
        self._swap(mine, texts, limit_s)
        texts[self.device] = mine
        return [texts[device].numpy().tobytes() for device in range(self.devices)]

    def _swap(self, mine: torch.Tensor, theirs: dict[int, torch.Tensor], limit_s: float) -> None:
        sends = [Message(peer, mine) for peer in theirs]
        receives = [Message(peer, tensor) for peer, tensor in theirs.items()]
        self._wait(self._streams.start(sends, receives, TEXTS), limit_s)

    def _wait(self, work: PendingWork, limit_s: float, lane: int = 0) -> None:
        """Wait for messages, while bytes move or the devices live: at most ``limit_s`` after the last byte.

        A device is lost after some seconds without an answer. A live one may compute for long.
        """

        def waits_for(peer: int | None) -> None:
            # Do not reset it after a failure: other devices still ask for which device this one waits.
            self._health.waits_for[lane] = peer

        moved, known = -1, (-1, 0.0, 0)
        begin_s = since_s = time.monotonic()
        while True:
            try:
                return work.wait(min(begin_s + limit_s - time.monotonic(), self._health.limit_s), waits_for)
            except PeerFailure as failure:
                if not isinstance(failure.cause, OverdueError):
                    raise
                asked_s = time.monotonic()
                failure.silent_s = asked_s - begin_s
                failure.verdict = verdict = self._verdict(failure)
                before, moved = moved, verdict.moved + self._streams.moved_bytes()
                if before != moved:
                    begin_s = asked_s
                if known != (verdict.device, verdict.holds, moved):
                    known, since_s = (verdict.device, verdict.holds, moved), asked_s
                until_s = min(begin_s + limit_s, since_s + verdict.holds * self._health.limit_s)
                if time.monotonic() >= until_s:
                    raise

    def _failed(self, error: BaseException) -> BaseException:
        """Find the failed device, report it to the others and close the connections. Return the error to raise.

        Args:
            error: PeerFailure, or any exception that a signal handler raised during a wait: then this device itself leaves.
        """
        with self._failing:
            if self.failure is None:
                verdict = left_because(self.device, error)
                if isinstance(error, PeerFailure):
                    verdict = error.verdict or self._verdict(error)
                self.failure = DeviceLostError(
                    self.ids[verdict.device], f"{self._title(verdict.device)} {verdict.cause}"
                )
                self._report(verdict)
                self._cut(broken=True)
            return self.failure.again() if isinstance(error, PeerFailure) else error

    def _verdict(self, failure: PeerFailure) -> Verdict:
        peer = failure.peers[0]
        if len(failure.peers) > 1:
            silent = (each for each in failure.peers if isinstance(self._health.ping(each), NoAnswer))
            peer = next(silent, peer)
        wrong = str(failure.cause) if isinstance(failure.cause, WrongSizeError) else ""
        return find_failed(self._health, self.device, peer, failure.silent_s, self.ids, self.report_s, wrong)

    def abort(self, error: ConvoyError) -> None:
        """Make all waits of this process, on every thread, raise this error. Send no report to the other devices."""
        with self._failing:
            if self.failure is None:
                self.failure, self._reported = error.again(), True
                self._cut(broken=True)

    def _title(self, device: int) -> str:
        return device_title(self.ids[device], self.infos[device])

    def _report(self, verdict: Verdict) -> None:
        if not self._reported:
            self._reported = True
            self._health.report_failure(FailureReport(self.device, verdict.device, verdict.cause))

    def _cut(self, broken: bool) -> None:
        for backend in self._connected:
            backend.cut(broken)

    def close(self, error: BaseException | None = None) -> None:
        if self._closed or os.getpid() != self._process:
            return
        self._closed = True
        atexit.unregister(self.close_at_exit)
        if (reason := error or self.failure) is None:
            # Exit barrier: wait until the others are done.
            self._health.done = True
            try:
                self._swap_texts(["exit barrier", "", None], min(EXIT_BARRIER_S, self.timeout_s))
            except PeerFailure:
                self._report(Verdict(self.device, DONE_CAUSE))
        else:
            self._report(left_because(self.device, reason))
        self._cut(broken=reason is not None)
        self.failure = self.failure or closed_error()
        self._in_progress.clear()
        self._health.close()

    def close_at_exit(self) -> None:
        """Close the group with the error that ends this process, if any. The interpreter stores that error."""
        self.close(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))


@final
class _PendingMessages:
    def __init__(self, group: JoinedGroup, work: PendingWork, lane: int) -> None:
        self.group, self.work, self.lane = group, work, lane
        if work.works:
            # A caller may drop a Pending without waiting: keep its tensors and handles alive here.
            group._in_progress.add(self)

    def wait(self) -> None:
        if not self.work.works:
            return
        self.group._raise_failure()
        try:
            self.group._wait(self.work, self.group.timeout_s, self.lane)
        except BaseException as error:
            raise self.group._failed(error)  # noqa: B904 - may be the same error
        self.group._in_progress.discard(self)
