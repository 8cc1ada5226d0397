"""The system's programs that an emulated fleet calls (ip, tc), and the names of what it makes."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import InputError

_CALL_LIMIT_S = 10.0

_PACKAGES = {
    "ip": "iproute2 (apt install iproute2; dnf install iproute)",
    "tc": "iproute2 (apt install iproute2; dnf install iproute-tc)",
    "sh": "a POSIX shell",
}

_NAME = re.compile(r"convoy-(\d+)-(\d+)(?:-.+)?")


def find(program: str) -> str:
    """Return the full path of a program.

    Raises:
        InputError: it is missing; the message names its package.
    """
    # Root's PATH lacks the sbin folders under some su and cron set-ups.
    path = shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if path is None:
        raise InputError(
            f"program {program!r} is not on this machine, and an emulated fleet needs it: install {_PACKAGES[program]}"
        )
    return path


def call(program: str, *arguments: str) -> str:
    """Run a program to its end and return its output.

    Raises:
        InputError: it failed, or took longer than ten seconds; the message has its own words.
    """
    line = " ".join((program, *arguments))
    try:
        # A session of its own: Ctrl-C reaches this process, which then removes what the program made.
        done = subprocess.run(
            [find(program), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CALL_LIMIT_S,
            start_new_session=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise InputError(f"`{line}` took more than {_CALL_LIMIT_S:g} s: try again on a calmer machine") from error
    if done.returncode != 0:
        reason = done.stderr.strip().rstrip(".")
        raise InputError(
            f"`{line}` ended with status {done.returncode}: {reason or 'no message'}. An emulated fleet needs a "
            "kernel with network namespaces, veth, bridge, tbf and control groups, and the right to change them; "
            "in a container, start it privileged"
        )
    return done.stdout


@dataclass(frozen=True)
class RunName:
    """`convoy-<pid>-<started>`: the name of one run, which everything it makes carries, so that orphans can be found.

    Attributes:
        pid: of the process that emulates.
        started: when that process started, in clock ticks after boot. Process ids are reused; the pair is not.
    """

    pid: int
    started: int

    @classmethod
    def mine(cls) -> "RunName":
        """Return the name of this process's run."""
        started = _started(os.getpid())
        assert started is not None, "this process is alive"
        return cls(os.getpid(), started)

    @classmethod
    def parse(cls, name: str) -> "RunName | None":
        """Return the run that a namespace or control group belongs to; None if it is of no run."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2])) if found else None

    def __str__(self) -> str:
        return f"convoy-{self.pid}-{self.started}"

    def of(self, part: str) -> str:
        """Return the name of one part of this run."""
        return f"{self}-{part}"

    def alive(self) -> bool:
        """Return whether the process of this run is alive."""
        return _started(self.pid) == self.started


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses and may hold blanks; state is field 3, start time field 22.
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])
