"""Admission: which processes ask to join a running job, and the decision about each.

Every device keeps the join requests that reach its listener. The first device decides, in a thread, while it trains.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

import torch

from convoy._version import __version__
from convoy.checkpoint.manifest import decode, encode
from convoy.comm.connection import Fields
from convoy.comm.control_messages import gather
from convoy.machine import roster
from convoy.machine.accelerator import modes
from convoy.runtime.module import Distributed

if TYPE_CHECKING:
    from convoy.elastic.regroup import Membership

Address = tuple[str, int]

FRESH_S = 1.0
"""A process that waits asks far more often; one that was silent for this long is gone."""

POLL_S, SPARE_POLL_S = 0.03, 1.0
"""Seconds between two requests: before a decision, and of a spare."""

DECISION_S = 10.0
"""How long the end of a training waits for a decision."""

Verdict = tuple[Literal["wanted", "spare", "refused"], str]
"""The decision about a join request, and the reason."""

RunState = tuple[Callable[[], Any], Callable[[Any], None]]
"""Returns, as JSON, what a joining device must know of the run; and the function that takes it over there."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """A process that asks to join: its unique mark, the address of its own listener, and its description of itself."""

    mark: str
    address: Address
    facts: Fields


@dataclass(slots=True)
class _Request:
    applicant: Applicant
    asked_s: float
    verdict: Literal["none", "wanted", "spare", "refused"] = "none"
    reason: str = ""
    device: int | None = None


@final
class Applicants:
    """The join requests at this device's listener, with the decisions."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._lock = threading.Lock()

    def ask(self, applicant: Applicant) -> Fields:
        """Note a request, on the listener's thread. Return the answer."""
        with self._lock:
            request = self._requests.setdefault(applicant.mark, _Request(applicant, 0.0))
            request.asked_s = time.monotonic()
            return {request.verdict: request.reason} if request.verdict in ("spare", "refused") else {"wait": True}

    def wanted(self) -> list[Applicant]:
        """Return those that are to be admitted, and still wait."""
        return self.waiting("wanted")

    def waiting(self, verdict: str) -> list[Applicant]:
        """Return those with this verdict that still wait."""
        with self._lock:
            oldest_s = time.monotonic() - FRESH_S
            for mark in [mark for mark, each in self._requests.items() if each.asked_s < oldest_s - SPARE_POLL_S]:
                del self._requests[mark]
            found = self._requests.values()
            return [each.applicant for each in found if each.verdict == verdict and each.asked_s > oldest_s]

    def decide(self, mark: str, verdict: Literal["wanted", "spare", "refused"], reason: str = "") -> None:
        with self._lock:
            if mark in self._requests:
                self._requests[mark].verdict, self._requests[mark].reason = verdict, reason

    def number(self, mark: str, device: int) -> None:
        """Note that this process joins as this device."""
        with self._lock:
            if mark in self._requests:
                self._requests[mark].device = device

    def device_of(self, mark: str) -> int | None:
        with self._lock:
            return self._requests[mark].device if mark in self._requests else None

    def after_regroup(self) -> None:
        """Drop those that joined, and decide again about spares."""
        with self._lock:
            self._requests = {mark: each for mark, each in self._requests.items() if each.device is None}
            for each in self._requests.values():
                if each.verdict == "spare":
                    each.verdict, each.reason = "none", ""


class Admission(Protocol):
    """Decides about join requests, and sends joining devices what they must know besides the model's state."""

    def decide(self, facts: Fields, members: Sequence[int], device: int) -> Verdict:
        """Decide about a process that would become this device; on the first member, in a thread of its own."""
        ...

    def note_joined(self, device: int, facts: Fields) -> None:
        """Note that this device has joined; on all others, before the plan is made."""

    def knowledge(self) -> Any:
        """Return, on the first device, what joining devices must know, as JSON."""

    def learn(self, knowledge: Any) -> None:
        """Take this over, on joining devices."""


