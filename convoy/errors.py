"""The errors that Convoy raises on purpose. Every message gives the value, the rule and the remedy, within one screen."""

import copy
import difflib
from collections.abc import Iterable
from typing import Self

MOST_SHOWN = 200  # characters that a message shows of a value
MOST_LINE, MOST_LINES = 1500, 60  # characters of a line in a message, and lines


def shown(value: object) -> str:
    """Return a value's text for a message, at most about `MOST_SHOWN` characters."""
    try:
        text = repr(value) if isinstance(value, str | bytes | int | float | list | tuple | dict | None) else str(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of more than 4,300 digits
        return f"a {type(value).__name__} too large to be shown"
    return shortened(text)


def bounded(message: str) -> str:
    """Shorten a message in the middle, by characters and lines: the value is at the start, the remedy at the end."""
    message = message.encode("utf-8", "backslashreplace").decode()  # a file name may not be valid UTF-8
    lines = [shortened(line, MOST_LINE) for line in message.split("\n")]
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} more lines ...", *lines[-half:]]
    return "\n".join(lines)


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """Replace the middle of a text that is longer than `most` characters."""
    if len(text) <= most:
        return text
    left = (most - 40) * 2 // 3
    return f"{text[:left]} ... {len(text) - most + 40:,} characters ... {text[left + 40 - most :]}"


class ConvoyError(Exception):
    """An error that Convoy raises on purpose. The command line prints it without a traceback."""

    def __init__(self, message: str = "") -> None:
        super().__init__(bounded(message))

    def again(self) -> Self:
        """Return a copy without the traceback, because a traceback keeps the tensors of its frames alive."""
        return copy.copy(self)


class InputError(ConvoyError, ValueError):
    """Unusable user input: a name, a number, a file, a plan."""


class PlanError(InputError):
    """A plan that does not fit the model, the devices or itself."""


class DataError(InputError):
    """Images that are missing, truncated or do not match their checksum."""


class DivergedError(ConvoyError):
    """The loss of a step is NaN or infinite."""


class MismatchError(ConvoyError):
    """The devices of one job differ in something that must be the same everywhere."""


class DeviceLostError(ConvoyError):
    """A device of the job (`device`: its id) died, froze past the time limit or left."""

    def __init__(self, device: int, message: str) -> None:
        super().__init__(message)
        self.device = device

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.device, str(self)), vars(self)


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> InputError:
    """Return the error for an unknown name. It lists the choices and suggests the most similar one."""
    choices = sorted(choices)
    known = {choice.partition(":")[0]: choice for choice in choices}
    near = difflib.get_close_matches(name.partition(":")[0][:80], known, n=1)
    meant = f"; did you mean {known[near[0]]}?" if near else ""
    return InputError(f"unknown {kind} {shown(name)}: choose one of {', '.join(choices)}{meant}")
