"""Which devices of a job are started again when they are lost, and when.

A device that was killed, ran out of memory, did not reach the others or went with its host is started again, with growing
pauses, for as long as the job lasts. One that was killed time and again is given up; one that ended by an error of its own, or
was asked to leave, is not tried: it would do so again.
"""

import json
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from convoy.errors import shortened
from convoy.launch.exit_status import Ending, signal_name

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""From the end of a device to its next start: each twice as long as the one before."""

MOST_DEATHS = 5
"""A device that was killed or ran out of memory more often, never training for `LONGEST_PAUSE_S` in between, is given up."""

MOST_SILENCES = 12
"""A host that nobody gives orders any more starts its devices again until nobody has answered them so often in sequence: that
takes half an hour. The job may be over."""

ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which somebody asks a process to end."""

Why = Literal["killed", "memory", "lost", "nobody", "host", "left", "own", "done"]
"""Why a device ended: what it has told (see `convoy.comm.launcher`), or "host": with its host, "own": by an error of its own,
"done": with its work, or with the whole training."""

Address = tuple[str, int]


# ------------------------------------------------------------------------------------------------ one device, pure


@dataclass(frozen=True, slots=True)
class Tries:
    """What is known of one device.

    Attributes:
        process: the number of the process that it is at present; None: it has ended.
        since_s: since when it trains; None: it does not.
        pause_s: the last one before it was started.
        deaths: how often in sequence it was killed, or ran out of memory.
        silences: how often in sequence nobody of the job answered it.
        why, how: it ended; `how` in words that follow its name.
        due_s: when it is started again, or given up; infinite: neither.
    """

    process: int | None
    since_s: float | None = None
    pause_s: float = 0.0
    deaths: int = 0
    silences: int = 0
    why: Why = "own"
    how: str = ""
    due_s: float = math.inf

    @property
    def is_given_up(self) -> bool:
        return self.why in ("left", "own", "done") or self.deaths > MOST_DEATHS


def started(tries: Tries, process: int) -> Tries:
    return replace(tries, process=process, since_s=None, due_s=math.inf)


def ended(tries: Tries, why: Why, how: str, now_s: float) -> Tries:
    """After its process has ended."""
    if tries.since_s is not None and now_s - tries.since_s > LONGEST_PAUSE_S:
        tries = replace(tries, pause_s=0.0, deaths=0)
    deaths = tries.deaths + (why in ("killed", "memory"))
    silences = tries.silences + 1 if why == "nobody" else 0
    pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * tries.pause_s))
    return Tries(None, None, pause_s, deaths, silences, why, how, now_s + pause_s)


def why_ended(ending: Ending, told: str | None) -> tuple[Why, str]:
    """Why a device ended, and how in words, from its exit status and what it told its launcher."""
    if ending.status < 0:
        name = signal_name(-ending.status)
        return "left" if -ending.status in ASKED else "killed", f"was killed by {name}"
    last = ending.lines[-1].strip().removeprefix("error: ") if ending.lines else ""
    how = f"ended: {shortened(last)}" if last else f"ended with exit status {ending.status}"
    match told:
        case "lost" | "nobody" | "left":
            return told, how
        case "stopped":
            return "done", how
        case "memory":
            return told, "ran out of memory"
    return "own", how


# ---------------------------------------------------------------------------------------------- all devices of a job


