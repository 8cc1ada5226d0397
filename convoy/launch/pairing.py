"""Copies a job's key to another machine by a one-time code, shown on the first and typed on the second.

SPAKE2 (a password-authenticated key exchange) makes a strong secret of the short code. The key is sent encrypted with it::

    receiver                                            sender
    its SPAKE2 message  ─────────────────────────────►
                        ◄─────────────────────────────  its SPAKE2 message
    a proof, encrypted with the secret  ─────────────►  a wrong code ends here, and is counted
                        ◄─────────────────────────────  the key, encrypted with the secret

Whoever reads or changes these messages without the code learns nothing, except whether one guess per connection was right.
"""

import base64
import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from convoy.comm.environment import listen_at
from convoy.comm.job_key import MAX_BYTES, JobKey, choose, read_key_file, write_key_file
from convoy.config.train_options import read_address
from convoy.errors import InputError

TRIES, VALID_S = 5, 600.0
ANSWER_S = 5.0
"""Time limit of one connection at the sender. The receiver waits longer, because the sender may serve others first."""

_DIGITS = 8
_PROOF = b"the receiver knows the code"
_MOST_BYTES = 2 * MAX_BYTES


def make_or_copy_key(file: Path, to: str | None, source: str | None) -> None:
    """Make a key file, or receive it from the HOST:PORT `source`. Send it from the HOST:PORT `to`, if given."""
    if source is not None:
        receive_key(file, source)
    elif to is None or not file.exists():
        write_key_file(file)
    if to is not None:
        send_key(file, to)
    print(f"{file} has the key. On every machine of the job: --job-key {file}")


def choose_key(file: Path | None, pair: str | None, trust: bool = False) -> None:
    """Choose the key file as `choose` does. With `pair`, first receive it from there."""
    if pair is not None:
        receive_key(file, pair)
    choose(file, trust, os.environ)


def send_key(file: Path, place: str) -> None:
    """Send a key file to the machine where its code is typed. Print the code. InputError as in `send_by_code`."""
    host, port = read_address(place)
    key, code = read_key_file(file), f"{secrets.randbelow(10**_DIGITS):0{_DIGITS}}"
    with listen_at(host, port) as listening:
        print(f"On the other machine, within {VALID_S / 60:g} minutes: convoy fleet key {file.name} --from {place}")
        print(f"Code, for one use: {code[:4]}-{code[4:]}", flush=True)
        print(f"Sent {file} to {send_by_code(key, listening, code)}")


def receive_key(file: Path | None, place: str) -> None:
    """Receive a key file from the machine that runs `send_key`. Ask for its code. InputError as in `receive_by_code`."""
    host, port = read_address(place)
    if file is None:
        raise InputError("--pair without --job-key: name the file into which the key goes")
    if file.exists():
        raise InputError(f"{file} exists already: a job may use it. Give another name, or remove it first")
    print(f"Code that {host} shows: ", end="", flush=True)
    write_key_file(file, receive_by_code(host, port, sys.stdin.readline()))


def send_by_code(key: JobKey, listening: socket.socket, code: str, valid_s: float = VALID_S) -> str:
    """Send the key to the first machine that knows the code, and return its address.

    InputError: the code has expired, or there were too many wrong codes.
    """
    from spake2 import SPAKE2_A, SPAKEError

    until_s, wrong = time.monotonic() + valid_s, 0
    while wrong < TRIES and (left_s := until_s - time.monotonic()) > 0:
        listening.settimeout(left_s)
        with suppress(OSError, ValueError, SPAKEError):  # a peer without the code only ends its own connection
            connected, address = listening.accept()
            with connected:
                channel = _Channel(connected, min(until_s, time.monotonic() + ANSWER_S))
                channel.agree(SPAKE2_A, code)
                if channel.receive() == _PROOF:
                    channel.send(key.pem)
                    return str(address[0])
                wrong += 1
                print(f"A wrong code came from {address[0]} ({wrong} of {TRIES})", flush=True)
    reason = f"{TRIES} wrong codes came" if wrong == TRIES else "nobody typed its code in time"
    raise InputError(f"the key was not sent: {reason}; repeat the command for another code")


def receive_by_code(host: str, port: int, code: str) -> JobKey:
    """Return the key that a machine sends for this code. InputError: it does not answer, or not to this code."""
    from spake2 import SPAKE2_B, SPAKEError

    reason = "its answer was made with another code"
    try:
        with socket.create_connection((host, port), ANSWER_S) as connected:
            channel = _Channel(connected, time.monotonic() + TRIES * ANSWER_S)
            channel.agree(SPAKE2_B, "".join(filter(str.isdecimal, code)))
            channel.send(_PROOF)
            if received := channel.receive():
                return JobKey(received)
    except (OSError, ValueError, SPAKEError) as error:
        reason = str(error)
    raise InputError(
        f"no key from {host}:{port} ({reason}): a code has one use, {TRIES} tries and {VALID_S / 60:g} minutes; check it, or "
        "repeat `convoy fleet key FILE --to HOST:PORT` there for another"
    )


class _Channel:
    """A connection whose messages are lines, encrypted after `agree`."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        self.socket, self.deadline_s = connected, deadline_s
        self._ahead = b""  # received, not yet returned
        self._secret: Any = None

    def agree(self, side: Any, code: str) -> None:
        """Make the common secret of a code."""
        from cryptography.fernet import Fernet

        exchange = side(code.encode())
        self._line_out(exchange.start().hex().encode())
        secret = exchange.finish(bytes.fromhex(self._line_in().decode("ascii")))
        self._secret = Fernet(base64.urlsafe_b64encode(secret))

    def send(self, content: bytes) -> None:
        self._line_out(self._secret.encrypt(content))

    def receive(self) -> bytes:
        """Return the next message; empty if it was made with another secret."""
        from cryptography.fernet import InvalidToken

        with suppress(InvalidToken):
            return bytes(self._secret.decrypt(self._line_in()))
        return b""

    def _line_out(self, line: bytes) -> None:
        self.socket.settimeout(max(0.001, self.deadline_s - time.monotonic()))
        self.socket.sendall(line + b"\n")

    def _line_in(self) -> bytes:
        while b"\n" not in self._ahead:
            self.socket.settimeout(max(0.001, self.deadline_s - time.monotonic()))
            part = self.socket.recv(_MOST_BYTES)
            if not part or len(self._ahead) > _MOST_BYTES:
                raise ConnectionError("the connection was closed")
            self._ahead += part
        line, _, self._ahead = self._ahead.partition(b"\n")
        return line
