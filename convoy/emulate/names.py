"""The name of one rehearsal, which everything it creates carries, so that a later one can tell what is orphaned."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_PATTERN = re.compile(r"convoy-(\d+)-(\d+)(?:-.+)?")


@dataclass(frozen=True)
class RunName:
    """`convoy-<pid>-<started>`.

    Attributes:
        pid: process id of the rehearsing process.
        started: when that process started, in clock ticks after boot. Process ids are given out again; the pair is not.
    """

    pid: int
    started: int

    @classmethod
    def mine(cls) -> "RunName":
        started = _started(os.getpid())
        assert started is not None, "this process is alive"
        return cls(os.getpid(), started)

    @classmethod
    def parse(cls, name: str) -> "RunName | None":
        """The run that a namespace, control group or mount belongs to; None if it is not a rehearsal's."""
        found = _PATTERN.fullmatch(name)
        return cls(int(found[1]), int(found[2])) if found else None

    def __str__(self) -> str:
        return f"convoy-{self.pid}-{self.started}"

    def of(self, part: str) -> str:
        """The name of one part of this run."""
        return f"{self}-{part}"

    def alive(self) -> bool:
        """Whether the process that this run belongs to is still there."""
        return _started(self.pid) == self.started


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses and may hold blanks; state is field 3, start time field 22.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])