class Again:
    """The devices of a job that a launcher has started, and those that it starts again.

    Processes have numbers: the first ones those of their devices, each further one the next number.

    Args:
        titles: of the devices by number, as messages name them.
        start: starts a device as a further process, which asks at these doors; None: no device is started again.
        say: takes lines for a person.
        devices: of the whole job.
        alone: there may be devices of which nothing is known here. Then nobody knows when the job is over: once a device has
            ended well, or nobody has answered for long.
    """

    def __init__(
        self,
        titles: Mapping[int, str],
        start: Callable[[int, int, Sequence[Address]], None] | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        devices: int | None = None,
        alone: bool = False,
    ) -> None:
        self._titles, self._start, self._say, self._clock, self._alone = titles, start, say, clock, alone
        self._tries = {device: Tries(device, clock()) for device in titles}
        self.came = set(titles)
        """All processes that have trained."""
        self._next = len(titles) if devices is None else devices
        self._told: dict[int, str] = {}
        self._generation, self._doors = -1, list[Address]()

    @property
    def members(self) -> set[int]:
        """The processes that train, as far as it is known here. Without any the job is over."""
        return {t.process for t in self._tries.values() if t.process is not None and t.since_s is not None}

    @property
    def running(self) -> set[int]:
        """All processes: also those that ask to be let in."""
        return {t.process for t in self._tries.values() if t.process is not None}

    @property
    def next_s(self) -> float:
        """When `tend` has to be called."""
        return min(t.due_s for t in self._tries.values())

    @property
    def begun(self) -> bool:
        """Whether a device has told where the members of the job answer."""
        return bool(self._doors)

    def stop(self) -> None:
        """The job ends: nothing is started any more."""
        self._start = None
        self._tries = {device: replace(tries, due_s=math.inf) for device, tries in self._tries.items()}

    def hear(self, process: int, line: bytes) -> None:
        """A process tells its launcher something; what is no such line is left out."""
        try:
            words = json.loads(line)
            if "ends" in words:
                self._told[process] = str(words["ends"])
            elif (number := int(words["generation"])) >= self._generation:
                self._generation, self._doors = number, [(str(host), int(port)) for host, port in words["doors"]]
        except (ValueError, TypeError, KeyError):
            return
        if "doors" in words and (device := self.device_of(process)) is not None:
            tries = self._tries[device]
            if tries.since_s is None:  # it has come in
                self.came.add(process)
                self._tries[device] = replace(tries, since_s=self._clock())

    def note(self, ending: Ending) -> None:
        """A process has ended."""
        if ending.status == 0 or ending.stopped_by_us:
            self._end(ending.device, "done", "")
            if self._alone:
                self.stop()
        else:
            self._end(ending.device, *why_ended(ending, self._told.pop(ending.device, None)))

    def lose_host(self, process: int, how: str) -> None:
        """A process is gone with its host. Also one that had left just before, as when its machine is shut down."""
        self._end(process, "host", f"was lost with its host: {shortened(how)}")

    def lose_host_of(self, devices: Sequence[int], how: str) -> None:
        """The host of these devices is gone, after they had left."""
        for device in devices:
            tries = self._tries[device]
            if tries.process is None and tries.why == "left":
                self._tries[device] = replace(tries, pause_s=0.0)
                self._plan(device, "host", f"was lost with its host: {shortened(how)}")

    def tend(self) -> None:
        """Start what is due."""
        now_s = self._clock()
        for device, tries in self._tries.items():
            if tries.due_s > now_s or self._start is None:
                continue
            if tries.is_given_up or not self._doors or (self._alone and tries.silences >= MOST_SILENCES):
                self._tries[device] = replace(tries, due_s=math.inf)
                if tries.why not in ("left", "done") and self._doors:
                    self._say(f"{self._titles[device]} {tries.how}; it is not started again")
                continue
            if tries.pause_s < LONGEST_PAUSE_S:  # then it is always the same
                self._say(f"{self._titles[device]} {tries.how}; it is started again")
            number, self._next = self._next, self._next + 1
            self._tries[device] = started(tries, number)
            self._start(device, number, self._doors)

    def _end(self, process: int, why: Why, how: str) -> None:
        if (device := self.device_of(process)) is not None:
            self._plan(device, why, how)

    def _plan(self, device: int, why: Why, how: str) -> None:
        tries = ended(self._tries[device], why, how, self._clock())
        self._tries[device] = tries if self._start is not None else replace(tries, due_s=math.inf)

    def device_of(self, process: int) -> int | None:
        """The device that is this process at present."""
        return next((device for device, tries in self._tries.items() if tries.process == process), None)
