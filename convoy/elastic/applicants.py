"""Who asks a training's devices to be let in: what each door keeps of it, for the device that decides."""

import threading
import time
from dataclasses import dataclass
from typing import Literal, final

from convoy.comm.channel import Words

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
