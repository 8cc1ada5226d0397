"""What measuring says while it lasts, to a script that has no screen of Convoy's."""

import sys
import time
from collections.abc import Callable

from convoy.comm.group import Group

Progress = Callable[[str, int, int], None]
"""Told what is done at the moment, how much is done, and how much there is."""

EVERY_S = 10.0


def to_stderr(
    group: Group, work: str, about_s: float | None = None, now: Callable[[], float] = time.monotonic
) -> Progress:
    """Says on device 0's standard error what is waited for and about how long, at once and then every ten seconds.

    One device alone has nothing to wait for, and says nothing.
    """
    if group.device != 0 or group.devices == 1:
        return lambda *_: None
    begin_s = told_s = now()
    length = "" if about_s is None else f", about {max(1, round(about_s))} s"
    print(f"convoy: {work}{length} ...", file=sys.stderr, flush=True)

    def tell(what: str, done: int, total: int) -> None:
        nonlocal told_s
        if now() - told_s >= EVERY_S:
            told_s = now()
            count = f" ({done} of {total})" if total else ""
            print(f"convoy:   {told_s - begin_s:.0f} s: {what}{count}", file=sys.stderr, flush=True)

    return tell
