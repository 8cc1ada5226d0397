"""Starting a job on every host of a fleet, and seeing all of it end."""

import os
import queue
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from convoy._version import __version__
from convoy.comm.environment import is_own
from convoy.errors import DeviceLostError, InputError, MismatchError
from convoy.fleet import Fleet, read_fleet
from convoy.launch.agent import digest
from convoy.launch.exit_status import Ending, judge
from convoy.launch.host import Link
from convoy.launch.host_job import Post, posts
from convoy.launch.processes import INTERRUPTED_STATUS, TERMINATE_S
from convoy.launch.protocol import BEAT_S, Message
from convoy.launch.ssh import far_command, remedy, ssh_call, ssh_program

ANSWER_S = 60.0
"""A host that has not answered by then is not used. ssh itself gives up earlier, where it can."""

_TRAVEL_S = 5.0
"""Beside the time that a host takes to end its devices, the time for its word of it to come."""


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
    fleet: Fleet, argv: Sequence[str], *, port: int | None = None, files: Sequence[Path] = (), grace_s: float = 5.0
) -> int:
    """Run ``python -m convoy argv`` once per device, each on its host, as one job, and wait for all of them.

    Hosts are reached by ssh, this machine without it. Every device finds its place in torchrun's variables and its hardware
    in CONVOY_DEVICE. What device 0 prints is printed here; of the others, what explains a failure.

    Args:
        fleet: all hosts have an address.
        port: where the devices meet, on the host of device 0; None: a free one.
        files: what `argv` names must be on every host, at the same path and with the same content.
        grace_s: once one has failed, or after Ctrl-C, the others get this long to end by themselves.

    Returns:
        0 if all ended well, 2 if devices ended with an error that has been printed, 130 after Ctrl-C.

    Raises:
        InputError: a host that cannot be reached, has no such Python, folder or file, or a port that is taken. All hosts
            with such troubles are named, and nothing was started.
        MismatchError: a host has another version of Convoy.
        DeviceLostError: a device crashed or was killed, or its host was lost; the message says which and how.
    """
    with _Hosts(posts(fleet), grace_s) as hosts:
        try:
            hosts.check(files)
            address, meeting_port = hosts.meet(port)
            for link in hosts.links:
                link.send(
                    "start", argv=list(argv), ranks=link.post.ranks, names=link.post.names, own=link.post.own,
                    titles=[link.post.title(rank) for rank in link.post.ranks], total=len(fleet.devices),
                    address=address, port=meeting_port, grace_s=grace_s, speech=link.speech,
                )  # fmt: skip
            hosts.follow()
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):  # a second Ctrl-C: no more waiting
                hosts.end(interrupt=True)
                hosts.follow()
            return INTERRUPTED_STATUS
    outcome = judge(hosts.endings)
    # Who was killed comes before what a host's silence may mean, and that before what others say of it.
    if (lost := outcome.lost or hosts.lost) is not None:
        raise lost
    for line in outcome.lines:
        print(line, file=sys.stderr)
    return outcome.status


