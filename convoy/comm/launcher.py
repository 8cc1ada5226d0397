"""What a device tells the launcher that started it: where the job's members answer, and why it ends.

It goes through a pipe, a line of JSON at a time, and is left out where the launcher does not read, or there is none.
"""

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import final

from convoy.membership.newcomer import MOST_DOORS

Address = tuple[str, int]

LAUNCHER_PIPE = "CONVOY_LAUNCHER_PIPE"
"""The number of the pipe."""

JOIN = "CONVOY_JOIN"
"""HOST:PORT,... where a job answers that this process is to come into; but for that it is started as the job's devices were."""

LISTEN = "CONVOY_LISTEN"
"""HOST:PORT where the first device of a script answers newcomers, as `convoy run --listen` was given it."""

ASKED_STATUS = 2
"""The exit status of a script that ends since somebody asked it to, as that of `convoy train`."""


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

    def tell_end(self, error: BaseException) -> None:
        """Why this process ends, if it ends by this, and that is no error of its own."""
        of_memory = isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__
        if cause := "memory" if of_memory else getattr(error, "ends", ""):
            self._tell({"ends": cause})

    @contextmanager
    def telling_why(self) -> Iterator[None]:
        """Around all that a device does."""
        try:
            yield
        except BaseException as error:
            self.tell_end(error)
            raise

    def hear_of_script(self) -> Callable[[], None]:
        """Tell why a script ends that does not catch the error. Where somebody asked for it, the last line says so instead of a
        traceback. Returns what undoes this."""
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self.tell_end(error)
            if getattr(error, "ends", "") not in ("left", "stopped"):
                before(kind, error, trace)
                return
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(ASKED_STATUS)

        def undo() -> None:
            sys.excepthook = before

        sys.excepthook = hook
        return undo

    def _tell(self, words: dict[str, object]) -> None:
        if self._pipe is not None:
            with suppress(OSError):  # full, or nobody reads any more
                os.write(self._pipe, json.dumps(words).encode() + b"\n")
