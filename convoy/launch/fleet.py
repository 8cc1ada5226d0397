"""Starts a job on every host of a fleet, and waits until all of it has ended."""

import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from convoy._version import __version__
from convoy.comm.environment import is_own
from convoy.comm.job_key import key_to_start
from convoy.errors import DeviceLostError, InputError, MismatchError
from convoy.fleet import Fleet, read_fleet
from convoy.launch.again import Address, Again
from convoy.launch.agent import BEAT_S, Message, digest, from_line, to_line
from convoy.launch.detach import Detach, detached_text
from convoy.launch.exit_status import Ending
from convoy.launch.host_job import HostJob, host_jobs
from convoy.launch.leaving import LEAVE_S, ending_text, ends_in_order
from convoy.launch.ssh import agent_command, remedy, ssh_call, ssh_program
from convoy.launch.supervisor import TERMINATE_S, Interrupted, Interrupts, Supervisor, by_line, conclude, note

ANSWER_S = 60.0
"""A host that has not answered by then is not used. ssh itself gives up earlier, where it can."""

_TRAVEL_S = 5.0
"""Beside the time that a host takes to end its devices, the time for its word of it to come."""

_KEPT_LINES = 20


def startable(path: Path | None) -> Fleet | None:
    """The fleet of a file if it can be started from here: its hosts have addresses. None if none of them has.

    Raises:
        InputError: a file that cannot be used, or addresses of some hosts only.
    """
    if path is None:
        return None
    fleet = read_fleet(path)
    without = [host.name for host in fleet.hosts if host.address is None]
    if len(without) == len(fleet.hosts):
        return None
    if without:
        raise InputError(
            f"{path}: hosts {', '.join(without)} have no address, the others have: give every host the `address` by which ssh "
            "reaches it, to start all of them from here, or none"
        )
    return fleet


def run_on_fleet(
    fleet: Fleet | Sequence[HostJob],
    argv: Sequence[str],
    *,
    port: int | None = None,
    files: Sequence[Path] = (),
    grace_s: float = 5.0,
    logs: Path | None = None,
    goes_on: bool = False,
    silence_s: float = 60.0,
    detach: Detach | None = None,
    tries_again: bool = False,
    alone: str = "127.0.0.1",
) -> int:
    """Run ``python -m convoy argv`` once per device, each on its host, as one job, and wait for all of them.

    Hosts are reached by ssh, this machine without it. Every device finds its rank in torchrun's variables and its hardware
    in CONVOY_DEVICE. What device 0 prints is printed here; of the others, what explains a failure.

    Args:
        fleet: all hosts have an address. Or its hosts with their devices.
        port: where the devices meet, on the host of device 0; None: a free one.
        files: what `argv` names must be on every host, at the same path and with the same content.
        grace_s: once one has failed, or after Ctrl-C, the others get this long to end by themselves.
        logs: a folder on each host for what its devices print, but for device 0.
        goes_on: the devices go on without those of them that are lost. What the first prints that is left is shown then.
        silence_s: one that is stopped is killed after so long, where the others go on: for them it is lost by then.
        detach: once all train, leave them alone, and come back.
        tries_again: lost devices are started again on their hosts, by the same command; once they are left alone, by each host
            those of its own.
        alone: where they meet if there is one host.

    Returns:
        0 if all ended well, or train alone; 2 if devices ended with an error that has been printed, 128 + n after signal n: 130
        after Ctrl-C.

    Raises:
        InputError: a host that cannot be reached, has no such Python, folder or file, or a port that is taken. All hosts
            with such troubles are named, and nothing was started.
        MismatchError: a host has another version of Convoy.
        DeviceLostError: a device crashed or was killed, or its host was lost; the message says which and how.
    """
    jobs = host_jobs(fleet) if isinstance(fleet, Fleet) else fleet
    key = key_to_start(os.environ)
    logs = logs if detach is None else detach.logs
    tries_here = tries_again and detach is None
    with (
        Interrupts() as interrupts,
        _Hosts(jobs, grace_s, interrupts, goes_on, tries_here, detach is not None) as hosts,
    ):
        try:
            hosts.check(files)
            address, meeting_port = hosts.meet(port, alone)
            hosts.start(
                argv=list(argv), total=sum(len(job.ranks) for job in jobs), address=address, port=meeting_port, grace_s=grace_s,
                logs=None if logs is None else str(logs), key=None if key is None else key.pem.decode(), goes_on=goes_on,
                detach=detach is not None, silence_s=silence_s if detach is None else detach.silence_s,
                tells=tries_here, tries_again=tries_again,
            )  # fmt: skip
            hosts.follow(lambda: detach is not None and hosts.all_train)
            if detach is not None and hosts.all_train:
                hosts.let_go()
                return 0
        except Interrupted as interrupted:
            with suppress(Interrupted):  # a second one: no more waiting
                if goes_on and ends_in_order(interrupted):
                    note(ending_text(len(hosts.running)))
                    hosts.end(after_step=True)
                else:
                    hosts.end(interrupt=True)
                hosts.follow()
            return interrupted.status
    return conclude(hosts.endings, hosts.lost, goes_on=goes_on)


