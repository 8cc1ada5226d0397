"""The program that setup runs on a host. It is sent over ssh as text, so it needs the standard library only, Python 3.8.

It reads orders and writes answers, each a line of JSON; after the order "receive" the bytes of files follow. What it has
started ends with it: when its input ends (ssh was cut off, or who started it is gone), or after a minute of silence.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

SILENCE_S = 60.0
BUSY = ".busy"
CHUNK = 1 << 20
ASK = (
    "import json, re, sys; from importlib.metadata import distributions as d; print(json.dumps(["
    "'%d.%d' % sys.version_info[:2], {re.sub(r'[-_.]+', '-', str(e.metadata['Name'])).lower(): e.version for e in d()}]))"
)
INTERPRETER = (
    "import importlib.util as u, sys; print('%d.%d' % sys.version_info[:2], "
    "int(all(u.find_spec(n) for n in ('venv', 'ensurepip'))))"
)
MORE_PLACES = (
    "~/.local/bin",
    "~/.cargo/bin",
    "/usr/local/bin",
    "/opt/homebrew/bin",
    "~/miniconda3/bin",
    "~/anaconda3/bin",
)


class Orders:
    """Standard input, read with a limit of silence."""

    def __init__(self) -> None:
        self.rest = b""

    def more(self) -> bytes:
        """The next bytes; the program ends where there are none."""
        if not select.select([0], [], [], SILENCE_S)[0]:
            sys.exit(3)
        chunk = os.read(0, CHUNK)
        if not chunk:
            sys.exit(0)
        return chunk

    def line(self) -> dict[str, Any]:
        while b"\n" not in self.rest:
            self.rest += self.more()
        line, self.rest = self.rest.split(b"\n", 1)
        order: dict[str, Any] = json.loads(line)
        return order

    def exactly(self, size: int) -> Iterator[bytes]:
        """So many bytes, in pieces."""
        while size:
            chunk, self.rest = (self.rest, b"") if self.rest else (self.more(), b"")
            chunk, self.rest = chunk[:size], chunk[size:] + self.rest
            size -= len(chunk)
            yield chunk


def say(what: str, **fields: object) -> None:
    text = json.dumps(dict(fields, convoy=what)).encode() + b"\n"
    while text:
        text = text[os.write(1, text) :]


def printed(argv: Sequence[str]) -> str:
    """The first line that a program prints; empty if it cannot be run."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def digest(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            found.update(chunk)
    return found.hexdigest()


def where(names: Sequence[str]) -> list[str]:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(os.path.expanduser, MORE_PLACES)])
    return [found for found in (shutil.which(name, path=path) for name in names) if found]


def look(order: dict[str, Any]) -> None:
    """What there is."""
    root = os.path.join(os.path.expanduser("~"), os.path.expanduser(order["root"]))
    pythons = []
    for path in dict.fromkeys(where(["python" + order["python"], "python3", "python"])):
        words = printed([path, "-c", INTERPRETER]).split()
        if len(words) == 2:
            pythons.append([path, words[0], words[1] == "1"])
    gpus = []
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    for line in printed(query).splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and re.match(r"\d+\.\d+$", fields[1]) and fields[2][:1].isdigit():
            gpus.append([fields[0], float(fields[1]), int(fields[2].split(".")[0])])
    owned: bool | None = None
    note: dict[str, Any] = {}
    try:
        with open(os.path.join(root, order["owned"]), encoding="utf-8") as file:
            note, owned = json.load(file), True
    except (OSError, ValueError):
        if os.path.lexists(root) and not (os.path.isdir(root) and set(os.listdir(root)) <= {".lock"}):
            owned = False
    version: str | None = None
    packages: dict[str, str] = {}
    lines = printed([os.path.join(root, "venv/bin/python"), "-c", ASK]).splitlines()
    if owned and lines and not os.path.exists(os.path.join(root, BUSY)):
        version, packages = json.loads(lines[-1])
    near = root
    while not os.path.exists(near):
        near = os.path.dirname(near)
    room = os.statvfs(near)
    say(
        "looked", root=root, system=platform.system(), machine=platform.machine(), pythons=pythons, gpus=gpus, owned=owned,
        uv=next(iter(where(["uv"])), None), rsync=next(iter(where(["rsync"])), None), environment=version, packages=packages,
        placed=note.get("placed", []), installed=note.get("installed", {}), free_bytes=room.f_bavail * room.f_frsize,
    )  # fmt: skip


