"""Devices that are stopped (SIGSTOP, a debugger): for the others they are lost, and they would never end by themselves."""

import time

from convoy.launch.supervisor import Process, Supervisor

LOOK_S = 2.0
"""Between two looks at the devices."""


class Stopped:
    """Kills devices that have been stopped for too long.

    Args:
        limit_s: so long, as far as this process was there to see it.
    """

    def __init__(self, devices: Supervisor, limit_s: float) -> None:
        self._devices, self._limit_s = devices, limit_s
        self._looked_s = -LOOK_S
        self._since_s: dict[Process, float] = {}

    def tend(self) -> None:
        """Look at them, if it is time."""
        now_s = time.monotonic()
        passed_s, last_s = now_s - self._looked_s, self._looked_s
        if passed_s < LOOK_S:
            return
        # Ctrl-Z stops this process with its devices.
        before = self._since_s if passed_s < 2 * LOOK_S else {}
        self._looked_s, self._since_s = now_s, {each: before.get(each, now_s) for each in self._devices.suspended}
        for process, since_s in self._since_s.items():
            if last_s - since_s >= self._limit_s - LOOK_S:
                process.popen.kill()