class HostSession:
    """One host as seen from here: a process, ssh or a local one, that runs the agent there.

    Attributes:
        terminal: files that a local agent hands to device 0; None: what that prints comes in messages.
        until_s: when it is given up, unless something is heard of it before.
    """

    def __init__(
        self,
        processes: Supervisor,
        job: HostJob,
        take: Callable[["HostSession", Message], None],
        detached: bool = False,
    ) -> None:
        """Start the process; `take` gets every message. One that will be detached gets no file of this process.

        Raises:
            InputError: there is no such program.
        """
        self.job, self.until_s = job, math.inf
        self.local = is_own(str(job.host.address))
        self.terminal = (os.dup(1), os.dup(2)) if self.local and 0 in job.ranks and not detached else None
        host, folder = job.host, None
        if self.local:
            command = [host.python or sys.executable, "-m", "convoy.launch.agent"]
            folder = str(Path.home() / host.folder) if host.folder else None
        else:
            command = ssh_call(ssh_program(os.environ), host, agent_command(host, sys.executable, os.getcwd()))

        def take_line(line: bytes) -> None:
            if (message := from_line(line)) is not None:
                take(self, message)
            else:
                self._process.tail(line + b"\n")

        try:
            self._process = processes.start(
                job.ranks[0], self.title, command, folder=folder, stdin=subprocess.PIPE, stdout=by_line(take_line),
                pass_fds=self.terminal or (), own_session=True,
            )  # fmt: skip
        except OSError as error:
            raise InputError(
                f"host {host.name}: cannot start {command[0]!r}{f' in {folder}' if folder else ''}: {error.strerror}; "
                f"{'correct python and folder of the host' if self.local else 'install an ssh client, or correct CONVOY_SSH'}"
            ) from None
        finally:
            for file in self.terminal or ():
                os.close(file)

    @property
    def title(self) -> str:
        """The host as messages name it."""
        return f"host {self.job.host.name} ({self.job.host.address})"

    @property
    def trouble(self) -> str:
        """Why the process has ended, and what to do."""
        said = [line for line in self._process.tail.lines() if line][-_KEPT_LINES:]
        last = f": {' | '.join(said[-3:])}" if said else ""
        status = self._process.popen.returncode
        if self.local:
            return f"it ended with status {status}{last}; correct its python and folder"
        cure = remedy(self.job.host, "\n".join(said), sys.executable, os.getcwd())
        return f"ssh ended with status {status}{last}; {cure}"

    @property
    def failed(self) -> bool:
        """Whether the process has ended otherwise than an agent whose devices have ended."""
        return bool(self._process.popen.returncode)

    def send(self, what: str, **fields: object) -> None:
        """Say something to the agent. If it is gone, nothing happens here: its messages end too."""
        assert self._process.popen.stdin is not None
        with suppress(OSError):
            os.write(self._process.popen.stdin.fileno(), to_line(what, **fields))

    def hang_up(self) -> None:
        """Say no more; the agent then ends its devices, and itself."""
        assert self._process.popen.stdin is not None
        self._process.popen.stdin.close()


