"""How the devices of a job ended, and which of them was the cause. Pure: the launcher acts on it."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.errors import DeviceLostError

ERROR_STATUS = 2
"""The exit status of a device that has printed ``error: <message>``: a ConvoyError, which needs no traceback."""

PIPE_STATUS = 128 + signal.SIGPIPE
"""That of a device whose reader of its output is gone: as after `| head -1`, which is no failure that is to be told."""

SHOWN_LINES = 30


@dataclass(frozen=True)
class Ending:
    """How one device ended.

    Attributes:
        name: what it computed on, such as "cuda:0".
        status: its exit status, or minus the number of the signal that ended it.
        stopped_by_us: the launcher ended it, because of another.
        lines: the last lines of its error output; device 0 writes its own to the terminal.
    """

    device: int
    name: str
    status: int
    stopped_by_us: bool = False
    lines: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """As a shell gives it: 128 + n after signal n."""
        return self.status if self.status >= 0 else 128 - self.status


@dataclass(frozen=True)
class Outcome:
    """What to tell: lines to print and the exit status, or the device that was lost and why."""

    status: int
    lines: tuple[str, ...] = ()
    lost: DeviceLostError | None = None


def judge(endings: Sequence[Ending], goes_on: bool = False) -> Outcome:
    """Find the first cause among the endings, given in order of time.

    Args:
        goes_on: the job was one that goes on without the devices that are lost: it ended well if one of them did, and else as
            the last say that were there.

    A signal outranks a crash, and a crash outranks an error that a device printed: when one is gone the others leave
    with errors of their own, some of them sooner than it takes the first to end.
    """
    bad = [ending for ending in endings if ending.status != 0 and not ending.stopped_by_us]
    if goes_on and any(ending.status == 0 for ending in endings):
        return Outcome(0)
    if any(ending.device == 0 and ending.status == PIPE_STATUS for ending in bad):
        return Outcome(PIPE_STATUS)
    if goes_on and bad and bad[-1].status == ERROR_STATUS:
        bad = [ending for ending in bad if ending.status == ERROR_STATUS]
    killed = [ending for ending in bad if ending.status < 0]
    crashed = [ending for ending in bad if ending.status not in (0, ERROR_STATUS)]
    # Whoever tells of another's loss is no cause. What device 0 told is not known here.
    crashed.sort(key=lambda ending: 2 if _blamed(ending) is not None else ending.device == 0)
    for ending in (*killed, *crashed):
        if ending.status > 0 and (blamed := _blamed(ending)) is not None:
            return Outcome(ERROR_STATUS, lost=blamed)
        return Outcome(ERROR_STATUS, lost=DeviceLostError(ending.device, _obituary(ending)))
    if not bad:
        return Outcome(0)
    return Outcome(ERROR_STATUS, lines=_untold(bad))


def _blamed(ending: Ending) -> DeviceLostError | None:
    """The loss with which a script's traceback ends, if it does."""
    if ending.lines and (found := re.match(r"\S*DeviceLostError: (device (\d+) .*)", ending.lines[-1])):
        return DeviceLostError(int(found[2]), found[1])
    return None


def _obituary(ending: Ending) -> str:
    who = f"device {ending.device} ({ending.name})"
    if ending.status < 0:
        name = signal_name(-ending.status)
        how = f"{who} was killed by {name}"
        if -ending.status == signal.SIGKILL:
            how += ". Unless somebody did that, its machine ran out of memory: give this device a smaller share"
    else:
        how = f"{who} ended with exit status {ending.status}"
    if ending.device == 0:
        return f"{how}. Its own output is above"
    if not ending.lines:
        return f"{how}. It left no error output"
    last = "\n".join(f"  {line}" for line in ending.lines[-SHOWN_LINES:])
    return f"{how}. The end of its error output:\n{last}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _untold(bad: Sequence[Ending]) -> tuple[str, ...]:
    """The printed errors that the terminal has not seen, each once.

    Device 0 has printed its own. It is the same if all have met the same error, and tells the cause if one was lost.
    """
    devices: dict[str, list[Ending]] = {}
    for ending in bad:
        if ending.device != 0:
            devices.setdefault(_message(ending.lines), []).append(ending)
    if any(ending.device == 0 for ending in bad):
        if len(devices) == 1:
            return ()
        # Messages that begin with a device's name tell of another's loss, and device 0 has said it already.
        devices = {text: those for text, those in devices.items() if not text.startswith("device ")}
    if len(devices) > 1:
        return tuple(f"error on {_names(those)}: {text}" for text, those in devices.items())
    return tuple(f"error{'' if len(those) > 1 else f' on {_names(those)}'}: {text}" for text, those in devices.items())


def _names(endings: Sequence[Ending]) -> str:
    return " and ".join(f"device {each.device} ({each.name})" for each in endings)


def _message(lines: Sequence[str]) -> str:
    """What follows ``error:`` in a device's output, to the end; all of its last lines where it printed none."""
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("error: "):
            return "\n".join([lines[start].removeprefix("error: "), *lines[start + 1 :]])
    return "\n".join(lines[-SHOWN_LINES:]) or "it ended with exit status 2 and no message"
