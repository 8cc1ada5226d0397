"""A headless browser for tests: open pages, change size and colours, read the result.

Spoken to through a pipe, in the DevTools protocol: JSON messages with a zero byte after each.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-features=Translate,MediaRouter,OptimizationHints", "--remote-debugging-pipe"),
)
LIMIT_S = 40.0

needs_browser = pytest.mark.skipif(
    not any(map(shutil.which, PROGRAMS)), reason="needs a browser: apt-get install chromium"
)


class Page:
    """The one page of a browser.

    Attributes:
        events: all that the browser told unasked, in order.
    """

    def __init__(self, into: int, out: int) -> None:
        self.into, self.out = into, out
        self.buffer, self.count, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []

    def begin(self) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, place: Path | str) -> None:
        """Open a file or an address and wait until it is fully loaded."""
        self.events.clear()
        self.ask("Page.navigate", url=place if isinstance(place, str) else place.as_uri())
        deadline_s = time.monotonic() + LIMIT_S
        while not self.told("Page.loadEventFired"):
            self._read(deadline_s)

    def resize(self, width: int, height: int = 844) -> None:
        """Set width and height in CSS pixels; a narrow window is a phone."""
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, scheme: str) -> None:
        """Set the preferred colour scheme: light or dark."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression on the page is true."""
        deadline_s = time.monotonic() + LIMIT_S
        while not self.evaluate(script):
            assert time.monotonic() < deadline_s, f"it did not become true: {script}"
            time.sleep(0.05)

    def point_at(self, selector: str, part: float) -> None:
        """Move the mouse over an element: to this fraction of its width, at half its height."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{where}.scrollIntoView({{block: 'center'}})")
        x, y, width, height = self.evaluate(f"(b => [b.x, b.y, b.width, b.height])({where}.getBoundingClientRect())")
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x + part * width, y=y + height / 2)

    def shoot(self, file: Path) -> None:
        """Take a picture of the whole page."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def told(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event["method"] == method]

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.into, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            answer = self._read(deadline_s)
            if answer.get("id") == self.count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _read(self, deadline_s: float) -> dict[str, Any]:
        """Return the next message; keep unsolicited ones as events."""
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.out], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"the browser said nothing for {LIMIT_S:g} s"
            piece = os.read(self.out, 1 << 20)
            assert piece, "the browser ended"
            self.buffer += piece
        text, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Page]:
    """Start a browser with an empty page; end its processes afterwards.

    Args:
        profile: a folder of its own.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS)))
    (theirs_in, into), (out, theirs_out) = os.pipe(), os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash"]
    process = subprocess.Popen(
        [*shell, program, *OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, env={**os.environ, "HOME": str(profile)},
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        page = Page(into, out)
        page.begin()
        yield page
    finally:
        os.close(into)  # the end of its input ends it
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(out)
