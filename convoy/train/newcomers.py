"""Who comes into a training that runs: what the devices there ask, and what they tell."""

import threading
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from convoy.comm.applicants import Applicant
from convoy.comm.channel import Words
from convoy.comm.regroup import Membership

Verdict = tuple[Literal["wanted", "spare", "refused"], str]
"""What becomes of one who asks to be let in, and why."""


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