class AdmissionThread:
    """Decides in the background about the join requests of one device, one after another, while it trains."""

    def __init__(self, membership: "Membership", admission: Admission) -> None:
        self.membership, self.admission = membership, admission
        self._thread: threading.Thread | None = None

    def wanted(self) -> bool:
        """Return whether a process is to be admitted now. Start to decide about the next new request."""
        if self.membership.generation.members[0] != self.membership.me:
            return False
        applicants = self.membership.applicants
        if (self._thread is None or not self._thread.is_alive()) and (new := applicants.waiting("none")):
            self._thread = threading.Thread(target=self._decide, args=(new[0],), name="convoy-admission", daemon=True)
            self._thread.start()
        return bool(applicants.wanted())

    def _decide(self, applicant: Applicant) -> None:
        try:
            members = self.membership.generation.members
            verdict, reason = self.admission.decide(applicant.facts, members, self.membership.next_device)
        except Exception as error:  # its description may be anything
            verdict, reason = "refused", f"its request failed here ({type(error).__name__}: {error})"
        self.membership.applicants.decide(applicant.mark, verdict, reason)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(DECISION_S)


def gather_joined(
    membership: "Membership",
    has: Sequence[bool],
    facts: Fields | None,
    others: Any,
    admission: Admission | None,
    run_state: RunState | None,
) -> tuple[list[str], Any]:
    """Return the names of the devices that joined; and the state that is the same everywhere, for devices without a snapshot.
    Joining devices get what they must know. Every device calls it.

    Args:
        has: which devices have a snapshot of the step after which all continue; not all have.
        facts: how this device described itself, where it joined later.
        others: the state besides the model, where this device has that snapshot.
    """
    group = membership.group
    rows = gather(group, "who is new", None if has[group.device] else facts)
    new = {d: row for d, row in zip(membership.generation.members, rows, strict=True) if row is not None}
    for device, row in new.items():
        if admission is not None and device != membership.me:
            admission.note_joined(device, row)
    text = ""
    if has.index(True) == group.device:
        known = None if admission is None else admission.knowledge()
        run = None if run_state is None else run_state[0]()
        text = json.dumps([encode(others, "the state of the training"), known, run])
    state, known, run = json.loads(group.agree("what joining devices must know", text)[has.index(True)])
    if membership.me in new:
        if admission is not None:
            admission.learn(known)
        if run_state is not None:
            run_state[1](run)
    names = [" ".join(["device", str(d), *([f"({f['title']})"] if "title" in f else [])]) for d, f in new.items()]
    return names, decode(state)


# --- scripts ---------------------------------------------------------------------------------------------------------


def offer() -> Fields:
    """Return how a script's job describes itself to joining devices."""
    return {"version": __version__, "script": True, "job": roster.job()}


def facts_of(model: Distributed) -> Fields:
    """Return how a joining device of a script describes itself."""
    return {"same": required_facts(model), "title": str(model.group.torch_device)}


def required_facts(model: Distributed) -> dict[str, str]:
    """Return what must be the same on all devices, by its name in messages."""
    torch_version = ".".join(torch.__version__.split(".")[:2])
    graph = model.traced[True].graph
    return {"convoy": __version__, "torch": torch_version, "model": graph.fingerprint, **modes()}


def refusal(facts: Fields, required: dict[str, str]) -> Verdict | None:
    """Return why a device with these facts cannot join; None if it can."""
    for what, mine in required.items():
        if (theirs := facts["same"].get(what)) != mine and "unknown" not in (theirs, mine):
            rule = "it must be the same on every machine"
            return "refused", f"its {what} is {theirs}, that of the job is {mine}: {rule}"
    return None


class ScriptAdmission:
    """Admits devices that have the same model.

    Args:
        replan: that of the members, whose knowledge of the devices is shared.
        has_epochs: whether the script iterates over `Members.epochs`, where devices join.
    """

    def __init__(self, model: Distributed, replan: Any, has_epochs: Callable[[], bool]) -> None:
        self.model, self.replan, self.has_epochs = model, replan, has_epochs

    def decide(self, facts: Fields, members: Sequence[int], device: int) -> Verdict:  # noqa: ARG002
        if (refused := refusal(facts, required_facts(self.model))) is not None:
            return refused
        if not self.has_epochs():
            return "refused", (
                "its script has no `for epoch in members.epochs(n):`, where devices join: write it around the loop over "
                "batches"
            )
        return "wanted", ""

    def note_joined(self, device: int, facts: Fields) -> None:
        pass  # nothing was measured of it: it gets a mean share

    def knowledge(self) -> Any:
        return self.replan.to_json() if hasattr(self.replan, "learn") else None

    def learn(self, knowledge: Any) -> None:
        if knowledge is not None and hasattr(self.replan, "learn"):
            self.replan.learn(knowledge)
