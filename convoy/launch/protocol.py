"""What the two sides of a start say to each other: one JSON object per line, whose key "convoy" says what it is."""

import json
import os
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

BEAT_S = 5.0
"""The side that starts a fleet says at least so often that it is there."""

SILENCE_S = 60.0
"""A host that hears nothing for so long ends its devices: the network may be gone without a sign."""


def line(what: str, **fields: Any) -> bytes:
    """A message as it travels."""
    return json.dumps({"convoy": what, **fields}).encode() + b"\n"


def message(text: bytes) -> Message | None:
    """The message in a line; None for anything else, such as what a login shell prints."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "convoy" in found else None


def lines(file: int) -> Iterator[bytes]:
    """The lines that come from a file, without their ends, until it ends. A thread that waits here holds no lock."""
    rest = b""
    while chunk := _read(file):
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _read(file: int) -> bytes:
    try:
        return os.read(file, 65_536)
    except OSError:
        return b""
