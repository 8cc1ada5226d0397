"""`convoy report --serve`: the page of a run as it goes on, for a browser on this machine.

It listens on the loopback address alone and answers only who knows the token in its address. A page waits with its next
question until a log has changed; a log is looked at only while somebody waits.
"""

import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from convoy.errors import InputError
from convoy.report.compare import comparison_of
from convoy.report.page import page_of, render
from convoy.runlog.reader import GrowingLog, newest_log

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost", "::1")
"""Names that a browser on this machine asks by, or one behind `ssh -L`. Any other is a foreign page that turned to us."""

MOST_CONNECTIONS = 16
REQUEST_S = 5.0
"""How long a browser may be silent in the middle of its question."""

LOOK_S = 0.5
"""Between two looks at the logs, while somebody waits."""

WAIT_S = 20.0
"""How long a question is held where nothing changes."""

LEAST_REST_S, REST = 1.0, 10
"""A page is not made again within a second, and for so many times as long as it took to make."""

HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LivePage:
    """The page of a run, or of several beside each other, as their logs are now.

    Args:
        runs: folders of runs, logs, or folders of such folders: of those the latest run. None of them needs to be there yet.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        self.runs = runs
        self._logs: dict[Path, GrowingLog] = {}
        self._making = threading.Lock()
        self._version = self._text = ""
        self._rested_s = 0.0

    def newer(self, version: str, closing: threading.Event) -> str | None:
        """The page, once it is another version than that; None where it did not change for `WAIT_S`."""
        deadline_s = time.monotonic() + WAIT_S
        while not closing.is_set():
            now_s = time.monotonic()
            if self._version and self._version != version and now_s < self._rested_s:
                return self._text
            if now_s >= self._rested_s and self._seen() != version:
                return self._made()
            if now_s >= deadline_s:
                return None
            closing.wait(min(LOOK_S, deadline_s - now_s))
        return None

    def _made(self) -> str:
        with self._making:
            seen, start_s = self._seen(), time.monotonic()
            if seen != self._version:
                self._text = self._render(seen)
                self._version = seen
                took_s = time.monotonic() - start_s
                self._rested_s = start_s + took_s + max(LEAST_REST_S, REST * took_s)
            return self._text

    def _render(self, version: str) -> str:
        records, missing = [], []
        paths = [newest_log(run) for run in self.runs]
        self._logs = {path: self._logs.get(path) or GrowingLog(path) for path in paths}
        for run, path in zip(self.runs, paths, strict=True):
            try:
                if path.exists():
                    records.append(self._logs[path].read())
                else:
                    missing.append(f"There is no log in {run} yet.")
            except InputError as error:
                missing.append(str(error))
        if missing:
            return render("waiting.html", version, title="Waiting for a run", lines=missing)
        return page_of(records[0], version) if len(records) == 1 else comparison_of(records, version)

    def _seen(self) -> str:
        """What tells one state of the logs from another."""
        marks = []
        for run in self.runs:
            path = newest_log(run)
            try:
                state = path.stat()
                marks.append(f"{state.st_ino:x}.{state.st_size:x}.{state.st_mtime_ns:x}")
            except OSError:
                marks.append("-")
        return "_".join(marks)


class PageServer(ThreadingHTTPServer):
    """Serves one page under an address that nobody can guess. A context: it ends all its connections.

    Raises:
        InputError: the port cannot be had.
    """

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page, self.token, self.closing = page, secrets.token_urlsafe(18), threading.Event()
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        self._open: dict[socket.socket, threading.Thread] = {}
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise InputError(f"--port {port}: {error.strerror or error}; leave it out for a free one") from None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._open[request] = threading.current_thread()
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._open[request]
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong here. That a browser went away is none of our business."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        self.closing.set()
        super().server_close()
        for request, thread in list(self._open.items()):
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
            thread.join(1.0)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "convoy", ""
    timeout = REQUEST_S

    def do_GET(self) -> None:
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            host = None
        if host not in HOSTS:
            return self._answer(HTTPStatus.MISDIRECTED_REQUEST, "This page is for browsers on this machine.")
        path, _, query = self.path.partition("?")
        place = f"/{self.server.token}/"
        page, closing = self.server.page, self.server.closing
        if secrets.compare_digest(path.encode(), place.encode()):
            text = page.newer("", closing)
        elif secrets.compare_digest(path.encode(), f"{place}update".encode()):
            text = page.newer(parse_qs(query, max_num_fields=4).get("after", [""])[0], closing)
        else:
            return self._answer(HTTPStatus.NOT_FOUND, "There is nothing here: open the address as it was printed.")
        return self._answer(HTTPStatus.NO_CONTENT if text is None else HTTPStatus.OK, text or "")

    def _answer(self, status: HTTPStatus, text: str) -> None:
        content = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def serve(runs: Sequence[Path], port: int = 0, say: Callable[[str], object] = print) -> None:
    """Serve the page of these runs until Ctrl-C.

    Args:
        port: 0 is a free one.

    Raises:
        InputError: the port cannot be had.
    """
    with PageServer(LivePage(runs), port) as server:
        say(f"{server.address}  (for browsers on this machine; Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
