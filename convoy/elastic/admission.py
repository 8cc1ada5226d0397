"""Collects join requests at a running job and decides about them.

Every device stores the join requests that reach its listener. The first device decides, in a thread, while it trains.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from convoy._version import __version__
from convoy.checkpoint.run_folder import decode, encode
from convoy.comm.connection import Connection, Fields
from convoy.comm.control_messages import gather
from convoy.comm.deadlines import TIMEOUT_S, wait_limit
from convoy.machine import roster
from convoy.machine.accelerator import modes
from convoy.runtime.module import Distributed

if TYPE_CHECKING:
    from convoy.elastic.regroup import Membership

Address = tuple[str, int]

POLL_S, SPARE_POLL_S = 0.03, 1.0  # between two requests: before the decision, and as a spare
DECISION_S = 10.0  # to wait for a running decision when the training ends

Verdict = tuple[Literal["wanted", "spare", "refused"], str]  # the decision about a join request, and the reason

RunState = tuple[Callable[[], Any], Callable[[Any], None]]
"""Two functions: the first returns the run's state for joining devices, as JSON; the second loads it there."""


@dataclass(slots=True)
class Applicant:
    """A process that asks to join, and the decision about it.

    Attributes:
        mark: a random id of the process.
        facts: the process's description of itself.
        connection: that of its last request; the listener closes it when the process has ended.
        gap_s: longest time between two requests.
        device: the id with which it joins; None before the admission.
    """

    mark: str
    address: Address
    facts: Fields
    connection: Connection
    asked_s: float = field(default_factory=time.monotonic)
    gap_s: float = 0.0
    verdict: Literal["none", "wanted", "spare", "refused"] = "none"
    reason: str = ""
    device: int | None = None


@final
class Applicants:
    """The join requests at this device's listener, with the decisions. Several threads use it."""

    def __init__(self) -> None:
        self._found: dict[str, Applicant] = {}
        self._lock = threading.Lock()

    def ask(self, applicant: Applicant) -> tuple[Fields, int | None]:
        """Store a request, on the listener's thread. Return the reply and the process's device id, None if not admitted."""
        with self._lock:
            known = self._found.setdefault(applicant.mark, applicant)
            known.gap_s = max(known.gap_s, applicant.asked_s - known.asked_s)
            known.asked_s, known.connection = applicant.asked_s, applicant.connection
            decided = known.verdict in ("spare", "refused")
            return {known.verdict: known.reason} if decided else {"wait": True}, known.device

    def waiting(self, verdict: str) -> list[Applicant]:
        """Return the processes with this verdict that still wait."""
        with self._lock:
            now_s, found = time.monotonic(), self._found
            self._found = {m: a for m, a in found.items() if a.asked_s + wait_limit([a.gap_s], TIMEOUT_S) > now_s}
            return [a for a in self._found.values() if a.verdict == verdict and a.connection.socket.fileno() >= 0]

    def after_regroup(self) -> None:
        """Drop the requests of joined devices, and reset the decisions about spares."""
        with self._lock:
            self._found = {mark: each for mark, each in self._found.items() if each.device is None}
            for each in self._found.values():
                if each.verdict == "spare":
                    each.verdict, each.reason = "none", ""


class AdmissionThread:
    """A background thread that decides about one device's join requests, one after another, while it trains."""

    def __init__(self, membership: "Membership", admission: "ScriptAdmission") -> None:
        self.membership, self.admission = membership, admission
        self._thread: threading.Thread | None = None

    def wanted(self) -> bool:
        """Return whether an accepted process waits. Start the decision about the next new request."""
        if self.membership.generation.members[0] != self.membership.me:
            return False
        applicants = self.membership.applicants
        if (self._thread is None or not self._thread.is_alive()) and (new := applicants.waiting("none")):
            self._thread = threading.Thread(target=self._decide, args=(new[0],), name="convoy-admission", daemon=True)
            self._thread.start()
        return bool(applicants.waiting("wanted"))

    def _decide(self, applicant: Applicant) -> None:
        try:
            members = self.membership.generation.members
            verdict, reason = self.admission.decide(applicant.facts, members, self.membership.next_device)
        except Exception as error:  # the description is untrusted input
            verdict, reason = "refused", f"its request failed here ({type(error).__name__}: {error})"
        applicant.reason, applicant.verdict = reason, verdict

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(DECISION_S)


