"""Finds the cause of a failure in the exit statuses of a job's devices."""

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.errors import DeviceLostError

ERROR_STATUS = 2
"""Exit status of a device that has printed ``error: <message>`` for a ConvoyError, without a traceback."""

PIPE_STATUS = 128 + signal.SIGPIPE
"""Exit status of a device after its output pipe was closed, as by `| head -1`. That is no failure."""

SHOWN_LINES = 30


@dataclass(frozen=True)
class Ending:
    """The end of one device.

    Attributes:
        name: its torch device, such as "cuda:0".
        status: its exit status, or minus the number of the signal that killed it.
        stopped_by_us: the launcher ended it because of another device.
        in_startup: it was killed before training. The others would wait for it.
        lines: the last lines of its error output. Empty for device 0, which writes to the terminal.
    """

    device: int
    name: str
    status: int
    stopped_by_us: bool = False
    lines: tuple[str, ...] = ()
    in_startup: bool = False

    @property
    def exit_status(self) -> int:
        """The status in a shell: 128 + n after signal n."""
        return self.status if self.status >= 0 else 128 - self.status


def conclude(endings: Sequence[Ending], host_lost: DeviceLostError | None = None, *, goes_on: bool = False) -> int:
    """Print the errors that the terminal has not shown yet. Return the exit status of the job.

    A signal outranks a crash, and a crash outranks a printed error: when one device is lost, the others end with their own
    errors, sometimes earlier than the first.

    Args:
        endings: in order of time.
        host_lost: a host was lost with its devices. A killed device takes precedence.
        goes_on: the devices continue without a lost one. One successful device is enough; else the last ones decide.

    Raises:
        DeviceLostError: a device crashed or was killed, or a host was lost.
    """
    bad = [ending for ending in endings if ending.status != 0 and not ending.stopped_by_us]
    if goes_on and any(ending.status == 0 for ending in endings):
        return 0
    if any(ending.device == 0 and ending.status == PIPE_STATUS for ending in bad):
        return PIPE_STATUS
    if goes_on and bad and bad[-1].status == ERROR_STATUS and not any(ending.in_startup for ending in bad):
        bad, host_lost = [ending for ending in bad if ending.status == ERROR_STATUS], None
    killed = [ending for ending in bad if ending.status < 0]
    crashed = [ending for ending in bad if ending.status not in (0, ERROR_STATUS)]
    # A traceback that names another lost device is not the cause. Device 0's traceback is not known here.
    crashed.sort(key=lambda ending: 2 if _lost_peer(ending) is not None else ending.device == 0)
    for cause in (*killed, *crashed):
        peer = _lost_peer(cause) if cause.status > 0 else None
        raise peer or DeviceLostError(cause.device, _failure_text(cause))
    if host_lost is not None:
        raise host_lost
    for line in _unprinted(bad):
        print(line, file=sys.stderr)
    return ERROR_STATUS if bad else 0


def _lost_peer(ending: Ending) -> DeviceLostError | None:
    """Return the lost device named in the last line of a script's traceback, if any."""
    if ending.lines and (found := re.match(r"\S*DeviceLostError: (device (\d+) .*)", ending.lines[-1])):
        return DeviceLostError(int(found[2]), found[1])
    return None


def _failure_text(ending: Ending) -> str:
    how = f"device {ending.device} ({ending.name})"
    if ending.status < 0:
        known = -ending.status in set(signal.Signals)
        how += f" was killed by {signal.Signals(-ending.status).name if known else f'signal {-ending.status}'}"
        if -ending.status == signal.SIGKILL:
            how += ". If nobody killed it, its machine ran out of memory: give this device a smaller share"
    else:
        how += f" ended with exit status {ending.status}"
    if ending.device == 0:
        return f"{how}. Its own output is above"
    if not ending.lines:
        return f"{how}. It left no error output"
    last = "\n".join(f"  {line}" for line in ending.lines[-SHOWN_LINES:])
    return f"{how}. The end of its error output:\n{last}"


def _unprinted(bad: Sequence[Ending]) -> tuple[str, ...]:
    """Return each printed error that the terminal has not shown, once.

    Device 0 has printed its error, which is the error of all devices or names a lost device.
    """
    devices: dict[str, list[str]] = {}
    for ending in bad:
        if ending.device != 0:
            devices.setdefault(_message(ending.lines), []).append(f"device {ending.device} ({ending.name})")
    if any(ending.device == 0 for ending in bad):
        if len(devices) == 1:
            return ()
        # A message that starts with a device's name reports a loss that device 0 has already printed.
        devices = {text: names for text, names in devices.items() if not text.startswith("device ")}
    only = len(devices) == 1
    return tuple(
        f"error: {text}" if only and len(names) > 1 else f"error on {' and '.join(names)}: {text}"
        for text, names in devices.items()
    )


def _message(lines: Sequence[str]) -> str:
    """Return the text after the last ``error:``; all kept lines if there is none."""
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("error: "):
            return "\n".join([lines[start].removeprefix("error: "), *lines[start + 1 :]])
    return "\n".join(lines[-SHOWN_LINES:]) or "it ended with exit status 2 and no message"
