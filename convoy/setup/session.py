"""One host as seen from here: the program there gets orders and files, and answers. Every wait is bounded."""

import base64
import json
import os
import posixpath
import re
import select
import shlex
import shutil
import subprocess
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from convoy.errors import InputError, shortened
from convoy.fleet import Host
from convoy.launch.agent import BEAT_S, Message, from_line, to_line
from convoy.launch.exit_status import Ending
from convoy.launch.ssh import remedy, ssh_call, ssh_program, ssh_words
from convoy.launch.supervisor import Interrupts, Start, Supervisor, by_line
from convoy.setup import there
from convoy.setup.actions import Action, Command, Own, Remove, Send
from convoy.setup.state import OWNED, Found, Gpu, Interpreter, Piece, Wish

ANSWER_S = 60.0
"""How long a host may say nothing."""

TOLD_S = 15.0
"""A program that takes longer is heard of so often."""

_SLOWEST_BYTES_PER_S = 100e3
_CHUNK_BYTES = 1 << 20

_REMEDIES = (
    (r"No space left|disk quota", "make room on its disk, or give a folder on another one with --into"),
    (
        "NewConnectionError|Could not fetch|ConnectTimeout|Connection refused|Failed to fetch|error sending|name resolution",
        "it reaches no package index: give one that it reaches with --index, or wheels of all packages with --wheels FOLDER "
        "--index none",
    ),
    (
        "No matching distribution|no version of|No solution found|Could not find a version",
        "its index has no such version for its system: name what the project needs with --requirements, or give --wheels",
    ),
)