class _Hosts:
    """The links to all hosts of a fleet, that of device 0 first. Leaving the context ends what still runs."""

    def __init__(self, all_posts: Sequence[Post], grace_s: float) -> None:
        self.links: list[Link] = []
        self.endings: list[Ending] = []
        self.lost: DeviceLostError | None = None
        self._posts = all_posts
        self._inbox: queue.SimpleQueue[tuple[Link, Message | None]] = queue.SimpleQueue()
        self._running = {rank for post in all_posts for rank in post.ranks}
        self._end_s = grace_s + 2 * TERMINATE_S + _TRAVEL_S
        self._deadline_s: float | None = None
        self._beat_s = time.monotonic()

    def __enter__(self) -> "_Hosts":
        with ExitStack() as stack:
            for post in self._posts:
                link = self._open(post)
                self.links.append(link)
                stack.callback(link.close, 0.0)
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self.links:
            link.hang_up()
        # After an error or the second Ctrl-C the far sides end their devices without being watched.
        limit_s = time.monotonic() + (_TRAVEL_S if not self._running else 0.5)
        for link in self.links:
            link.close(max(0.0, limit_s - time.monotonic()))

    def _open(self, post: Post) -> Link:
        host, here = post.host, os.getcwd()
        if not is_own(str(host.address)):
            command = ssh_call(ssh_program(os.environ), host, far_command(host, sys.executable, here))
            return Link(post, command, self._inbox)
        command = [host.python or sys.executable, "-m", "convoy.launch.agent"]
        folder = str(Path.home() / host.folder) if host.folder else here
        speech = (os.dup(1), os.dup(2)) if 0 in post.ranks else None
        try:
            return Link(post, command, self._inbox, folder=folder, speech=speech)
        finally:
            for file in speech or ():
                os.close(file)

    def check(self, files: Sequence[Path]) -> None:
        """Hear from all hosts that they can do it, before any of them starts a device."""
        answers = self._ask(self.links, "check", "here", files=[str(path) for path in files])
        versions = {link: answer["version"] for link, answer in answers.items() if answer["version"] != __version__}
        if versions:
            found = ", ".join(f"{version} on {link.title}" for link, version in versions.items())
            raise MismatchError(
                f"the hosts do not have the same Convoy: {__version__} here, but {found}. Install the same version everywhere"
            )
        troubles = []
        for path in files:
            mine = digest(path)
            for link, answer in answers.items():
                if (theirs := answer["digests"][str(path)]) != mine:
                    what = "is not there" if theirs is None else "is another file there"
                    troubles.append(
                        f"{link.title}: {path} {what}, in {answer['folder']}: all hosts need it at the same path; copy it"
                    )
        if troubles:
            raise InputError("\n".join(troubles))
        self._answers = answers

    def meet(self, port: int | None) -> tuple[str, int]:
        """Where the devices meet: the address of device 0's host as its route to the others says, and a port."""
        first, *others = self.links
        answer = self._answers[first]
        # A host's address is the one at which its ssh server was reached; this machine's, where that connection came from.
        known = [answer["client"] if link.local else self._answers[link]["server"] for link in others]
        peers = [address or str(link.post.host.address) for address, link in zip(known, others, strict=True)]
        alone = "127.0.0.1"
        met = self._ask([first], "meet", "met", peers=peers, address=alone, port=port)[first]
        return str(met["address"]), int(met["port"])

    def _ask(self, links: Sequence[Link], question: str, answer: str, **fields: object) -> dict[Link, Message]:
        """A question to some hosts, and their answers, in the order of the links.

        Raises:
            InputError: some could not or did not answer; names all of them, with what was said there.
        """
        for link in links:
            link.send(question, **fields)
        answers: dict[Link, Message] = {}
        troubles: dict[Link, str] = {}
        deadline_s = time.monotonic() + ANSWER_S
        while len(answers) + len(troubles) < len(links):
            got = self._next(deadline_s)
            if got is None:
                silent = [link for link in links if link not in answers and link not in troubles]
                troubles |= dict.fromkeys(silent, f"did not answer within {ANSWER_S:g} s")
                break
            link, message = got
            if message is None:
                troubles[link] = _trouble(link)
            elif message["convoy"] == "refused":
                troubles[link] = str(message["text"])
            elif message["convoy"] == answer:
                answers[link] = message
        if troubles:
            raise InputError("\n".join(f"{link.title}: {troubles[link]}" for link in self.links if link in troubles))
        return {link: answers[link] for link in links}

    def follow(self) -> None:
        """Pass on what device 0 says until all devices have ended, or the time for that is over."""
        while self._running:
            got = self._next(self._deadline_s)
            if got is None:
                return
            self._take(*got)

    def end(self, interrupt: bool) -> None:
        """Have all devices ended: they get some time, or are interrupted first."""
        self._deadline_s = time.monotonic() + self._end_s
        for link in self.links:
            link.send("end", interrupt=interrupt)

    def _take(self, link: Link, message: Message | None) -> None:
        bad = False
        if message is None or message["convoy"] == "refused":
            left = self._running.intersection(link.post.ranks)
            self._running -= left
            if left and self._deadline_s is None:
                self.lost, bad = _loss(link, min(left), message), True
        elif message["convoy"] == "text":
            stream = sys.stdout if message["stream"] == "stdout" else sys.stderr
            stream.write(message["text"])
            stream.flush()
        elif message["convoy"] == "ended":
            ending = Ending(
                message["device"], message["name"], message["status"], message["stopped"], tuple(message["lines"])
            )
            self.endings.append(ending)
            self._running.discard(ending.device)
            bad = ending.status != 0
        if bad and self._deadline_s is None:
            self.end(interrupt=False)

    def _next(self, deadline_s: float | None) -> tuple[Link, Message | None] | None:
        """The next message of any host, or None at the deadline. Meanwhile all hosts hear that this process is there."""
        while True:
            now_s = time.monotonic()
            if now_s >= self._beat_s:
                for link in self.links:
                    link.send("beat")
                self._beat_s = now_s + BEAT_S
            limit_s = self._beat_s if deadline_s is None else min(self._beat_s, deadline_s)
            with suppress(queue.Empty):
                return self._inbox.get(timeout=max(0.0, limit_s - now_s))
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return None


def _trouble(link: Link) -> str:
    """Why a host did not answer, and what to do."""
    said = link.words
    words = "\n".join(said)
    last = f": {' | '.join(said[-3:])}" if said else ""
    if link.local:
        return f"it ended with status {link.status}{last}; correct its python and folder"
    return f"ssh ended with status {link.status}{last}; {remedy(link.post.host, words, sys.executable, os.getcwd())}"


def _loss(link: Link, rank: int, message: Message | None) -> DeviceLostError:
    why = str(message["text"]) if message is not None else _trouble(link)
    return DeviceLostError(rank, f"device {rank} ({link.post.title(rank)}) was lost with its host: {why}")
