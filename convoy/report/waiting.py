"""Whoever waits is told for what, since when, and about how long it takes."""

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from convoy.report.numbers import seconds

LINE_EVERY_S = 10.0
"""Where there is no terminal, a line of progress this often."""


class Wait:
    """A line that moves on a terminal, and is gone afterwards; elsewhere a line at once, and one every ten seconds.

    Call it with what is done at the moment, and how much of how much there is.

    Args:
        about_s: how long it takes; None: nobody knows.
        first_s: where there is no terminal, nothing is said before: it may be over by then.
        now: reads seconds.
    """

    def __init__(
        self,
        console: Console,
        text: str,
        about_s: float | None = None,
        first_s: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.now, self.next_s = console, now, first_s
        self.text = text if about_s is None else f"{text}, about {seconds(about_s)}"
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        live = console.is_terminal and not console.quiet
        self.progress = Progress(*columns, console=console, transient=True) if live else None
        self.task = TaskID(0)
        self.begin_s, self.is_told = 0.0, False

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        told = what if not total else f"{what} ({done} of {total})"
        if self.progress is not None:
            self.progress.update(self.task, description=f"{self.text}: {told}")
        elif (waited_s := self.now() - self.begin_s) >= self.next_s:
            self.next_s = waited_s + LINE_EVERY_S
            self._line(f"  {seconds(waited_s)}: {told}" if self.is_told else f"{self.text}: {told} ...")
            self.is_told = True

    def __enter__(self) -> Self:
        self.begin_s, self.is_told = self.now(), False
        if self.progress is not None:
            self.task = self.progress.add_task(self.text)
            self.progress.start()
        elif not self.next_s:
            self.next_s, self.is_told = LINE_EVERY_S, True
            self._line(f"{self.text} ...")
        return self

    def __exit__(self, *_: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def _line(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)
