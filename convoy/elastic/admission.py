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
from convoy.checkpoint.run_folder import decode, encode
from convoy.comm.collectives import gather
from convoy.comm.connection import Fields
from convoy.comm.group import Group
from convoy.machine import roster
from convoy.machine.accelerator import modes
from convoy.runtime.module import Distributed

if TYPE_CHECKING:
    from convoy.elastic.regroup import Membership

Address = tuple[str, int]

FRESH_S = 1.0
"""A process that waits asks far more often; one that was silent for this long is gone."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A process that asks to join.

    Attributes:
        mark: unique.
        door: where it will answer as a member.
        facts: how it describes itself.
    """

    mark: str
    door: Address
    facts: Fields


@dataclass(slots=True)
class _Row:
    applicant: Applicant
    heard_s: float
    verdict: Literal["none", "wanted", "spare", "refused"] = "none"
    reason: str = ""
    device: int | None = None


@final
class Applicants:
    """The join requests at this device's listener, and what was decided of each."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._lock = threading.Lock()

    def hear(self, applicant: Applicant) -> Fields:
        """Note a request, on the listener's thread. Return the answer."""
        with self._lock:
            row = self._rows.setdefault(applicant.mark, _Row(applicant, 0.0))
            row.heard_s = time.monotonic()
            return {row.verdict: row.reason} if row.verdict in ("spare", "refused") else {"wait": True}

    def undecided(self) -> list[Applicant]:
        """Return the requests without a decision."""
        return self._those("none")

    def wanted(self) -> list[Applicant]:
        """Return those that are to be admitted, and still wait."""
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
        """Note that this process joins as this device."""
        with self._lock:
            if mark in self._rows:
                self._rows[mark].device = device

    def device_of(self, mark: str) -> int | None:
        with self._lock:
            return self._rows[mark].device if mark in self._rows else None

    def changed(self) -> None:
        """After a regroup: drop those that joined, and decide again about spares."""
        with self._lock:
            self._rows = {mark: row for mark, row in self._rows.items() if row.device is None}
            for row in self._rows.values():
                if row.verdict == "spare":
                    row.verdict, row.reason = "none", ""


POLL_S, SPARE_POLL_S = 0.03, 1.0
"""Seconds between two requests: before a decision, and of a spare."""


Verdict = tuple[Literal["wanted", "spare", "refused"], str]
"""What is decided of a join request, and why."""

RunState = tuple[Callable[[], Any], Callable[[Any], None]]
"""Returns, as JSON, what a joining device must know of the run; and the function that takes it over there."""


class Admission(Protocol):
    """Decides about join requests, and tells joining devices what they must know beside the model's state."""

    def judge(self, facts: Fields, members: Sequence[int], device: int) -> Verdict:
        """Decide about a process that would become this device; on the first member, in a thread of its own."""
        ...

    def came(self, device: int, facts: Fields) -> None:
        """Note that this device has joined; on all others, before the plan is made."""

    def told(self) -> Any:
        """Return, on the first device, what joining devices must know, as JSON."""

    def hear(self, told: Any) -> None:
        """Take this over, on joining devices."""


def gather_joined(
    group: Group,
    membership: "Membership",
    has: Sequence[bool],
    facts: Fields | None,
    others: Callable[[], Any],
    admission: Admission | None,
    run_state: RunState | None,
) -> tuple[list[str], Any]:
    """Return the names of the devices that joined; and the state that is the same everywhere, for devices without a snapshot.
    Joining devices are told what they must know. Every device calls it.

    Args:
        has: which devices have a snapshot of the step after which all continue; not all have.
        facts: how this device described itself, where it joined later.
        others: returns the state beside the model, where this device has that snapshot.
    """
    rows = gather(group, "who is new", None if has[group.device] else facts)
    new = {d: row for d, row in zip(membership.generation.members, rows, strict=True) if row is not None}
    for device, row in new.items():
        if admission is not None and device != membership.me:
            admission.came(device, row)
    text = ""
    if has.index(True) == group.device:
        state = encode(others(), "the state of the training")
        known = None if admission is None else admission.told()
        happened = None if run_state is None else run_state[0]()
        text = json.dumps([state, known, happened])
    state, known, happened = json.loads(group.agree("what joining devices must know", text)[has.index(True)])
    if membership.me in new:
        if admission is not None:
            admission.hear(known)
        if run_state is not None:
            run_state[1](happened)
    names = [" ".join(["device", str(d), *([f"({f['title']})"] if "title" in f else [])]) for d, f in new.items()]
    return names, decode(state)


class Judge:
    """Decides in the background about the join requests of one device, one after another, while it trains."""

    def __init__(self, membership: "Membership", admission: Admission) -> None:
        self.membership, self.admission = membership, admission
        self._thread: threading.Thread | None = None

    def wanted(self) -> bool:
        """Return whether a process is to be admitted now. Start to judge the next new request."""
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
            verdict, reason = self.admission.judge(applicant.facts, members, self.membership.next_device)
        except Exception as error:  # its description may be anything
            verdict, reason = "refused", f"it could not be judged ({type(error).__name__}: {error})"
        self.membership.applicants.decide(applicant.mark, verdict, reason)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(JUDGING_S)


JUDGING_S = 10.0


def offer() -> Fields:
    """Return how a script's job describes itself to joining devices."""
    return {"version": __version__, "script": True, "job": roster.job()}


def facts_of(model: Distributed) -> Fields:
    """Return how a joining device of a script describes itself."""
    return {"same": _same(model), "title": str(model.group.torch_device)}


def _same(model: Distributed) -> dict[str, str]:
    """Return what must be the same on all devices, by its name in messages."""
    torch_version = ".".join(torch.__version__.split(".")[:2])
    graph = model.traced[True].graph
    return {"convoy": __version__, "torch": torch_version, "model": graph.fingerprint, **modes()}


class ScriptAdmission:
    """Admits devices that have the same model.

    Args:
        replan: that of the members, whose knowledge of the devices is shared.
        has_epochs: whether the script iterates over `Members.epochs`, where devices join.
    """

    def __init__(self, model: Distributed, replan: Any, has_epochs: Callable[[], bool]) -> None:
        self.model, self.replan, self.has_epochs = model, replan, has_epochs

    def judge(self, facts: Fields, members: Sequence[int], device: int) -> Verdict:  # noqa: ARG002
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

    def came(self, device: int, facts: Fields) -> None:
        """Nothing: the device gets a mean share, since nothing was measured of it."""

    def told(self) -> Any:
        return self.replan.to_json() if hasattr(self.replan, "learn") else None

    def hear(self, told: Any) -> None:
        if told is not None and hasattr(self.replan, "learn"):
            self.replan.learn(told)
