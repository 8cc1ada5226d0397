"""A web server of this machine, with good and bad addresses, for tests of downloads."""

import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BODY = bytes(range(256)) * 4000
BODY_MD5 = hashlib.md5(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Good and bad servers, one per path; other paths are files of `server.folder`."""

    server: "Server"

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        if name in ("good", "bad", "together"):
            if name == "together":
                self.server.together.wait(timeout=30)
            self.answer(BODY if name != "bad" else b"?" + BODY[1:])
        elif name == "short":
            self.answer(BODY[:1000], announced_bytes=len(BODY))
        elif name == "silent":
            self.answer(BODY[:1000], announced_bytes=len(BODY))
            self.server.closing.wait(timeout=30)
        elif name == "slow":
            self.answer(b"", announced_bytes=len(BODY))
            while not self.server.closing.wait(timeout=0.02):
                self.wfile.write(b"!")
        elif self.server.folder is not None and (self.server.folder / name).is_file():
            self.answer((self.server.folder / name).read_bytes())
        else:
            self.send_error(404)

    def answer(self, body: bytes, announced_bytes: int | None = None) -> None:
        self.server.agents.append(self.headers["User-Agent"])
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) if announced_bytes is None else announced_bytes))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """Local, and quiet about clients that hang up, as the impatient ones here do."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder: Path | None = None
        self.closing = threading.Event()
        self.together = threading.Barrier(4)
        self.agents: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        # Its end waits for the threads of the requests, so that none is left behind.
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.closing.set()
            server.together.abort()
            server.shutdown()
            thread.join(timeout=30)
            assert not thread.is_alive()


def closed_url() -> str:
    """An address of this machine where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}/"
