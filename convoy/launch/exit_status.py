"""Finds the cause of a failure in the exit statuses of a job's devices."""

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.errors import DeviceLostError

ERROR_STATUS = 2  # exit status of a device that has printed ``error: <message>`` for a ConvoyError, without a traceback
# Exit status of a device after its output pipe was closed, as by `| head -1`. That is no failure.
PIPE_STATUS = 128 + signal.SIGPIPE
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

    @property
    def lost_peer(self) -> DeviceLostError | None:
        """The lost device that the last line of a script's traceback names."""
        found = re.match(r"\S*DeviceLostError: (device (\d+) .*)", self.lines[-1]) if self.lines else None
        return None if found is None or self.status < 0 else DeviceLostError(int(found[2]), found[1])


def conclude(endings: Sequence[Ending], host_lost: DeviceLostError | None = None, *, goes_on: bool = False) -> int:
    """Print the errors that the terminal has not shown yet. Return the exit status of the job.

    A signal outranks a crash, and a crash outranks a printed error: when one device is lost, the others end with their own
    errors, sometimes earlier than the first.

    Args:
        endings: in order of time.
        host_lost: a host was lost with its devices. A killed device takes precedence.
        goes_on: the devices continue without a lost one. One successful device is enough; else the last ones decide.
    """
    bad = [ending for ending in endings if ending.status != 0 and not ending.stopped_by_us]
    if goes_on and any(ending.status == 0 for ending in endings):
        return 0
    if any(ending.device == 0 and ending.status == PIPE_STATUS for ending in bad):
        return PIPE_STATUS
    if goes_on and bad and bad[-1].status == ERROR_STATUS and not any(ending.in_startup for ending in bad):
        bad, host_lost = [ending for ending in bad if ending.status == ERROR_STATUS], None
    if crashed := [ending for ending in bad if ending.status != ERROR_STATUS]:
        # A traceback that names another lost device is not the cause. Device 0's traceback is not known here.
        cause = min(crashed, key=lambda each: (each.status > 0, each.lost_peer is not None, each.device == 0))
        raise cause.lost_peer or DeviceLostError(cause.device, _failure_text(cause))
    if host_lost is not None:
        raise host_lost
    # Print each error that the terminal has not shown, once: device 0 has printed its own.
    devices: dict[str, list[str]] = {}
    for ending in bad:
        if ending.device != 0:
            text = "\n".join(["", *ending.lines[-SHOWN_LINES:]]).rpartition("\nerror: ")[2].strip("\n")
            text = text or "it ended with exit status 2 and no message"
            devices.setdefault(text, []).append(f"device {ending.device} ({ending.name})")
    only, has_first = len(devices) == 1, any(ending.device == 0 for ending in bad)
    for text, names in devices.items():
        # Device 0 has printed the error of all devices, and the line of a lost device, which begins with its name.
        if not has_first or not (only or text.startswith("device ")):
            title = "error" if only and len(names) > 1 else f"error on {' and '.join(names)}"
            print(f"{title}: {text}", file=sys.stderr)
    return ERROR_STATUS if bad else 0


def _failure_text(ending: Ending) -> str:
    how = f"device {ending.device} ({ending.name}) ended with exit status {ending.status}"
    if ending.status < 0:
        name = next((each.name for each in signal.Signals if each == -ending.status), f"signal {-ending.status}")
        how = f"device {ending.device} ({ending.name}) was killed by {name}"
        if ending.status == -signal.SIGKILL:
            how += ". If nobody killed it, its machine ran out of memory: give this device a smaller share"
    if ending.device == 0:
        return f"{how}. Its own output is above"
    if not ending.lines:
        return f"{how}. It left no error output"
    last = "\n".join(f"  {line}" for line in ending.lines[-SHOWN_LINES:])
    return f"{how}. The end of its error output:\n{last}"