class _Hosts:
    """The sessions with all hosts of a fleet, that of device 0 first. Leaving the context ends what still runs."""

    def __init__(
        self, jobs: Sequence[HostJob], grace_s: float, interrupts: Interrupts, goes_on: bool = False,
        tries_again: bool = False, detached: bool = False,
    ) -> None:  # fmt: skip
        self.sessions: list[HostSession] = []
        self.endings: list[Ending] = []
        self.lost: DeviceLostError | None = None
        self._processes = Supervisor(interrupts, self._gone)
        self._inbox: deque[tuple[HostSession, Message | None]] = deque()  # None: no more will come
        self._jobs, self._goes_on, self._detached = jobs, goes_on, detached
        self._train: set[HostSession] = set()
        self._is_let_go = False
        self._order = dict[str, Any]()
        titles = {rank: f"device {rank} ({job.title(rank)})" for job in jobs for rank in job.ranks}
        self._first = frozenset(titles)
        self._again = Again(titles, self._start_again if tries_again else None, note)
        self._end_s = grace_s + 2 * TERMINATE_S + _TRAVEL_S
        self._deadline_s = math.inf
        self._beat_s = time.monotonic()

    def __enter__(self) -> "_Hosts":
        try:
            for job in self._jobs:
                session = HostSession(self._processes, job, lambda *got: self._inbox.append(got), self._detached)
                self.sessions.append(session)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._processes, suppress(Interrupted):
            for session in self.sessions:
                session.hang_up()
            # After an error or the second Ctrl-C the agents end their devices without being watched.
            self._processes.listen(
                lambda: not self._processes.running, 0.5 if self._again.members and not self._is_let_go else _TRAVEL_S
            )

    def _gone(self, ending: Ending) -> None:
        self._inbox.append((next(each for each in self.sessions if each.job.ranks[0] == ending.device), None))

    def check(self, files: Sequence[Path]) -> None:
        """Check versions and files on all hosts, before any of them starts a device."""
        answers = self._ask(self.sessions, "check", "here", files=[str(path) for path in files])
        versions = {
            session: answer["version"] for session, answer in answers.items() if answer["version"] != __version__
        }
        if versions:
            found = ", ".join(f"{version} on {session.title}" for session, version in versions.items())
            raise MismatchError(
                f"the hosts do not have the same Convoy: {__version__} here, but {found}. Install the same version "
                "everywhere, as `convoy setup` does"
            )
        troubles = []
        for path in files:
            mine = digest(path)
            for session, answer in answers.items():
                if (theirs := answer["digests"][str(path)]) != mine:
                    what = "is not there" if theirs is None else "is another file there"
                    troubles.append(
                        f"{session.title}: {path} {what}, in {answer['folder']}: all hosts need it at the same path; "
                        "`convoy setup` brings it, or copy it"
                    )
        if troubles:
            raise InputError("\n".join(troubles))
        self._answers = answers

    def meet(self, port: int | None, alone: str) -> tuple[str, int]:
        """Where the devices meet: the address of device 0's host as its route to the others says, and a port."""
        first, *others = self.sessions
        answer = self._answers[first]
        # A host's address is the one at which its ssh server was reached; this machine's, where that connection came from.
        known = [answer["client"] if session.local else self._answers[session]["server"] for session in others]
        peers = [address or str(session.job.host.address) for address, session in zip(known, others, strict=True)]
        met = self._ask([first], "meet", "met", peers=peers, address=alone, port=port)[first]
        return str(met["address"]), int(met["port"])

    def _ask(
        self, sessions: Sequence[HostSession], question: str, answer: str, **fields: object
    ) -> dict[HostSession, Message]:
        """A question to some hosts, and their answers, in the order of the sessions.

        Raises:
            InputError: some could not or did not answer; names all of them, with what was said there.
        """
        for session in sessions:
            session.send(question, **fields)
        answers: dict[HostSession, Message] = {}
        troubles: dict[HostSession, str] = {}
        deadline_s = time.monotonic() + ANSWER_S
        while len(answers) + len(troubles) < len(sessions):
            got = self._next(deadline_s)
            if got is None:
                silent = [session for session in sessions if session not in answers and session not in troubles]
                troubles |= dict.fromkeys(silent, f"did not answer within {ANSWER_S:g} s")
                break
            session, message = got
            if (
                message is None
            ):  # an agent that is left alone answers, and its process here ends, perhaps before others answer
                if session not in answers or session.failed:
                    troubles[session] = session.trouble
            elif message["convoy"] == "refused":
                troubles[session] = str(message["text"])
            elif message["convoy"] == answer:
                answers[session] = message
        if troubles:
            raise InputError(
                "\n".join(f"{session.title}: {troubles[session]}" for session in self.sessions if session in troubles)
            )
        return {session: answers[session] for session in sessions}

    @property
    def running(self) -> set[int]:
        """All processes, also those that ask to be let in."""
        return self._again.running

    @property
    def all_train(self) -> bool:
        """Whether all devices of all hosts have begun to train, and do."""
        return self._train >= set(self.sessions) and bool(self._again.members)

    def let_go(self) -> None:
        """Leave the devices alone, and say where they are."""
        try:
            answers = self._ask(self.sessions, "detach", "detached")
            print(detached_text([(session.job, session.local, answer["logs"]) for session, answer in answers.items()]))
        except InputError as error:
            print(f"WARNING: the hosts were left alone, but for these, whose devices end:\n{error}", file=sys.stderr)
        self._is_let_go = True

    def start(self, **order: Any) -> None:
        """Start all devices."""
        self._order = order
        for session in self.sessions:
            self._send_start(session, session.job)

    def _send_start(self, session: HostSession, job: HostJob, again: Mapping[str, Any] | None = None) -> None:
        titles = [job.title(rank) for rank in job.ranks]
        order = self._order | {"ranks": job.ranks, "names": job.names, "own": job.own, "titles": titles}
        session.send("start", **order, terminal=session.terminal, again=again)

    def _start_again(self, device: int, number: int, doors: Sequence[Address]) -> None:
        """Start a device that was lost, on its host, in a session of its own: the first one may be gone with it."""
        self._processes.forget_ended()
        job = next(job for job in self._jobs if device in job.ranks)
        at = job.ranks.index(device)
        alone = replace(job, ranks=(number,), names=job.names[at : at + 1], own=job.own[at : at + 1])
        try:
            session = HostSession(self._processes, alone, lambda *got: self._inbox.append(got))
        except InputError as error:
            self._again.lose_host(number, str(error))
            return
        session.until_s = time.monotonic() + ANSWER_S
        self.sessions.append(session)
        self._send_start(session, job, {"device": device, "process": number, "doors": doors})

    def follow(self, until: Callable[[], bool] = lambda: False) -> None:
        """Pass on what device 0 says until all devices have ended, the time for that is over, or something is true."""
        while self._again.members and not until():
            got = self._next(self._deadline_s)
            if got is None:
                return
            self._take(*got)

    def end(self, *, interrupt: bool = False, after_step: bool = False) -> None:
        """Have all devices ended: they get some time, or are interrupted first, or finish the step."""
        self._again.stop()
        self._deadline_s = time.monotonic() + self._end_s + after_step * LEAVE_S
        own = len(self._again.members) if after_step else 0
        for session in self.sessions:
            session.send("end", interrupt=interrupt, own=own)

    def _take(self, session: HostSession, message: Message | None) -> None:
        bad, session.until_s = False, math.inf
        if message is None or message["convoy"] == "refused":
            bad = self._lose(session, message)
        elif message["convoy"] == "train":
            self._train.add(session)
        elif message["convoy"] == "told":
            self._again.hear(message["device"], message["line"].encode())
        elif message["convoy"] == "text":
            # A device that came later prints nothing until it is the first.
            came_later = message["device"] not in self._first
            heard = message["device"] == 0 or came_later or message["speaks"]
            if heard or not any(d < message["device"] for d in self._again.running):
                stream = sys.stdout if message["stream"] == "stdout" else sys.stderr
                stream.write(message["text"])
                stream.flush()
        elif message["convoy"] == "ended":
            ending = Ending(
                message["device"], message["name"], message["status"], message["stopped"], tuple(message["lines"])
            )
            if ending.device in self._again.came:
                self.endings.append(ending)
            self._again.note(ending)
            bad = ending.status != 0 and not self._goes_on
        if bad and self._deadline_s == math.inf:
            self.end()

    def _lose(self, session: HostSession, message: Message | None) -> bool:
        """A host will say no more, with its devices or after them; whether the others are to end."""
        why = str(message["text"]) if message is not None else session.trouble
        left = self._again.running.intersection(session.job.ranks)
        trained = left & self._again.members
        for process in left:
            self._again.lose_host(process, why)
        if message is None:
            if session.failed and not left:
                self._again.lose_host_of(session.job.ranks, why)
            self.sessions.remove(session)
        if not trained or self._deadline_s < math.inf:
            return False
        rank = min(trained)
        if rank in self._first:
            self.lost = DeviceLostError(
                rank, f"device {rank} ({session.job.title(rank)}) was lost with its host: {why}"
            )
        return not self._goes_on

    def _next(self, deadline_s: float) -> tuple[HostSession, Message | None] | None:
        """The next message of any host, or None at the deadline. Meanwhile all hosts hear that this process is there."""
        while True:
            now_s = time.monotonic()
            if now_s >= self._beat_s:
                for session in self.sessions:
                    session.send("beat")
                self._beat_s = now_s + BEAT_S
            for session in self.sessions:
                if session.until_s <= now_s:
                    self._processes.kill(session.job.ranks[0])
            self._again.tend()
            if self._processes.listen(lambda: self._inbox, min(self._beat_s, self._again.next_s, deadline_s) - now_s):
                return self._inbox.popleft()
            if time.monotonic() >= deadline_s:
                return None
