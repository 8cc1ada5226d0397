"""Admission: who asks to join a running job, and what is decided of each.

Every device keeps the join requests that reach its listener. The first device judges them, in a thread, while it trains.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

import torch

from convoy._version import __version__
from convoy.checkpoint.values import decode, encode
from convoy.comm import roster
from convoy.comm.accelerator import modes
from convoy.comm.agreement import gather
from convoy.comm.channel import Words
from convoy.comm.group import Group
from convoy.planner.known import Known
from convoy.runtime.module import Distributed

if TYPE_CHECKING:
    from convoy.elastic.regroup import Membership

Address = tuple[str, int]

FRESH_S = 1.0
"""Who waits asks far more often; of whom nothing was heard for so long is gone."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A process that asks to be let in.

    Attributes:
        mark: tells it from all others.
        door: where it answers once it is a member.
        facts: what it says of itself.
    """

    mark: str
    door: Address
    facts: Words


@dataclass(slots=True)
class _Row:
    applicant: Applicant
    heard_s: float
    verdict: Literal["none", "wanted", "spare", "refused"] = "none"
    reason: str = ""
    device: int | None = None


@final
class Applicants:
    """Those that asked at this device's door, and what was decided of each."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._lock = threading.Lock()

    def hear(self, applicant: Applicant) -> Words:
        """Somebody asks, on the door's thread; the answer."""
        with self._lock:
            row = self._rows.setdefault(applicant.mark, _Row(applicant, 0.0))
            row.heard_s = time.monotonic()
            return {row.verdict: row.reason} if row.verdict in ("spare", "refused") else {"wait": True}

    def undecided(self) -> list[Applicant]:
        """Those of whom nothing was decided yet; who is gone is forgotten."""
        return self._those("none")

    def wanted(self) -> list[Applicant]:
        """Those that are to come in, and are there."""
        return self._those("wanted")

    def _those(self, verdict: str) -> list[Applicant]:
        with self._lock:
            oldest_s = time.monotonic() - FRESH_S
            for mark in [mark for mark, row in self._rows.items() if row.heard_s < oldest_s - SPARE_POLL_S]:
                del self._rows[mark]
            return [r.applicant for r in self._rows.values() if r.verdict == verdict and r.heard_s > oldest_s]

    def decide(self, mark: str, verdict: Literal["wanted", "spare", "refused"], reason: str = "") -> None:
        with self._lock:
            if mark in self._rows:
                self._rows[mark].verdict, self._rows[mark].reason = verdict, reason

    def number(self, mark: str, device: int) -> None:
        """This one comes in as this device."""
        with self._lock:
            if mark in self._rows:
                self._rows[mark].device = device

    def device_of(self, mark: str) -> int | None:
        with self._lock:
            return self._rows[mark].device if mark in self._rows else None

    def changed(self) -> None:
        """The devices have changed: who waits as a spare is decided of again, and who has come in is no applicant any more."""
        with self._lock:
            self._rows = {mark: row for mark, row in self._rows.items() if row.device is None}
            for row in self._rows.values():
                if row.verdict == "spare":
                    row.verdict, row.reason = "none", ""


POLL_S, SPARE_POLL_S = 0.03, 1.0
"""Between two questions of who is to come in soon, and of who waits as a spare."""


Verdict = tuple[Literal["wanted", "spare", "refused"], str]
"""What becomes of one who asks to be let in, and why."""

Story = tuple[Callable[[], Any], Callable[[Any], None]]
"""Tells those that come, as JSON, what has happened; and takes it over."""


class Newcomers(Protocol):
    """Decides who comes in, and tells them what they must know beside the model's state."""

    def judge(self, facts: Words, members: Sequence[int], device: int) -> Verdict:
        """Of one who would be this device; on the first of the members, on a thread of its own."""
        ...

    def came(self, device: int, facts: Words) -> None:
        """On every device but those that come, before the plan is made: this one has come."""

    def told(self) -> Any:
        """On the first device: what those that come have to know, as JSON."""

    def hear(self, told: Any) -> None:
        """On those that come."""


