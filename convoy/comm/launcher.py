"""What a device tells the launcher that started it: where the job's members answer, and why it ends.

It goes through a pipe, a line of JSON at a time, and is left out where the launcher does not read, or there is none.
"""

import json
import os
import stat
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from typing import Literal, final

from convoy.membership.newcomer import MOST_DOORS

Address = tuple[str, int]

LAUNCHER_PIPE = "CONVOY_LAUNCHER_PIPE"
"""The number of the pipe."""

Cause = Literal["lost", "left", "memory"]
"""Why a device ends: the others are lost to it, or it to them; it was asked to leave; there is not enough memory."""


@final
class Launcher:
    """Who started this process.

    Attributes:
        listens: whether there is one that wants to be told.
    """

    def __init__(self, pipe: int | None = None) -> None:
        self._pipe = pipe
        if pipe is not None:
            os.set_inheritable(pipe, False)
            os.set_blocking(pipe, False)  # who trains waits for no reader

    @classmethod
    def of_process(cls, environment: MutableMapping[str, str]) -> "Launcher":
        """The launcher of this process. The number is taken out: in a process started from here it would mean another file."""
        number = environment.pop(LAUNCHER_PIPE, "")
        with suppress(OSError, ValueError):
            if stat.S_ISFIFO(os.fstat(int(number)).st_mode):
                return cls(int(number))
        return cls()

    @property
    def listens(self) -> bool:
        return self._pipe is not None

    def tell_members(self, generation: int, doors: Sequence[Address]) -> None:
        """Where the members of a generation answer who wants to come in."""
        self._tell({"generation": generation, "doors": list(doors[:MOST_DOORS])})

    def tell_end(self, cause: Cause) -> None:
        self._tell({"ends": cause})

    def _tell(self, words: dict[str, object]) -> None:
        if self._pipe is not None:
            with suppress(OSError):  # full, or nobody reads any more
                os.write(self._pipe, json.dumps(words).encode() + b"\n")