class There:
    """The program on one host. Its ssh ends with the supervisor."""

    def __init__(
        self, processes: Supervisor, interrupts: Interrupts, host: Host, root: str, tell: Callable[[str], object]
    ) -> None:
        """Start it.

        Args:
            interrupts: those of `processes`.
            root: setup's folder there; one without a leading / begins at the user's home.
            tell: gets what there is to tell people.

        Raises:
            InputError: there is no ssh here.
        """
        self._host, self._root, self._tell = host, root, tell
        self._processes, self._interrupts = processes, interrupts
        self._inbox: deque[Message] = deque()
        call = ssh_call(ssh_program(os.environ), host, boot())

        def take(line: bytes) -> None:
            if (message := from_line(line)) is not None:
                self._inbox.append(message)

        try:
            self._process = processes.start(
                Start(
                    device=0,
                    name=host.name,
                    command=call,
                    stdin=subprocess.PIPE,
                    stdout=by_line(take),
                    own_session=True,
                )
            )
        except OSError as error:
            raise InputError(
                f"cannot start {call[0]!r}: {error.strerror}; install an ssh client, or correct CONVOY_SSH"
            ) from None
        assert self._process.popen.stdin is not None
        self._input = self._process.popen.stdin.fileno()
        os.set_blocking(self._input, False)

    def look(self, python: str) -> Found:
        """What the host has; nothing is known yet of its files."""
        told = self._ask("look", "looked", root=self._root, python=python, owned=OWNED)
        fields = {name: value for name, value in told.items() if name not in ("convoy", "pythons", "gpus", "placed")}
        return Found(
            **fields, pythons=tuple(Interpreter(*each) for each in told["pythons"]), gpus=tuple(Gpu(*g) for g in told["gpus"]),
            placed=tuple(told["placed"]),
        )  # fmt: skip

    def compared(self, found: Found, wish: Wish) -> Found:
        """With the files of a wish that are missing there or differ."""
        wheels = (*wish.wheels.values(), *wish.extra)
        other = [f"wheels/{path}" for path in self._other(found.wheels, wheels)]
        return replace(found, other=frozenset([*other, *self._other(found.project, wish.project)]))

    def _other(self, folder: str, pieces: Sequence[Piece]) -> list[str]:
        listed = [list(asdict(piece).values()) for piece in pieces]
        return list(self._ask("compare", "compared", folder=folder, pieces=listed)["other"])

    def own(self, found: Found) -> None:
        """Make the folder, and keep others from setting up there at the same time."""
        self._ask("own", "owned", root=found.root)

    def do(self, action: Action, found: Found, here: Mapping[str, Mapping[str, Path]]) -> None:
        """Do one thing.

        Args:
            here: the files to send, by source and path.

        Raises:
            InputError: it failed; with what was said there and the remedy.
        """
        match action:
            case Own():
                note = {"placed": action.placed, "installed": dict(action.installed)}
                self._ask(
                    "write", "written", path=posixpath.join(found.root, OWNED), text=json.dumps(note, indent=1) + "\n"
                )
            case Command():
                if action.text_path is not None:
                    self._ask("write", "written", path=action.text_path, text=action.text)
                self._run(action, found)
            case Send():
                self._send(action, here[action.source])
            case Remove():
                self._ask("remove", "removed", folder=action.folder, paths=action.paths)

    def _run(self, action: Command, found: Found) -> None:
        self._say(to_line("run", argv=action.argv, folder=found.root, limit_s=action.limit_s))
        lines: deque[str] = deque(maxlen=20)
        told_s, deadline_s = time.monotonic(), time.monotonic() + action.limit_s + ANSWER_S
        while (message := self._next(deadline_s))["convoy"] != "ended":
            lines.append(str(message.get("line", "")).strip())
            if time.monotonic() > told_s + TOLD_S and lines[-1]:
                told_s = time.monotonic()
                self._tell(f"... {shortened(lines[-1], 100)}")
        if message["status"] == 0:
            return
        how = (
            f"did not end within {action.limit_s:g} s"
            if message["status"] is None
            else f"failed (status {message['status']})"
        )
        said = [line for line in lines if line]
        errors = [line for line in said if "error" in line.lower()] or said
        cure = _cure(said, "try it there by hand: ")
        by_self = shlex.join(action.argv) if cure.endswith(": ") else ""
        raise InputError(f"{action.title} {how}: {' | '.join(errors[-3:]) or 'no message'}; {cure}{by_self}")

    def _send(self, action: Send, here: Mapping[str, Path]) -> None:
        self._ask("receive", "received", folder=action.folder, pieces=[])  # makes the folder
        if action.rsync and shutil.which("rsync") and action.source == "project" and self._by_rsync(action, here):
            return
        self._say(
            to_line("receive", folder=action.folder, pieces=[list(asdict(piece).values()) for piece in action.pieces])
        )
        for piece in action.pieces:
            left = piece.size_bytes
            with here[piece.path].open("rb") as file:
                # Exactly as many bytes as were told, even where the file has changed; the digest then tells.
                while left:
                    chunk = file.read(min(left, _CHUNK_BYTES)) or bytes(min(left, _CHUNK_BYTES))
                    self._say(chunk)
                    left -= len(chunk)
        self._answer("received")

    def _by_rsync(self, action: Send, here: Mapping[str, Path]) -> bool:
        """Send by rsync, which sends parts of large files, and goes on where it was cut off; whether that went well."""
        some = action.pieces[0].path
        folder = str(here[some])[: -len(some)]
        address = str(self._host.address)
        target = f"[{address}]" if ":" in address else address
        words = [
            "rsync", "-s", "--times", "--perms", "--chmod=u+rw", "--copy-links", "--files-from=-", "--from0",
            "--partial-dir=.convoy-part", "-e", shlex.join(ssh_words(ssh_program(os.environ), self._host)), folder,
            f"{target}:{action.folder}/",
        ]  # fmt: skip
        ended: list[Ending] = []
        with Supervisor(self._interrupts, ended.append) as processes:
            read_end, write_end = os.pipe()
            process = processes.start(Start(device=0, name="rsync", command=words, stdin=read_end, own_session=True))
            os.close(read_end)
            with os.fdopen(write_end, "wb") as names, suppress(BrokenPipeError):
                names.write(b"\0".join(os.fsencode(piece.path) for piece in action.pieces))
            deadline_s = time.monotonic() + ANSWER_S + action.size_bytes / _SLOWEST_BYTES_PER_S
            while not ended and time.monotonic() < deadline_s:
                processes.listen(lambda: ended, BEAT_S)
                self._say(to_line("beat"))
            if ended and ended[0].status == 0:
                return True
            said = " | ".join(process.tail.lines()[:2])
        self._tell(f"rsync did not do it ({said or 'no message'}); sending by ssh")
        return False

    def _ask(self, question: str, answer: str, **fields: object) -> Message:
        self._say(to_line(question, **fields))
        return self._answer(answer)

    def _answer(self, answer: str) -> Message:
        while True:
            message = self._next(time.monotonic() + ANSWER_S)
            if message["convoy"] == answer:
                return message

    def _next(self, deadline_s: float) -> Message:
        """The next message. Meanwhile the host hears that this process is there."""
        while True:
            if not self._processes.listen(lambda: self._inbox or self._process.ended, BEAT_S):
                if time.monotonic() > deadline_s:
                    raise InputError(
                        f"it said nothing for {ANSWER_S:g} s: see whether it is overloaded, and run setup again"
                    )
                self._say(to_line("beat"))
            elif self._inbox:
                message = self._inbox.popleft()
                if message["convoy"] == "failed":
                    where = f"{message['path']}: " if message["path"] else ""
                    words = f"{where}{message['why']}"
                    raise InputError(f"{words}; {_cure([words], 'mend that there')}")
                return message
            else:
                raise InputError(self._trouble())

    def _say(self, text: bytes) -> None:
        """Write to the host. If it is gone, or has something to say that counts more, that is found when it is listened to."""
        deadline_s = time.monotonic() + ANSWER_S
        while text and not self._process.ended:
            with suppress(BlockingIOError, BrokenPipeError):
                text, deadline_s = text[os.write(self._input, text) :], time.monotonic() + ANSWER_S
                continue
            self._processes.listen(lambda: self._process.ended, 0.0)
            if any(message["convoy"] == "failed" for message in self._inbox):
                return
            if time.monotonic() > deadline_s:
                raise InputError(
                    f"it took nothing for {ANSWER_S:g} s: see whether it is overloaded, and run setup again"
                )
            select.select([], [self._input], [], 0.1)

    def _trouble(self) -> str:
        said = [line for line in self._process.tail.lines() if line][-3:]
        status = self._process.popen.returncode
        if any("no Python 3.8" in line for line in said):
            return (
                "it has no python3 to begin with: install one (Debian, Ubuntu: apt install python3 python3-venv), or uv"
            )
        last = f": {' | '.join(said)}" if said else ""
        return f"ssh ended with status {status}{last}; {remedy(self._host, ' '.join(said), 'python3', self._root)}"


def _cure(said: Sequence[str], otherwise: str) -> str:
    text = "\n".join(said)
    return next((cure for pattern, cure in _REMEDIES if re.search(pattern, text, re.IGNORECASE)), otherwise)


def boot() -> str:
    """What the login shell of a host has to run: any Python there, with the program as text, in words that all shells read."""
    source = Path(str(there.__file__)).read_bytes()
    packed = base64.b64encode(zlib.compress(source, 9)).decode()
    program = (
        "import base64,zlib;exec(compile(zlib.decompress(base64.b64decode(b'" + packed + "')),'convoy-setup','exec'),"
        "{'__name__':'__main__'})"
    )
    script = (
        "for p in python3 python /usr/local/bin/python3 /opt/homebrew/bin/python3; do "
        'if "$p" -c "import sys; sys.exit(sys.version_info < (3, 8))" 2>/dev/null; then exec "$p" -u -c "$0"; fi; done; '
        'for u in uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do '
        'if "$u" --version >/dev/null 2>&1; then exec "$u" run --no-project --quiet python -u -c "$0"; fi; done; '
        'echo "no Python 3.8 or newer" >&2; exit 127'
    )
    return shlex.join(["sh", "-c", script, program])