def compare(order: dict[str, Any]) -> None:
    """Which of some files are missing or differ."""
    other, said_s = [], time.monotonic()
    for path, size, sha256, executable in order["pieces"]:
        full = os.path.join(order["folder"], path)
        try:
            there = os.stat(full)
            same = there.st_size == size and bool(there.st_mode & 0o100) == executable and digest(full) == sha256
        except OSError:
            same = False
        if not same:
            other.append(path)
        if time.monotonic() > said_s + 5:
            said_s = time.monotonic()
            say("busy")
    say("compared", other=other)


def receive(order: dict[str, Any], orders: Orders) -> None:
    """Write the files that follow, each whole or not at all."""
    folder = order["folder"]
    for path, size, sha256, executable in order["pieces"]:
        full = os.path.normpath(os.path.join(folder, path))
        if not full.startswith(os.path.join(folder, "")):
            raise OSError(1, "a path that leads out of the folder", path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        fresh, found = full + ".convoy-part", hashlib.sha256()
        with open(fresh, "wb") as file:
            for chunk in orders.exactly(size):
                file.write(chunk)
                found.update(chunk)
        os.chmod(fresh, 0o755 if executable else 0o644)
        if found.hexdigest() != sha256:
            os.unlink(fresh)
            raise OSError(1, "it was changed here while it was sent; run setup again", path)
        if os.path.isdir(full) and not os.path.islink(full):
            os.rmdir(full)
        os.replace(fresh, full)
    say("received")


def remove(order: dict[str, Any]) -> None:
    for path in order["paths"]:
        full = os.path.normpath(os.path.join(order["folder"], path))
        if not full.startswith(os.path.join(order["folder"], "")):
            continue
        with contextlib.suppress(OSError):
            os.unlink(full)
            above = os.path.dirname(full)
            while above != order["folder"]:
                os.rmdir(above)  # as long as it is empty
                above = os.path.dirname(above)
    say("removed")


def write(order: dict[str, Any]) -> None:
    os.makedirs(os.path.dirname(order["path"]), exist_ok=True)
    fresh = order["path"] + ".convoy-part"
    with contextlib.suppress(OSError):
        os.unlink(fresh)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(order["text"])
    os.replace(fresh, order["path"])
    say("written")


def run(order: dict[str, Any]) -> None:
    """Run a program, tell what it prints, and how it ended. Silence on the orders' side ends it.

    A file stays behind where it did not end by itself: an environment that is half made looks like a whole one.
    """
    busy = os.path.join(order["folder"], BUSY)
    open(busy, "w").close()
    child = subprocess.Popen(
        order["argv"], cwd=order["folder"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    output = child.stdout.fileno()
    heard_s, end_s, rest = time.monotonic(), time.monotonic() + order["limit_s"], b""
    try:
        while True:
            ready = select.select([0, output], [], [], 1.0)[0]
            if 0 in ready:
                if not os.read(0, CHUNK):
                    sys.exit(0)
                heard_s = time.monotonic()
            if output in ready:
                chunk = os.read(output, CHUNK)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    say("said", line=line.decode(errors="replace")[-2000:])
            if time.monotonic() > heard_s + SILENCE_S:
                sys.exit(3)
            if time.monotonic() > end_s:
                say("ended", status=None)
                return
        status = child.wait(10)
        if status >= 0:
            os.unlink(busy)
        say("ended", status=status)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def own(order: dict[str, Any]) -> None:
    os.makedirs(order["root"], exist_ok=True)
    lock = os.open(os.path.join(order["root"], ".lock"), os.O_WRONLY | os.O_CREAT, 0o666)  # held until the end
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    say("owned")


ORDERS = {"look": look, "own": own, "compare": compare, "remove": remove, "write": write, "run": run}


def main() -> int:
    orders = Orders()
    while True:
        order = orders.line()
        try:
            if order["convoy"] == "receive":
                receive(order, orders)
            elif order["convoy"] in ORDERS:
                ORDERS[order["convoy"]](order)
        except OSError as error:
            busy = isinstance(error, BlockingIOError)
            why = "another convoy setup is at work there; wait for it" if busy else error.strerror
            say("failed", why=why, path=error.filename)
            return 1


if __name__ == "__main__":
    sys.exit(main())