def gather_joined(
    membership: "Membership",
    has: Sequence[bool],
    facts: Fields | None,
    others: Any,
    admission: "ScriptAdmission | None",
    run_state: RunState | None,
) -> tuple[list[str], Any]:
    """Send joined devices the training state other than the model, the planner's knowledge, and the state of the run. Return
    the joined devices' names and that training state. Every device calls it.

    Args:
        has: for each device, whether it has a snapshot of the step from which all continue; False for at least one.
        facts: this device's description of itself, if it joined a running job.
        others: the training state other than the model, if this device has that snapshot.
    """
    group = membership.group
    rows = gather(group, "joined devices", None if has[group.device] else facts)
    new = {d: row for d, row in zip(membership.generation.members, rows, strict=True) if row is not None}
    for device, row in new.items():
        if admission is not None and device != membership.me:
            admission.note_joined(device, row)
    text = ""
    if has.index(True) == group.device:
        known = None if admission is None else admission.knowledge()
        run = None if run_state is None else run_state[0]()
        text = json.dumps([encode(others, "the state of the training"), known, run])
    state, known, run = json.loads(group.agree("state for joined devices", text)[has.index(True)])
    if membership.me in new:
        if admission is not None:
            admission.learn(known)
        if run_state is not None:
            run_state[1](run)
    names = [" ".join(["device", str(d), *([f"({f['title']})"] if "title" in f else [])]) for d, f in new.items()]
    return names, decode(state)


def offer() -> Fields:
    """Return a script's job description for joining devices."""
    return {"version": __version__, "script": True, "job": roster.job()}


def facts_of(model: Distributed) -> Fields:
    """Return the description that a joining device of a script sends to the job."""
    return {"same": required_facts(model), "title": str(model.group.torch_device)}


def required_facts(model: Distributed) -> dict[str, str]:
    """Return the values that must be the same on all devices, by their names in messages."""
    torch_version = ".".join(torch.__version__.split(".")[:2])
    graph = model.traced[True].graph
    return {"convoy": __version__, "torch": torch_version, "model": graph.fingerprint, **modes()}


def refusal(facts: Fields, required: dict[str, str]) -> Verdict | None:
    """Return the refusal of a device with these facts; None if it can join."""
    for name, mine in required.items():
        if (theirs := facts["same"].get(name)) != mine and "unknown" not in (theirs, mine):
            rule = "it must be the same on every machine"
            return "refused", f"its {name} is {theirs}, that of the job is {mine}: {rule}"
    return None


class ScriptAdmission:
    """A policy that admits devices with the same model and versions, and shares knowledge with them.

    Args:
        replan: the members' planner, whose knowledge of the devices is shared.
        has_epochs: returns whether the script iterates over `Members.epochs`, where devices join.
    """

    def __init__(self, model: Distributed, replan: Any, has_epochs: Callable[[], bool]) -> None:
        self.model, self.replan, self.has_epochs = model, replan, has_epochs

    def decide(self, facts: Fields, members: Sequence[int], device: int) -> Verdict:  # noqa: ARG002
        """Decide about a process that would get this device id. Runs on the first member, in a separate thread."""
        if (refused := refusal(facts, required_facts(self.model))) is not None:
            return refused
        if not self.has_epochs():
            return "refused", "the job's script lacks `for epoch in members.epochs(n):` around its loop over batches"
        return "wanted", ""

    def note_joined(self, device: int, facts: Fields) -> None:
        """Record that this device has joined: on all others, before they plan. Without measurements its share is average."""

    def knowledge(self) -> Any:
        """Return the first device's knowledge for joining devices, as JSON."""
        return self.replan.to_json() if hasattr(self.replan, "learn") else None

    def learn(self, knowledge: Any) -> None:
        if knowledge is not None and hasattr(self.replan, "learn"):
            self.replan.learn(knowledge)
