"""One host of a fleet as seen from here: a process, ssh or a local one, with lines to it and from it."""

import collections
import os
import queue
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress

from convoy.errors import InputError
from convoy.launch import protocol
from convoy.launch.host_job import Post
from convoy.launch.protocol import Message

KEPT_LINES = 20
_LAST_WORDS_S = 1.0


class Link:
    """A running process to a host. A thread passes on its messages, another keeps what else is said."""

    def __init__(
        self,
        post: Post,
        command: Sequence[str],
        inbox: "queue.SimpleQueue[tuple[Link, Message | None]]",
        *,
        folder: str | None = None,
        speech: tuple[int, int] | None = None,
    ) -> None:
        """Start the process.

        Args:
            inbox: gets every message, and None when no more will come.
            folder: where a local process runs; None: over ssh.
            speech: files of the terminal that a local process hands to device 0.

        Raises:
            InputError: there is no such program.
        """
        self.post = post
        self.local = folder is not None
        self.speech = speech
        self._noise: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        try:
            # A session of its own: Ctrl-C reaches this process, which then ends the others in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
                pass_fds=speech or (), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise InputError(
                f"host {post.host.name}: cannot start {command[0]!r}"
                f"{f' in {folder}' if folder else ''}: {error.strerror}; "
                f"{'correct python and folder of the host' if folder else 'install an ssh client, or correct CONVOY_SSH'}"
            ) from None
        self._hearing = threading.Thread(target=self._keep_noise, name="convoy-link", daemon=True)
        self._reading = threading.Thread(target=self._read, args=(inbox,), name="convoy-link", daemon=True)
        self._hearing.start()
        self._reading.start()

    @property
    def title(self) -> str:
        """The host as messages name it."""
        return f"host {self.post.host.name} ({self.post.host.address})"

    @property
    def status(self) -> int | None:
        """Exit status of the process; None while it runs."""
        return self._process.poll()

    @property
    def words(self) -> list[str]:
        """The last of what was said there beside messages."""
        return [text for text in self._noise if text]

    def send(self, what: str, **fields: object) -> None:
        """Say something to the far side. If it is gone, nothing happens here: its messages end too."""
        assert self._process.stdin is not None
        with suppress(OSError):
            os.write(self._process.stdin.fileno(), protocol.line(what, **fields))

    def hang_up(self) -> None:
        """No more will be said; the far side then ends its devices, and itself."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()

    def close(self, limit_s: float) -> None:
        """Hang up and wait for the process, at most so long. Afterwards no process, thread or pipe is left."""
        self.hang_up()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread, stream in ((self._reading, self._process.stdout), (self._hearing, self._process.stderr)):
            thread.join(_LAST_WORDS_S)
            if stream is not None and not thread.is_alive():
                stream.close()

    def _read(self, inbox: "queue.SimpleQueue[tuple[Link, Message | None]]") -> None:
        assert self._process.stdout is not None
        for text in protocol.lines(self._process.stdout.fileno()):
            found = protocol.message(text)
            if found is None:
                self._noise.append(text.decode(errors="replace").rstrip())
            else:
                inbox.put((self, found))
        # What explains the end comes by the other pipe, which a child of ssh may hold open.
        self._hearing.join(_LAST_WORDS_S)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS_S)
        inbox.put((self, None))

    def _keep_noise(self) -> None:
        assert self._process.stderr is not None
        for text in protocol.lines(self._process.stderr.fileno()):
            self._noise.append(text.decode(errors="replace").rstrip())
