"""Who comes into a training that runs: what the devices there ask, and what they tell."""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from convoy.checkpoint.values import decode, encode
from convoy.comm.agreement import gather
from convoy.comm.channel import Words
from convoy.comm.group import Group
from convoy.elastic.applicants import Applicant
from convoy.elastic.regroup import Membership

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
    membership: Membership,
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

    def __init__(self, membership: Membership, newcomers: Newcomers) -> None:
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