def hear_of_newcomers(
    group: Group,
    membership: "Membership",
    has: Sequence[bool],
    facts: Words | None,
    others: Callable[[], Any],
    newcomers: Newcomers | None,
    story: Story | None,
) -> tuple[list[str], Any]:
    """Who has come, in words; and what every device knows of the state, for who kept nothing of that step. Those that come hear
    what they must know. Every device calls it.

    Args:
        has: which devices have kept the step after which all go on; not all have.
        facts: what this device said of itself, where it came later.
        others: what was kept beside the model, where this device has kept that step.
    """
    rows = gather(group, "who is new", None if has[group.device] else facts)
    new = {d: row for d, row in zip(membership.generation.members, rows, strict=True) if row is not None}
    for device, row in new.items():
        if newcomers is not None and device != membership.me:
            newcomers.came(device, row)
    text = ""
    if has.index(True) == group.device:
        state = encode(others(), "the state of the training")
        known = None if newcomers is None else newcomers.told()
        happened = None if story is None else story[0]()
        text = json.dumps([state, known, happened])
    state, known, happened = json.loads(group.agree("what newcomers must know", text)[has.index(True)])
    if membership.me in new:
        if newcomers is not None:
            newcomers.hear(known)
        if story is not None:
            story[1](happened)
    names = [" ".join(["device", str(d), *([f"({f['title']})"] if "title" in f else [])]) for d, f in new.items()]
    return names, decode(state)


class Judge:
    """Has the newcomers of one device judged, one after another, while it trains."""

    def __init__(self, membership: "Membership", newcomers: Newcomers) -> None:
        self.membership, self.newcomers = membership, newcomers
        self._thread: threading.Thread | None = None

    def wanted(self) -> bool:
        """Whether somebody is to come in now; begins to judge who is new."""
        if self.membership.generation.members[0] != self.membership.me:
            return False
        applicants = self.membership.applicants
        if (self._thread is None or not self._thread.is_alive()) and (new := applicants.undecided()):
            self._thread = threading.Thread(target=self._judge, args=(new[0],), name="convoy-judge", daemon=True)
            self._thread.start()
        return bool(applicants.wanted())

    def _judge(self, applicant: Applicant) -> None:
        try:
            members = self.membership.generation.members
            verdict, reason = self.newcomers.judge(applicant.facts, members, self.membership.next_device)
        except Exception as error:  # what it says of itself is no such thing
            verdict, reason = "refused", f"it could not be judged ({type(error).__name__}: {error})"
        self.membership.applicants.decide(applicant.mark, verdict, reason)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(JUDGING_S)


JUDGING_S = 10.0


def offer() -> Words:
    """What a script's devices tell who asks."""
    return {"version": __version__, "script": True, "job": roster.job()}


def facts_of(model: Distributed) -> Words:
    """What a device says of itself that comes into a script's training."""
    return {"same": _same(model), "title": str(model.group.torch_device)}


def _same(model: Distributed) -> dict[str, str]:
    """What must be the same on all devices, by its name in messages."""
    torch_version = ".".join(torch.__version__.split(".")[:2])
    graph = model.traced[True].graph
    return {"convoy": __version__, "torch": torch_version, "model": graph.fingerprint, **modes()}


class Welcome:
    """Admits devices that have the same model.

    Args:
        replan: of the members: what it knows of the devices is told.
        has_epochs: whether the script iterates over `Members.epochs`, where devices join.
    """

    def __init__(self, model: Distributed, replan: Any, has_epochs: Callable[[], bool]) -> None:
        self.model, self.replan, self.has_epochs = model, replan, has_epochs

    def judge(self, facts: Words, members: Sequence[int], device: int) -> Verdict:  # noqa: ARG002
        for what, mine in _same(self.model).items():
            if (theirs := facts["same"].get(what)) != mine and "unknown" not in (theirs, mine):
                return (
                    "refused",
                    f"its {what} is {theirs}, that of the job is {mine}: it must be the same on every machine",
                )
        if not self.has_epochs():
            return "refused", (
                "its script has no `for epoch in members.epochs(n):`, where devices join: write it around the loop over "
                "batches"
            )
        return "wanted", ""

    def came(self, device: int, facts: Words) -> None:
        """It gets a mean share: nothing was measured of it."""

    def told(self) -> Any:
        known = getattr(self.replan, "known", None)
        return None if known is None else known.to_json()

    def hear(self, told: Any) -> None:
        if told is not None and hasattr(self.replan, "known"):
            self.replan.known = Known.from_json(told)
